"""KV in other forms: exact sizes and roundings, and two engines of different dtypes that exchange it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdq.engine.base import Segment, Slot
from pdq.engine.kv import LayerShape, Layout
from pdq.engine.runner import TorchEngine
from pdq.errors import ConfigError
from pdq.kv_form import Int8, form
from tests.engine.pd import GREEDY, engine
from tests.engine.tiny import tiny_model

HEAD = 7
LAYOUT = Layout((LayerShape(2, 4, 4), LayerShape(1, 6, 2)), torch.float32)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def run_of(numbers: torch.Tensor) -> memoryview:
    """As an engine exports it: headroom, then the numbers."""
    raw = numbers.contiguous().view(torch.uint8).numpy().tobytes()
    return memoryview(bytearray(HEAD) + raw)


def random_kv(dtype: str, tokens: int = 3) -> torch.Tensor:
    numbers = torch.randn(LAYOUT.token_bytes // 4 * tokens, generator=torch.Generator().manual_seed(1)) * 5
    return numbers.to(DTYPES[dtype])


@pytest.mark.parametrize("own", DTYPES)
@pytest.mark.parametrize("codec", ["raw", *DTYPES])
def test_a_float_form_is_what_torch_would_convert_to(own: str, codec: str) -> None:
    numbers = random_kv(own)
    it = form(codec, own, LAYOUT.text, LAYOUT.token_bytes // 4 * numbers.itemsize)
    packed = it.pack(run_of(numbers), HEAD)
    wire = numbers.to(DTYPES[own if codec == "raw" else codec])
    assert bytes(packed[HEAD:]) == wire.view(torch.uint8).numpy().tobytes()
    assert len(packed) - HEAD == 3 * it.token_bytes + it.fixed_bytes
    back = torch.frombuffer(bytearray(it.unpack(packed[HEAD:])), dtype=DTYPES[own])
    assert torch.equal(back, wire.to(DTYPES[own]))


@pytest.mark.parametrize("own", DTYPES)
def test_int8_keeps_each_number_within_half_a_step_of_its_heads_scale(own: str) -> None:
    numbers = random_kv(own)
    it = form("int8", own, LAYOUT.text, 1)
    packed = it.pack(run_of(numbers), HEAD)
    assert it.token_bytes == 2 * 2 * 4 + 6 + 2
    assert it.fixed_bytes == 4 * (2 + 2 + 1 + 1)  # a scale for each layer, k|v and head
    assert len(packed) == HEAD + it.fixed_bytes + 3 * it.token_bytes
    back = torch.frombuffer(bytearray(it.unpack(packed[HEAD:])), dtype=DTYPES[own])
    at = 0
    for heads, dim in ((2, 4), (2, 4), (1, 6), (1, 2)):
        for _ in range(heads):
            part, found = (x[at : at + 3 * dim].float() for x in (numbers, back))
            step = part.abs().max() / 127
            assert (part - found).abs().max() <= step * 0.5 + part.abs().max() * 0.004  # and the rounding of own
            at += 3 * dim
    assert at == len(numbers)


def test_int8_of_zeros_is_zeros_and_of_infinities_an_error() -> None:
    it = Int8("float32", [(2, 1, 4)])
    zeros = torch.zeros(2 * 4 * 3)
    assert it.unpack(it.pack(run_of(zeros), HEAD)[HEAD:]) == bytes(4 * len(zeros))
    with pytest.raises(ValueError, match="not finite"):
        it.pack(run_of(zeros + torch.inf), HEAD)


def test_bfloat16_rounds_to_even_and_keeps_what_is_not_a_number() -> None:
    numbers = torch.tensor([1.00390625, 1.01171875, -0.0, torch.inf, torch.nan, 3e38, -1e-40])
    it = form("bfloat16", "float32", LAYOUT.text, 4)
    packed = np.frombuffer(it.pack(run_of(numbers), HEAD)[HEAD:], np.uint16)
    expected = numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert (packed[:4] == expected[:4]).all()
    assert (packed[5:] == expected[5:]).all()
    assert torch.frombuffer(bytearray(it.unpack(packed.data.cast("B"))), dtype=torch.float32)[4].isnan()


def test_an_engine_without_heads_takes_raw_alone() -> None:
    with pytest.raises(ConfigError, match="kv_codec: int8 is for KV of a model"):
        form("int8", "float32", "scripted-8", 8)


def exchange(it: TorchEngine, other: TorchEngine, codec: str, ids: list[int]) -> Slot:
    """Prefill on `it`, KV through the form that both declare, and a slot of `other` with it."""
    away, home = (form(codec, e.spec.dtype, e.spec.layout, e.spec.token_bytes) for e in (it, other))
    slot = it.open(len(ids))
    it.forward([Segment(slot, ids)])
    taken = other.open(2 * len(ids))
    for i, run in enumerate(it.export(slot, 0, len(ids), 4, HEAD)):
        payload = away.pack(run, HEAD)[HEAD:]
        other.load(taken, 4 * i, [(4, home.unpack(payload))])
    return taken


@pytest.mark.parametrize(("codec", "tolerance"), [("bfloat16", 0.06), ("float16", 0.04), ("float32", 0.03)])
def test_engines_of_different_dtypes_exchange_kv_through_a_declared_form(codec: str, tolerance: float) -> None:
    half, full = engine(tiny_model("llama").bfloat16(), dtype="bfloat16"), engine(tiny_model("llama"))
    ids = [(i * 7) % 101 for i in range(24)]
    for it, other in ((half, full), (full, half)):
        alone = other.open(64)
        other.forward([Segment(alone, ids)])
        taken = exchange(it, other, codec, ids)
        expected, found = (other.logits([Segment(s, [5], GREEDY)]) for s in (alone, taken))
        assert float((found - expected).norm() / expected.norm()) < tolerance


def test_int8_kv_leaves_the_next_tokens_nearly_as_likely() -> None:
    it = engine(tiny_model("llama"))
    ids = [(i * 7) % 101 for i in range(24)]
    alone = it.open(64)
    it.forward([Segment(alone, ids)])
    taken = exchange(it, it, "int8", ids)
    expected, found = (it.logits([Segment(s, [5], GREEDY)]) for s in (alone, taken))
    assert 0 < float((found - expected).norm() / expected.norm()) < 0.03
