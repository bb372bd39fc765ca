"""What a running native call points into lives until it returns, whoever lets go of it meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pdq.engine import fused, program, team
from pdq.engine.base import Segment
from pdq.engine.blocks import Norm
from pdq.engine.compiled_product import CompiledProduct
from pdq.engine.fused import FusedForward
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.program import Call
from pdq.engine.runner import TorchEngine
from pdq.engine.stages import Linear, at
from tests.engine.pd import GREEDY, engine
from tests.engine.tiny import COMPILED, compiled_model

pytestmark = [
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(not COMPILED, reason="oneDNN's products are used on this CPU"),
]
PROMPTS = ([1, 2, 3, 4, 5, 6, 7], [8, 9, 10], [11, 12, 13, 14, 15])
SLOT_TOKENS = 128


def fused_engine() -> TorchEngine:
    """Of a model that is compiled as a whole."""
    it = engine(compiled_model("llama compiled"))
    assert isinstance(it._forward, FusedForward)
    return it


def during_the_native_call(monkeypatch: pytest.MonkeyPatch, look: Callable[[], None]) -> list[int]:
    """`look` runs when the address of every job has been taken; the list has an entry for each native call."""
    calls: list[int] = []

    def run(address: int, fields: Sequence[str], values: Mapping[str, int], threads: int) -> None:
        calls.append(address)
        look()
        team.run(address, fields, values, threads)

    monkeypatch.setattr(program, "team", SimpleNamespace(run=run, barrier=team.barrier))
    return calls


def segments(it: TorchEngine) -> list[Segment]:
    """Two single tokens and a chunk, in slots of their own."""
    slots = [it.open(SLOT_TOKENS) for _ in PROMPTS]
    for slot, ids in zip(slots[:2], PROMPTS, strict=False):
        it.forward([Segment(slot, ids[:-1])])
    fed = (PROMPTS[0][-1:], PROMPTS[1][-1:], PROMPTS[2])
    return [Segment(slot, ids, GREEDY) for slot, ids in zip(slots, fed, strict=True)]


def test_slots_that_are_closed_during_a_compiled_forward_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    it = fused_engine()
    right = it.logits(segments(it))
    running = segments(it)
    slots = [s.slot for s in running if isinstance(s.slot, TorchSlot)]
    memory = [weakref.ref(tensor) for slot in slots for tensor in slot.memory]
    spoilers: list[Tensor] = []

    def close() -> None:
        for slot in slots:
            it.close(slot)
        gc.collect()
        assert all(tensor() is not None for tensor in memory)
        shape = next(tensor for tensor in memory)().shape  # type: ignore[union-attr]
        spoilers.extend(torch.full(shape, float("nan")) for _ in range(20))  # what was freed would be taken again

    calls = during_the_native_call(monkeypatch, close)
    found = it.logits(running)
    assert len(calls) == 1
    assert torch.equal(found, right)
    gc.collect()
    assert [tensor() for tensor in memory] == [None] * len(memory)


def test_rows_of_drafts_keep_the_memory_of_a_slot_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    it = fused_engine()
    slot = it.open(SLOT_TOKENS)
    assert isinstance(slot, TorchSlot)
    it.forward([Segment(slot, PROMPTS[0])])
    memory = weakref.ref(slot.memory[0])

    def close() -> None:
        it.close(slot)
        gc.collect()
        assert memory() is not None

    calls = during_the_native_call(monkeypatch, close)
    it.logits([Segment(slot, [5, 6, 7], GREEDY, drafts=2, further=[])])
    assert len(calls) == 1


def test_an_engine_that_is_dropped_during_a_compiled_forward_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    it = fused_engine()
    right = it.logits(segments(it))
    running = segments(it)
    assert isinstance(it._forward, FusedForward)
    decoder = it._forward.decoder
    parts = [decoder.norm.weight, decoder.head._weight, decoder.blocks[-1].gated._weight, it._forward._memory["h"]]
    seen = [weakref.ref(tensor) for tensor in parts]
    del decoder, parts

    def drop() -> None:
        del it._forward
        gc.collect()
        assert all(tensor() is not None for tensor in seen)

    during_the_native_call(monkeypatch, drop)
    assert torch.equal(it.logits(running), right)


def test_calls_of_a_linear_layer_keep_the_weights_of_every_block() -> None:
    products = [CompiledProduct(torch.randn(8, 6), torch.randn(8)) for _ in range(3)]
    x, out = torch.randn(5, 6), torch.empty(5, 8)
    right = products[-1](x)
    weights = [weakref.ref(product._weight) for product in products]
    calls = Linear(products).calls({"x": x}, "x", out, 1, 5)
    del products
    gc.collect()
    assert all(weight() is not None for weight in weights)
    program.run([calls], 1)
    torch.testing.assert_close(out, right, rtol=0, atol=1e-6)


def test_a_call_keeps_its_input_and_output_until_it_is_dropped() -> None:
    products = [CompiledProduct(torch.randn(8, 6), None)]
    x, out = torch.randn(5, 6), torch.empty(5, 8)
    seen = [weakref.ref(x), weakref.ref(out)]
    calls = Linear(products).calls({"x": x}, "x", out, 1, 5)
    del x, out
    gc.collect()
    assert all(tensor() is not None for tensor in seen)
    del calls
    gc.collect()
    assert [tensor() for tensor in seen] == [None, None]


def test_jobs_of_norms_keep_their_weights() -> None:
    norms = [Norm(torch.randn(6), 1e-5) for _ in range(2)]
    right = norms[1].weight.clone()
    weights = [weakref.ref(norm.weight) for norm in norms]
    h, every, out = torch.randn(4, 6), np.arange(4), torch.empty(4, 6)
    expected = h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * right
    where = at(h=h, delta=torch.zeros(4, 6), out=out)
    jobs = fused._norms(norms).filled(rows=4, h_from=every.ctypes.data, delta_from=every.ctypes.data, **where)
    del norms
    gc.collect()
    assert all(weight() is not None for weight in weights)
    program.run([[Call(fused._function("norm", torch.float32), jobs)]], 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_a_released_slot_hands_out_no_address_and_neither_does_a_copy_of_it() -> None:
    slot = TorchSlot(Layout((LayerShape(1, 8, 8),), torch.float32), 8, torch.device("cpu"))
    later = slot.ahead(2)
    assert later.addresses().tolist() == slot.addresses().tolist()
    assert slot.release()
    for each in (slot, later, slot.ahead(1)):
        with pytest.raises(ValueError, match="the slot is closed"):
            each.addresses()
        with pytest.raises(ValueError, match="the slot is closed"):
            _ = each.memory
        with pytest.raises(ValueError, match="the slot is closed"):
            each.planes(0, 1)
    assert not later.release()


def test_a_forward_over_a_closed_slot_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    it = fused_engine()
    slot = it.open(SLOT_TOKENS)
    it.close(slot)
    calls = during_the_native_call(monkeypatch, lambda: None)
    with pytest.raises(ValueError, match="the slot is closed"):
        it.forward([Segment(slot, [1], GREEDY)])
    assert calls == []


def test_memory_between_functions_that_is_made_halfway_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    it = fused_engine()
    forward = it._forward
    assert isinstance(forward, FusedForward)
    names, rows = set(forward._memory), 10 * fused._GROWTH
    empty = torch.empty

    def out_of_memory(*args: object, **options: object) -> Tensor:
        if options.get("dtype") is torch.uint8:
            raise RuntimeError("no memory")
        return empty(*args, **options)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", out_of_memory)
        with pytest.raises(RuntimeError, match="no memory"):
            forward._room(rows)
    found = forward._room(rows)
    assert set(found) == names
    assert {len(tensor) for tensor in found.values()} == {rows}
