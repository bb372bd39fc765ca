"""KV slots: bytes out and in, budget, and everything that must be refused with nothing changed."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread

import pytest
import torch

from pdq.engine.base import NoRoom, Segment
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.runner import TorchEngine
from tests.engine.conftest import Arch
from tests.engine.pd import BLOCK, GREEDY, HEADROOM, engine, one, runs_of
from tests.engine.tiny import CONTEXT, tiny_model

Archs = Callable[[str], Arch]
TOKEN_BYTES = 2 * 2 * (8 + 8) * 4  # layers, heads, dims of K and V, float32


@pytest.fixture(scope="module")
def llama() -> TorchEngine:
    return engine(tiny_model("llama"))


def filled(it: TorchEngine, length: int = 10, capacity: int = 20) -> tuple[TorchSlot, list[int]]:
    ids = [(i * 13 + 5) % 101 for i in range(length)]
    slot = it.open(capacity)
    assert isinstance(slot, TorchSlot)
    it.forward([Segment(slot, ids)])
    return slot, ids


def contents(slot: TorchSlot, start: int, stop: int) -> list[torch.Tensor]:
    return [plane.clone() for plane in slot.planes(start, stop)]


def test_spec_describes_the_model() -> None:
    model = tiny_model("llama", num_key_value_heads=1, num_hidden_layers=3).bfloat16()
    spec = engine(model, dtype="bfloat16").spec
    assert (spec.layout, spec.token_bytes, spec.dtype) == ("3x1x8+8", 3 * 16 * 2, "bfloat16")
    assert (spec.vocab_size, spec.max_model_len, spec.fingerprint) == (101, CONTEXT, b"f" * 32)


def test_layout_names_every_layers_own_shape() -> None:
    wide, narrow = LayerShape(2, 64, 32), LayerShape(1, 16, 16, window=7)
    layout = Layout((wide, wide, narrow), torch.bfloat16)
    assert layout.text == "2x2x64+32,1x1x16+16"
    assert layout.token_bytes == 2 * (2 * 2 * 96 + 32)


def test_exported_bytes_are_layer_then_k_v_then_head_then_token(llama: TorchEngine) -> None:
    slot, _ = filled(llama)
    exported = llama.export(slot, 2, 9, BLOCK, HEADROOM)
    llama_planes = contents(slot, 2, 9)
    assert [len(run) for run in exported] == [HEADROOM + 4 * TOKEN_BYTES, HEADROOM + 3 * TOKEN_BYTES]
    for run, (start, stop) in zip(exported, [(0, 4), (4, 7)], strict=True):
        expected = b"".join(p[:, :, start:stop].contiguous().numpy().tobytes() for p in llama_planes)
        assert bytes(run[:HEADROOM]) == bytes(HEADROOM)
        assert bytes(run[HEADROOM:]) == expected
        assert not run.readonly
        assert run.contiguous
    llama.close(slot)


def test_layers_of_different_shapes_survive_the_round_trip() -> None:
    layout = Layout((LayerShape(2, 6, 4), LayerShape(2, 6, 4), LayerShape(1, 4, 4), LayerShape(3, 2, 2)), torch.float16)
    here, there = (TorchSlot(layout, 16, torch.device("cpu")) for _ in range(2))
    for i, plane in enumerate(here.planes(0, 16)):
        plane.copy_(torch.arange(plane.numel()).reshape(plane.shape) + i * 1000)
    here.length = 11
    exported = here.export(0, 11, BLOCK, 0)
    there.load(0, [(n, run) for n, run in zip([4, 4, 3], exported, strict=True)])
    assert there.length == 11
    assert all(torch.equal(a, b) for a, b in zip(here.planes(0, 11), there.planes(0, 11), strict=True))
    flat = b"".join(p[:, :, 4:8].contiguous().numpy().tobytes() for p in here.planes(0, 16))
    assert bytes(exported[1]) == flat


def test_bfloat16_round_trip_is_bit_exact_for_every_bit_pattern() -> None:
    layout = Layout((LayerShape(1, 256, 256),), torch.bfloat16)
    here, there = (TorchSlot(layout, 256, torch.device("cpu")) for _ in range(2))
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).reshape(1, 1, 256, 256)
    for plane in here.planes(0, 256):
        plane.copy_(patterns.view(torch.bfloat16))
    here.length = 256
    there.load(0, [(256, here.export(0, 256, 256, 0)[0])])
    assert all(torch.equal(plane.view(torch.int16), patterns) for plane in there.planes(0, 256))


def test_loading_appends_behind_what_is_there(llama: TorchEngine) -> None:
    slot, _ = filled(llama, 11)
    runs = runs_of(llama.export(slot, 0, 11, BLOCK, HEADROOM), 11)
    other = llama.open(20)
    llama.load(other, 0, runs[:1])
    llama.load(other, 4, [])
    llama.load(other, 4, [(n, memoryview(bytes(raw))) for n, raw in runs[1:]])  # read-only, as it comes from Redis
    expected = llama.logits([Segment(slot, [7], GREEDY)])
    assert other.length == 11
    assert torch.equal(llama.logits([Segment(other, [7], GREEDY)]), expected)
    llama.close(slot)
    llama.close(other)


def test_blocks_may_be_exported_while_more_is_computed(llama: TorchEngine) -> None:
    slot, _ = filled(llama, 8)
    before = [bytes(run) for run in llama.export(slot, 0, 8, BLOCK, 0)]
    llama.forward([Segment(slot, [1, 2, 3])])
    assert [bytes(run) for run in llama.export(slot, 0, 8, BLOCK, 0)] == before
    llama.close(slot)


@pytest.mark.parametrize(
    "runs",
    [
        [(4, bytes(4 * TOKEN_BYTES)), (4, bytes(4 * TOKEN_BYTES - 1))],
        [(4, bytes(4 * TOKEN_BYTES)), (3, bytes(4 * TOKEN_BYTES))],
        [(4, bytes(4 * TOKEN_BYTES)), (0, b"")],
        [(60, bytes(60 * TOKEN_BYTES)), (5, bytes(5 * TOKEN_BYTES))],
    ],
    ids=["a byte short", "wrong token count", "empty run", "beyond the capacity"],
)
def test_a_load_of_wrong_size_is_refused_with_nothing_written(
    llama: TorchEngine, runs: list[tuple[int, bytes]]
) -> None:
    slot = llama.open(64)
    assert isinstance(slot, TorchSlot)
    before = contents(slot, 0, 64)
    with pytest.raises(ValueError):
        llama.load(slot, 0, [(n, memoryview(raw)) for n, raw in runs])
    assert slot.length == 0
    after = contents(slot, 0, 64)
    assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(before, after, strict=True))
    llama.close(slot)


def test_a_load_that_leaves_a_gap_is_refused(llama: TorchEngine) -> None:
    slot, _ = filled(llama, 8)
    with pytest.raises(ValueError, match="8 tokens is present"):
        llama.load(slot, 4, [(4, memoryview(bytes(4 * TOKEN_BYTES)))])
    llama.close(slot)


@pytest.mark.parametrize(("start", "stop", "size"), [(0, 11, 4), (-1, 4, 4), (5, 4, 4), (0, 8, 0)])
def test_exporting_what_is_not_there_is_refused(llama: TorchEngine, start: int, stop: int, size: int) -> None:
    slot, _ = filled(llama, 10)
    with pytest.raises(ValueError):
        llama.export(slot, start, stop, size, 0)
    llama.close(slot)


def test_exporting_nothing_gives_no_runs(llama: TorchEngine) -> None:
    slot, _ = filled(llama, 10)
    assert llama.export(slot, 8, 8, BLOCK, 0) == []
    llama.close(slot)


def test_slots_beyond_the_budget_find_no_room_until_one_is_closed() -> None:
    it = engine(tiny_model("llama"), kv_memory_bytes=3 * 64 * TOKEN_BYTES)
    first, second = it.open(64), it.open(1)  # rounded up to 64 tokens
    assert (first.capacity, second.capacity) == (64, 64)
    assert not it.can_open(65)
    assert it.can_open(64)
    third = it.open(64)
    assert not it.can_open(1)
    with pytest.raises(NoRoom):
        it.open(1)
    it.close(third)
    it.close(third)
    it.close(first)
    assert it.open(128).capacity == 128
    assert not it.can_open(1)


def out_of_memory(*args: object) -> None:
    raise RuntimeError("cannot allocate memory")


def test_a_machine_out_of_memory_is_no_room_and_costs_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine(tiny_model("llama"), kv_memory_bytes=64 * TOKEN_BYTES)
    with monkeypatch.context() as broken:
        broken.setattr(TorchSlot, "__init__", out_of_memory)
        with pytest.raises(NoRoom, match="cannot allocate"):
            it.open(64)
    assert it.open(64).capacity == 64


def test_capacity_never_exceeds_the_models_context(llama: TorchEngine) -> None:
    slot = llama.open(CONTEXT - 1)
    assert slot.capacity == CONTEXT
    llama.close(slot)
    assert not llama.can_open(CONTEXT + 1)
    for capacity in (CONTEXT + 1, 0):
        with pytest.raises(ValueError):
            llama.open(capacity)


def test_a_closed_slot_is_refused(llama: TorchEngine) -> None:
    slot, _ = filled(llama)
    llama.close(slot)
    for use in (
        lambda: llama.forward([Segment(slot, [1])]),
        lambda: llama.export(slot, 0, 4, 4, 0),
        lambda: llama.load(slot, 10, [(1, memoryview(bytes(TOKEN_BYTES)))]),
    ):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_segments_that_cannot_be_computed_are_refused_with_nothing_changed(llama: TorchEngine) -> None:
    slot, _ = filled(llama, 60, 64)
    other, _ = filled(llama, 3, 64)
    fine = Segment(other, [1, 2], GREEDY)
    wrong = [
        [fine, Segment(slot, [1, 2, 3, 4, 5])],
        [fine, Segment(slot, [])],
        [fine, Segment(slot, [101])],
        [fine, Segment(slot, [-1])],
        [fine, Segment(other, [3])],
        [],
    ]
    for segments in wrong:
        with pytest.raises(ValueError):
            llama.forward(segments)
    assert (slot.length, other.length) == (60, 3)
    llama.close(slot)
    llama.close(other)


def test_a_failed_forward_leaves_the_slots_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    it = engine(tiny_model("llama"))
    slot, _ = filled(it)
    expected = it.logits([Segment(filled(it)[0], [7], GREEDY)])
    with monkeypatch.context() as broken:
        broken.setattr(torch.nn.Linear, "forward", lambda self, x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            it.forward([Segment(slot, [9, 9, 9], GREEDY)])
    assert slot.length == 10
    assert torch.equal(it.logits([Segment(slot, [7], GREEDY)]), expected)


def test_logits_that_are_not_numbers_fail_their_own_sequence_only() -> None:
    model = tiny_model("llama")
    model.get_input_embeddings().weight[50] = float("nan")
    it = engine(model)
    (good, _), (other, _) = filled(it), filled(it)
    (alone,) = it.forward([Segment(good, [3], GREEDY)])
    bad, _ = filled(it)
    assert it.forward([Segment(bad, [50], GREEDY), Segment(other, [3], GREEDY)]) == [None, alone]


def test_two_engines_in_two_threads_do_not_disturb_each_other(arch: Archs) -> None:
    both = [arch("gemma2"), arch("llama")]
    results: list[list[list[int]]] = [[], []]
    start = Barrier(2)

    def work(which: int) -> None:
        it = both[which].decode
        start.wait()
        for length in range(1, 10):
            slot = it.open(40)
            out = [one(it, Segment(slot, both[which].prompt(length), GREEDY))]
            while len(out) < 8:
                out.append(one(it, Segment(slot, out[-1:], GREEDY)))
            it.close(slot)
            results[which].append(out)

    expected = [[it.expected(length, 8) for length in range(1, 10)] for it in both]
    threads = [Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == expected


def test_slots_are_opened_loaded_and_closed_while_another_thread_computes(llama: TorchEngine) -> None:
    slot, _ = filled(llama, 8)
    runs = runs_of(llama.export(slot, 0, 8, BLOCK, HEADROOM), 8)
    expected = llama.logits([Segment(slot, [7], GREEDY)])
    seen: list[torch.Tensor] = []

    def churn() -> None:
        for _ in range(50):
            mine = llama.open(20)
            llama.load(mine, 0, runs)
            exported = llama.export(mine, 0, 8, BLOCK, HEADROOM)
            assert [bytes(run) for _, run in runs_of(exported, 8)] == [bytes(run) for _, run in runs]
            llama.close(mine)
        seen.append(expected)

    thread = Thread(target=churn)
    thread.start()
    while thread.is_alive():
        busy = llama.open(20)
        llama.load(busy, 0, runs)
        assert torch.equal(llama.logits([Segment(busy, [7], GREEDY)]), expected)
        llama.close(busy)
    thread.join()
    llama.close(slot)
    assert len(seen) == 1
