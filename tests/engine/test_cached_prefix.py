"""The built-in model in bfloat16: after a cached prefix it says what it says without one, whichever kernels compute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pdq.engine import cpu, kernel_selection
from pdq.engine.base import Segment
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.model import load_model
from pdq.engine.products import Bmm
from pdq.engine.runner import TorchEngine
from pdq.messages import Message, SamplingParams
from pdq.models import find_model, load_tokenizer
from tests.engine.gates import use_kernels

GREEDY = SamplingParams(temperature=0)
FILL = "The quick brown fox jumps over the lazy dog, and then he goes home to eat. "
CHOSEN = kernel_selection.select(torch.bfloat16)
KERNELS = [
    replace(CHOSEN, prefill=False, bmm=Bmm()),
    # Chosen, and not slower by a factor of ten, only where the CPU multiplies bfloat16.
    *([replace(CHOSEN, prefill=False, bmm=Bmm(chunks=True, singles=True))] if cpu.host().pair_products else []),
    CHOSEN,
]
pytestmark = [pytest.mark.real_model, pytest.mark.timeout(400)]  # float32 of a long prompt takes long without AVX-512


@pytest.fixture(scope="module")
def folder() -> Path:
    return find_model("smollm2-135m-instruct").folder


def engine(folder: Path, dtype: str) -> TorchEngine:
    return TorchEngine(
        load_model(folder, dtype=dtype, device="cpu"), fingerprint=bytes(32), dtype=dtype,
        max_model_len=1024, eos_ids=frozenset(), kv_memory_bytes=1 << 28,
    )  # fmt: skip


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.text)
def test_a_cached_prefix_does_not_change_the_answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: KernelSet
) -> None:
    use_kernels(monkeypatch, kernels)
    tokenizer, it = load_tokenizer("torch", folder), engine(folder, "bfloat16")
    ids = tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    cold = it.open(64)
    it.forward([Segment(cold, ids, GREEDY)])
    (block,) = it.export(cold, 0, 32, 32, 0)
    warm = it.open(64)
    it.load(warm, 0, [(32, block)])
    tokens = it.forward([Segment(warm, ids[32:], GREEDY)])
    for position in range(1, 8):
        tokens += it.forward([Segment(warm, tokens[-1:], GREEDY, position)])  # type: ignore[arg-type]
    assert tokenizer.decode([t for t in tokens if t is not None]).strip() == "The capital of France is Paris."


def logits(it: TorchEngine, ids: list[int], cut: int, then: list[int]) -> torch.Tensor:
    """Float32 `[1 + len(then), vocab]`: after the prompt, and after each of `then`. cut: prompt tokens from a cache."""
    slot, first = it.open(len(ids) + len(then)), it.open(len(ids))
    it.forward([Segment(first, ids)])
    it.load(slot, 0, [(32, block) for block in it.export(first, 0, cut, 32, 0)])
    found = [it.logits([Segment(slot, ids[cut:], GREEDY)])]
    found += [it.logits([Segment(slot, [token], GREEDY)]) for token in then]
    it.close(slot)
    it.close(first)
    return torch.cat(found)


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels.text)
def test_bfloat16_is_as_near_to_float32_with_every_kernel_and_cut(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kernels: KernelSet
) -> None:
    use_kernels(monkeypatch, kernels)
    tokenizer, exact, it = load_tokenizer("torch", folder), engine(folder, "float32"), engine(folder, "bfloat16")
    ids = tokenizer.encode_chat([Message("user", FILL * 35 + "What is the capital of France?")])
    then = tokenizer.encode("The capital of France is Paris.")
    expected = torch.log_softmax(logits(exact, ids, 0, then), -1)
    for cut in (0, 32, len(ids) // 32 * 32):
        found = torch.log_softmax(logits(it, ids, cut, then), -1)
        divergence = (expected.exp() * (expected - found)).sum(-1)
        assert float(divergence.max()) < 0.02  # nats; a single wrong block or mask gives more than 1
