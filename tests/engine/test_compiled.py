"""The compiled decode kernel: exact at every edge of its splits, the same bits in any batch and on any threads."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdq.engine import compiled, cpu, flash, kernels
from pdq.engine.attention import Step
from pdq.engine.base import Segment
from pdq.engine.code import Code
from pdq.engine.compiled import Batch
from pdq.engine.flash import SPLIT, Shape
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from tests.engine.gates import use_cpu, use_kernels
from tests.engine.pd import GREEDY, engine
from tests.engine.tiny import tiny_model

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 3 * SPLIT + 7)
# query heads per kv head, kv heads, dim of K, dim of V: the built-in model's, an 8B's, odd sizes, blocks of heads.
SHAPES = (
    (3, 3, 64, 64),
    (4, 2, 128, 128),
    (1, 2, 80, 80),
    (7, 1, 64, 96),
    (2, 2, 8, 8),
    (5, 1, 48, 16),
    (1, 1, 2, 256),
)
pytestmark = pytest.mark.usefixtures("threads")


def slot_of(length: int, layer: LayerShape, dtype: torch.dtype, capacity: int | None = None) -> TorchSlot:
    """Random KV of `length` tokens, the last one still to be counted; memory beyond is not a number."""
    slot = TorchSlot(Layout((layer,), dtype), capacity or length, torch.device("cpu"))
    for plane in slot.planes(0, slot.capacity):
        plane.fill_(float("nan"))
    for plane in slot.planes(0, length):
        plane.normal_()
    slot.length = length - 1
    return slot


def attend(
    slots: Sequence[TorchSlot], layer: LayerShape, query: Tensor, scaling: float | None = None, threads: int = 1
) -> Tensor:
    torch.set_num_threads(threads)
    found = Batch(slots).attend(0, layer, query, scaling)
    assert found is not None
    return found


def exact(slot: TorchSlot, window: int | None, query: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """By torch's kernel in `dtype`: query `[heads, dim]` -> `[heads, value_dim]` in float64."""
    end = slot.length + 1
    key, value = (plane.to(dtype) for plane in slot.planes(max(0, end - (window or end)), end))
    rows = query.view(1, key.shape[1], -1, query.shape[1]).to(dtype)
    return functional.scaled_dot_product_attention(rows, key, value).reshape(len(query), -1).double()


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_at_least_as_near_to_exact_as_torchs_kernel(
    shape: tuple[int, int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    group, kv_heads, key_dim, value_dim = shape
    layer = LayerShape(kv_heads, key_dim, value_dim, window)
    slots = [slot_of(length, layer, dtype) for length in LENGTHS]
    query = torch.randn((1, group * kv_heads, len(slots), key_dim)).to(dtype)
    found = attend(slots, layer, query)[0].double()
    rows = query[0].transpose(0, 1)
    right = [exact(slot, window, row) for slot, row in zip(slots, rows, strict=True)]
    torchs = [exact(slot, window, row, dtype) for slot, row in zip(slots, rows, strict=True)]
    errors = [float((ours - it).norm() / it.norm()) for ours, it in zip(found, right, strict=True)]
    assert max(errors) < (0.004 if dtype is torch.bfloat16 else 1e-6)
    if dtype is torch.bfloat16:
        theirs = [float((them - it).norm() / it.norm()) for them, it in zip(torchs, right, strict=True)]
        assert sum(errors) <= 1.001 * sum(theirs)


@pytest.mark.parametrize("shape", [(3, 2, 64, 64), (9, 1, 80, 80), (6, 1, 192, 8)], ids=str)
def test_without_an_instruction_for_pairs_results_are_the_same(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int, int, int]
) -> None:
    group, kv_heads, key_dim, value_dim = shape
    layer = LayerShape(kv_heads, key_dim, value_dim)
    slots = [slot_of(length, layer, torch.bfloat16) for length in LENGTHS]
    query = torch.randn((1, group * kv_heads, len(slots), key_dim)).bfloat16()
    with_it = attend(slots, layer, query)
    use_cpu(monkeypatch, cpu.host().without("avx512bf16"))
    made = Code([flash.attend(Shape(torch.bfloat16, group, *shape[1:]))])
    monkeypatch.setattr(compiled, "attention", lambda shape: made.address("attend"))
    torch.testing.assert_close(attend(slots, layer, query), with_it, rtol=0.008, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 17, SPLIT + 5])
