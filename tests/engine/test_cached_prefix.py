"""The built-in model in bfloat16: an answer after a cached prefix is the answer without one."""

from __future__ import annotations

import pytest

from pdq.engine.base import Segment
from pdq.engine.model import load_model
from pdq.engine.runner import TorchEngine
from pdq.messages import Message, SamplingParams
from pdq.models import find_model, load_tokenizer


@pytest.mark.real_model
def test_a_cached_prefix_does_not_change_the_answer_in_bfloat16() -> None:
    folder = find_model("smollm2-135m-instruct").folder
    tokenizer = load_tokenizer("torch", folder)
    engine = TorchEngine(
        load_model(folder, dtype="bfloat16", device="cpu"), fingerprint=bytes(32), dtype="bfloat16",
        max_model_len=256, eos_ids=frozenset(), kv_memory_bytes=1 << 28,
    )  # fmt: skip
    ids = tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    greedy = SamplingParams(temperature=0)
    cold = engine.open(64)
    engine.forward([Segment(cold, ids, greedy)])
    (block,) = engine.export(cold, 0, 32, 32, 0)
    warm = engine.open(64)
    engine.load(warm, 0, [(32, block)])
    tokens = engine.forward([Segment(warm, ids[32:], greedy)])
    for position in range(1, 8):
        tokens += engine.forward([Segment(warm, tokens[-1:], greedy, position)])  # type: ignore[arg-type]
    assert tokenizer.decode([t for t in tokens if t is not None]).strip() == "The capital of France is Paris."