@pytest.mark.parametrize("group", [1, 2, 3, 5])
def test_a_head_whose_query_is_not_a_number_spoils_no_other(group: int, tokens: int) -> None:
    layer = LayerShape(1, 64, 64)
    query = torch.randn((1, group, 1, 64)).bfloat16()
    query[0, group // 2] = float("nan")
    found = attend([slot_of(tokens, layer, torch.bfloat16)], layer, query)[0, 0]
    assert torch.isnan(found).all(-1).tolist() == [head == group // 2 for head in range(group)]
    assert torch.isfinite(found).all(-1).tolist() == [head != group // 2 for head in range(group)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_neither_neighbours_nor_threads_change_a_bit(dtype: torch.dtype) -> None:
    layer = LayerShape(3, 64, 64)
    slots = [slot_of(length, layer, dtype) for length in LENGTHS]
    query = torch.randn((1, 9, len(slots), 64)).to(dtype)
    together = attend(slots, layer, query)
    alone = [attend([slot], layer, query[:, :, i : i + 1]) for i, slot in enumerate(slots)]
    assert torch.equal(together, torch.cat(alone, 1))
    for _ in range(20):
        assert torch.equal(together, attend(slots, layer, query, threads=2))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted as Linux does")
def test_its_threads_are_torchs_own() -> None:
    layer = LayerShape(2, 64, 64)
    slot = slot_of(4 * SPLIT, layer, torch.bfloat16)
    query, tasks = torch.randn((1, 4, 1, 64)).bfloat16(), Path("/proc/self/task")
    torch.set_num_threads(2)
    torch.ones(1 << 22).sum()
    before = {task.name for task in tasks.iterdir()}
    for threads in (1, 2):
        attend([slot], layer, query, threads=threads)
    assert {task.name for task in tasks.iterdir()} <= before


def test_a_slot_closed_during_a_step_keeps_its_memory() -> None:
    layer = LayerShape(1, 64, 64)
    slot = slot_of(10, layer, torch.bfloat16)
    memory, batch = weakref.ref(slot.memory[0]), Batch([slot])
    slot.release()
    assert memory() is not None
    del batch
    assert memory() is None


def test_scores_of_any_size_become_weights() -> None:
    layer = LayerShape(1, 32, 32)
    slot = slot_of(300, layer, torch.float32)
    key, value = slot.planes(0, 300)
    key[0, 0] = torch.linspace(-1, 1, 300)[:, None]
    for scaling, expected in ((1e6, value[0, 0, 299]), (-1e6, value[0, 0, 0]), (0.0, value[0, 0].mean(0))):
        found = attend([slot], layer, torch.ones((1, 1, 1, 32)), scaling)[0, 0, 0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("token", [0, SPLIT - 1, SPLIT + 3])
def test_what_is_not_a_number_stays_so_and_stays_where_it_is(plane: int, token: int) -> None:
    layer = LayerShape(2, 64, 64)
    slots = [slot_of(SPLIT + 4, layer, torch.bfloat16, 2 * SPLIT) for _ in range(2)]
    slots[1].planes(token, token + 1)[plane][:, 1] = float("nan")
    found = attend(slots, layer, torch.randn((1, 4, 2, 64)).bfloat16())[0]
    assert torch.isfinite(found).all(-1).tolist() == [[True] * 4, [True, True, False, False]]


def test_rows_of_any_strides_are_written_to_their_places_alone() -> None:
    layer = LayerShape(2, 8, 4)
    slots = [slot_of(length, layer, torch.bfloat16, 20) for length in (1, 7, 20)]
    before = [[plane.clone() for plane in slot.planes(0, 20)] for slot in slots]
    key = torch.randn((1, 3, 2, 8)).bfloat16().transpose(1, 2)
    value = torch.randn((1, 2, 4, 3)).transpose(2, 3)  # not even its rows are contiguous, nor is it bfloat16
    Batch(slots).write(0, key, value)
    for i, (slot, old) in enumerate(zip(slots, before, strict=True)):
        for plane, was, new in zip(slot.planes(0, 20), old, (key, value), strict=True):
            was[:, :, slot.length] = new[:, :, i]
            assert torch.equal(plane.nan_to_num(9), was.nan_to_num(9))


def test_other_shapes_and_types_are_left_to_the_other_kernels() -> None:
    layer = LayerShape(1, 64, 64)
    for dtype, group in ((torch.float16, 1), (torch.bfloat16, 64)):
        slot = slot_of(5, layer, dtype)
        assert Batch([slot]).attend(0, layer, torch.randn((1, group, 1, 64)).to(dtype), None) is None
    assert not Shape(torch.bfloat16, 1, 1, 7, 8).supported


def test_single_tokens_go_through_it_and_chunks_beside_them_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    for owner, name in ((Batch, "attend"), (kernels, "decode"), (kernels, "prefill")):
        stock = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, stock=stock, name=name: used.append(name) or stock(*a))
    use_kernels(monkeypatch, KernelSet(decode=True))
    it, ids = engine(tiny_model("llama")), [5, 6, 7, 8, 9]
    assert used[-4:] == ["attend", "attend", "prefill", "prefill"]  # at load, so that no request waits for a compiler
    used.clear()
    slots = [it.open(10) for _ in range(2)]
    it.forward([Segment(slots[0], ids)])
    mixed = it.logits([Segment(slots[1], ids, GREEDY), Segment(slots[0], [3], GREEDY)])
    assert used == ["prefill"] * 2 + ["attend", "prefill"] * 2
    stock = tiny_model("llama")
    expected = [stock(torch.tensor([text])).logits[0, -1] for text in (ids, [*ids, 3])]
    torch.testing.assert_close(mixed, torch.stack(expected), rtol=0, atol=1e-4)


def test_soft_caps_are_left_to_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch, KernelSet(decode=True))
    monkeypatch.setattr(Batch, "attend", lambda *a: pytest.fail("soft-capped scores in the plain kernel"))
    it = engine(tiny_model("gemma2"))
    slot = it.open(10)
    found = torch.cat([it.logits([Segment(slot, [token], GREEDY)]) for token in (5, 6, 7)])
    torch.testing.assert_close(found, tiny_model("gemma2")(torch.tensor([[5, 6, 7]])).logits[0], rtol=0, atol=1e-4)


def test_a_step_is_not_compiled_unless_asked() -> None:
    layer = LayerShape(1, 8, 8)
    slot = slot_of(3, layer, torch.float32)
    query, key = torch.ones((1, 2, 1, 8)), torch.ones((1, 1, 1, 8))
    outs = []
    for use in (False, True):
        step = Step([layer], [0], [(slot, 1)], KernelSet(decode=use))
        step.update(key, key, 0)
        outs.append(step.attend(query, key, key, None, module=torch.nn.Identity()))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)
