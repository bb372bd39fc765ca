"""Native code is handed no tensor that it would read or write past the end of: a wrong one is a ValueError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdq.engine import int8, packed, program, team
from pdq.engine.base import Segment
from pdq.engine.blocks import Decoder, Norm
from pdq.engine.compiled import Batch
from pdq.engine.compiled_chunk import chunk
from pdq.engine.compiled_int8 import CompiledInt8Product
from pdq.engine.compiled_product import CompiledProduct
from pdq.engine.fused import FusedForward
from pdq.engine.int8 import Int8Product, Quantized
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.packed import Bfloat16Product
from pdq.engine.runner import TorchEngine
from pdq.engine.stages import Linear
from tests.engine.pd import GREEDY, engine
from tests.engine.tiny import COMPILED, compiled_model

HALF, WHOLE = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
LAYER = LayerShape(2, 8, 6)
pytestmark = pytest.mark.usefixtures("threads")
needs_compiled = pytest.mark.skipif(not COMPILED, reason="oneDNN's products are used on this CPU")


_run = team.run


@pytest.fixture(autouse=True)
def no_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not refused fails the test, instead of the process."""
    monkeypatch.setattr(team, "run", lambda *_: pytest.fail("native code was called"))


@pytest.fixture
def native_calls(no_native_call: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests with right tensors."""
    monkeypatch.setattr(team, "run", _run)


class OneDnn:
    """Stands in for oneDNN's operators, which not every CPU has."""

    def __getattr__(self, name: str) -> Any:
        if name in ("qlinear_prepack", "_reorder_linear_weight"):
            return lambda weight, _: weight
        return lambda *_: pytest.fail("native code was called")


Make = Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]]


def compiled_int8(weight: Tensor, bias: Tensor | None) -> CompiledInt8Product:
    it = Quantized.of(weight, None)
    return CompiledInt8Product(it.levels, it.scales, it.columns, bias, weight.dtype)


def onednn_int8(weight: Tensor, bias: Tensor | None) -> Int8Product:
    return Int8Product(Quantized.of(weight, None), bias)


PRODUCTS: dict[str, tuple[Make, torch.dtype]] = {
    "compiled bfloat16": (CompiledProduct, HALF),
    "compiled float32": (CompiledProduct, WHOLE),
    "compiled int8 of bfloat16": (compiled_int8, HALF),
    "compiled int8 of float32": (compiled_int8, WHOLE),
    "oneDNN bfloat16": (Bfloat16Product, HALF),
    "oneDNN int8": (onednn_int8, WHOLE),
}


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packed, int8):
        ops = type("Ops", (), {"mkldnn": OneDnn(), "onednn": OneDnn()})
        monkeypatch.setattr(module, "torch", _With(torch, ops=ops))


class _With:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("shape", [(2, 32), (2, 128), (1, 1), (64, 2), (3, 63), (0, 32), ()], ids=str)
def test_a_product_refuses_rows_of_another_width_as_a_linear_layer_does(kind: str, shape: tuple[int, ...]) -> None:
    make, dtype = PRODUCTS[kind]
    x = torch.ones(shape, dtype=dtype)
    with pytest.raises((RuntimeError, ValueError)):
        nn.Linear(64, 8, dtype=dtype)(x)
    product = make(torch.randn(8, 64).to(dtype), None)
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 64\] of .* given \[.*\] of") as e:
        product(x)
    assert str(list(shape)) in str(e.value)


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_refuses_rows_of_another_dtype_or_device(kind: str) -> None:
    make, dtype = PRODUCTS[kind]
    product = make(torch.randn(8, 64).to(dtype), None)
    others = [torch.float16, torch.float64, torch.int64, WHOLE if dtype is HALF else HALF]
    for other in others[2:3] if kind == "oneDNN int8" else others:  # which takes any floating dtype
        with pytest.raises(ValueError, match=f"given .* of {other} on cpu"):
            product(torch.ones((2, 64), dtype=other))
    with pytest.raises(ValueError, match=r"on the CPU, given .* on meta"):
        product(torch.ones((2, 64), dtype=dtype, device="meta"))


@pytest.mark.usefixtures("onednn")
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_product_refuses_a_bias_that_is_not_one_for_each_output(kind: str) -> None:
    make, dtype = PRODUCTS[kind]
    for bias in (torch.ones(7), torch.ones(9), torch.ones(8, 1), torch.ones(())):
        with pytest.raises(ValueError, match=r"bias: expected \[8\]"):
            make(torch.randn(8, 64).to(dtype), bias.to(dtype))


def test_a_compiled_product_refuses_weights_that_it_would_not_read_as_they_are() -> None:
    for weight in (torch.ones(8, dtype=HALF), torch.ones(2, 3, 4), torch.ones(8, 0), torch.ones(2, 4, device="meta")):
        with pytest.raises(ValueError, match=r"weight: expected \[out, in\]"):
            CompiledProduct(weight, None)
    with pytest.raises(ValueError, match="weight: expected an even number of inputs in bfloat16, given 7"):
        CompiledProduct(torch.ones(4, 7, dtype=HALF), None)
    for dtype in (torch.float16, torch.float64, torch.int8):
        with pytest.raises(ValueError, match=r"weight: .* given \[4, 8\] of"):
            CompiledProduct(torch.ones(4, 8, dtype=dtype), None)
    levels, eight, four = torch.ones((4, 8), dtype=torch.int8), torch.ones(8), torch.ones(4)
    for name, scales, columns in (("scales", eight, eight), ("columns", four, four)):
        with pytest.raises(ValueError, match=rf"{name}: expected \["):
            CompiledInt8Product(levels, scales, columns, None, WHOLE)
    with pytest.raises(ValueError, match=r"rows: expected torch.bfloat16 or torch.float32, given torch.float16"):
        CompiledInt8Product(levels, four, eight, None, torch.float16)
    with pytest.raises(ValueError, match="weight: expected"):
        CompiledInt8Product(levels.float(), four, eight, None, WHOLE)


# ---- single tokens ----


def slot_of(
    length: int, capacity: int = 16, layers: tuple[LayerShape, ...] = (LAYER,), dtype: Any = WHOLE
) -> TorchSlot:
    slot = TorchSlot(Layout(layers, dtype), capacity, CPU)
    for plane in slot.planes(0, capacity):
        plane.fill_(1)
    slot.length = length
    return slot


def test_a_batch_refuses_slots_without_room_or_of_several_layouts() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        Batch([])
    with pytest.raises(ValueError, match="a slot of 16 tokens holds 16: one more was given"):
        Batch([slot_of(3), slot_of(16)])
    for other in (slot_of(3, layers=(LAYER, LAYER)), slot_of(3, layers=(LayerShape(1, 8, 6),)), slot_of(3, dtype=HALF)):
        with pytest.raises(ValueError, match=r"a slot: expected one of 1x2x8\+6, given one of"):
            Batch([slot_of(3), other])
    with pytest.raises(ValueError, match="expected one on the CPU"):
        Batch([TorchSlot(Layout((LAYER,), WHOLE), 16, torch.device("meta"))])


@pytest.mark.parametrize("shape", [(1, 1, 2, 8), (1, 3, 2, 8), (1, 2, 1, 8), (1, 2, 3, 8), (1, 2, 2, 7), (2, 2, 8)])
def test_a_batch_writes_no_kv_of_another_shape(shape: tuple[int, ...]) -> None:
    batch = Batch([slot_of(3), slot_of(5)])
    key, value = torch.ones(1, 2, 2, 8), torch.ones(1, 2, 2, 6)
    with pytest.raises(ValueError, match=r"key: expected \[1, 2, 2, 8\]"):
        batch.write(0, torch.ones(shape), value)
    with pytest.raises(ValueError, match=r"value: expected \[1, 2, 2, 6\]"):
        batch.write(0, key, torch.ones(shape))
    with pytest.raises(ValueError, match=r"key: .* on meta"):
        batch.write(0, key.to("meta"), value)
    for index in (-1, 1):
        with pytest.raises(ValueError, match=f"layer: expected one of 1, given {index}"):
            batch.write(index, key, value)


def test_a_batch_attends_with_no_query_of_another_shape() -> None:
    batch = Batch([slot_of(3), slot_of(5)])
    query = torch.ones(1, 4, 2, 8)
    for shape in ((1, 4, 1, 8), (1, 4, 3, 8), (1, 4, 2, 6), (2, 4, 2, 8), (4, 2, 8)):
        with pytest.raises(ValueError, match=r"query: expected \[1, any, 2, 8\]"):
            batch.attend(0, LAYER, torch.ones(shape), None)
    for heads in (0, 1, 3):
        with pytest.raises(ValueError, match=f"query: expected heads for groups of 2, given {heads}"):
            batch.attend(0, LAYER, torch.ones(1, heads, 2, 8), None)
    for other in (LayerShape(1, 8, 6), LayerShape(2, 6, 6), LayerShape(2, 8, 8)):
        with pytest.raises(ValueError, match="layer 0: the slots hold"):
            batch.attend(0, other, query, None)
    with pytest.raises(ValueError, match="layer: expected one of 1, given 1"):
        batch.attend(1, LAYER, query, None)


# ---- chunks ----


def test_a_chunk_refuses_tensors_that_do_not_go_together() -> None:
    query, key, value = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 9, 8), torch.ones(1, 2, 9, 6)
    wrong: list[tuple[Tensor, Tensor, Tensor, int | None, str]] = [
        (query, key[:, :1], value, None, r"key: expected \[1, 2, 9, 8\]"),
        (query, key[:, :, :8], value, None, r"key: expected \[1, 2, 9, 8\]"),
        (query, key[..., :6], value, None, r"key: expected \[1, 2, 9, 8\]"),
        (query, key, value[:, :, :8], None, r"key: expected \[1, 2, 8, 8\]"),
        (query[0], key, value, None, r"query: expected \[1, any, any, any\]"),
        (torch.cat([query, query]), key, value, None, r"query: expected \[1, any"),
        (query, key, value[0], None, r"value: expected \[1, any"),
        (query[:, :3], key, value, None, "query: expected heads for groups of 2, given 3"),
        (query[:, :0], key, value, None, "query: expected heads for groups of 2, given 0"),
        (query[:, :, :0], key, value, None, "query: expected 1 to 9 tokens, the last of those visible, given 0"),
        (torch.ones(1, 4, 10, 8), key, value, None, "query: expected 1 to 9 tokens, .* given 10"),
        (query, key, value, 0, "window: expected at least 1, given 0"),
        (query, key.to("meta"), value, None, "key: .* on meta"),
    ]
    for q, k, v, window, text in wrong:
        with pytest.raises(ValueError, match=text):
            chunk(q, k, v, window=window, scaling=None)


def test_a_chunk_writes_into_no_place_of_another_form() -> None:
    query, key, value = torch.ones(1, 4, 3, 8), torch.ones(1, 2, 9, 8), torch.ones(1, 2, 9, 6)
    for place in (torch.empty(1, 3, 4, 5), torch.empty(1, 2, 4, 6), torch.empty(1, 3, 4, 6, dtype=HALF)):
        with pytest.raises(ValueError, match=r"out: expected \[1, 3, 4, 6\] of torch.float32"):
            chunk(query, key, value, window=None, scaling=None, out=place)
    with pytest.raises(ValueError, match="out: expected numbers that follow each other, given strides"):
        chunk(query, key, value, window=None, scaling=None, out=torch.empty(1, 3, 6, 4).transpose(2, 3))


# ---- whole forwards ----


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[TorchEngine, FusedForward]:
    with monkeypatch.context() as patch:
        patch.setattr(team, "run", _run)
        it = engine(compiled_model("llama compiled"))
    assert isinstance(it._forward, FusedForward)
    return it, it._forward


def call(
    forward: FusedForward,
    slots: list[tuple[TorchSlot, int]],
    ids: Tensor | None = None,
    positions: Tensor | None = None,
    keep: Tensor | None = None,
) -> Tensor:
    """With right tensors for what is not given."""
    count = sum(n for _, n in slots)
    right = torch.cat([torch.arange(s.length, s.length + n) for s, n in slots])
    return forward(
        slots,
        torch.arange(count) if ids is None else ids,
        right if positions is None else positions,
        torch.tensor([count - 1]) if keep is None else keep,
    )


@needs_compiled
def test_a_forward_refuses_ids_positions_and_rows_that_do_not_fit_its_pieces(
    made: tuple[TorchEngine, FusedForward],
) -> None:
    it, forward = made
    one, other = (it.open(32) for _ in range(2))
    assert isinstance(one, TorchSlot)
    assert isinstance(other, TorchSlot)
    other.length = 4
    pieces = [(one, 1), (other, 3)]  # rows at 0; 4, 5, 6
    wrong: list[tuple[dict[str, Tensor], str]] = [
        ({"ids": torch.arange(5)}, r"ids: expected \[4\] of torch.int64"),
        ({"ids": torch.arange(3)}, r"ids: expected \[4\]"),
        ({"ids": torch.arange(4)[None]}, r"ids: expected \[4\] .* given \[1, 4\]"),
        ({"ids": torch.arange(4.0)}, r"ids: expected \[4\] of torch.int64"),
        ({"ids": torch.arange(4, device="meta")}, "ids: .* on meta"),
        ({"positions": torch.arange(5)}, r"positions: expected \[4\] of torch.int64"),
        ({"positions": torch.tensor([0, 4, 5])}, r"positions: expected \[4\]"),
        ({"positions": torch.tensor([0, 4, 5, 6], dtype=torch.int32)}, r"positions: expected \[4\] of torch.int64"),
        ({"keep": torch.tensor([4])}, "keep: expected each row at most once, of 4, given"),
        ({"keep": torch.tensor([-1])}, "keep: expected each row at most once"),
        ({"keep": torch.tensor([1, 1])}, "keep: expected each row at most once"),
        ({"keep": torch.tensor([1.0])}, r"keep: expected \[any\] of torch.int64"),
        ({"keep": torch.tensor([[1]])}, r"keep: expected \[any\] of torch.int64"),
    ]
    for tensors, text in wrong:
        with pytest.raises(ValueError, match=text):
            call(forward, pieces, **tensors)


@needs_compiled
def test_a_forward_refuses_pieces_that_are_not_of_its_slots(made: tuple[TorchEngine, FusedForward]) -> None:
    it, forward = made
    layout = slot_layout(it)
    slot = TorchSlot(layout, 8, CPU)
    for pieces in ([], [(slot, 0)], [(slot, 2), (TorchSlot(layout, 8, CPU), 1)]):
        with pytest.raises(ValueError, match="expected pieces of at least one token, those of one token first"):
            forward(pieces, torch.arange(3), torch.arange(3), torch.arange(1))
    with pytest.raises(ValueError, match="a slot of 8 tokens holds 0: 9 more were given"):
        call(forward, [(slot, 9)])
    slot.length = 8
    with pytest.raises(ValueError, match="a slot of 8 tokens holds 8: 1 more were given"):
        call(forward, [(slot, 1)])
    (first, *rest), narrow = layout.layers, replace(layout.layers[0], key_dim=4)
    for other in (Layout(layout.layers[:1], WHOLE), Layout((narrow, *rest), WHOLE), Layout(layout.layers, HALF)):
        with pytest.raises(
            ValueError, match=rf"a slot: expected one of {layout.text.replace('+', '.')} in torch.float32"
        ):
            call(forward, [(TorchSlot(other, 8, CPU), 1)])
    assert first is layout.layers[0]
    with pytest.raises(ValueError, match="a slot: expected one on the CPU, given one on meta"):
        call(forward, [(TorchSlot(layout, 8, torch.device("meta")), 1)])


def slot_layout(it: TorchEngine) -> Layout:
    slot = it.open(8)
    assert isinstance(slot, TorchSlot)
    return slot.layout


@needs_compiled
@pytest.mark.usefixtures("native_calls")
def test_a_forward_takes_tables_of_any_strides(made: tuple[TorchEngine, FusedForward]) -> None:
    it, forward = made
    ids, found = [5, 6, 7, 8, 9, 10], []
    for apart in (1, 3):

        def table(numbers: list[int], apart: int = apart) -> Tensor:
            whole = torch.full((len(numbers), apart), 10**9)
            whole[:, 0] = torch.tensor(numbers)
            return whole[:, 0]

        slot = TorchSlot(slot_layout(it), 8, CPU)
        with torch.inference_mode():
            found.append(call(forward, [(slot, 6)], table(ids), table([*range(6)]), table([5, 2])))
    slot = it.open(8)
    right = it.logits([Segment(slot, ids, GREEDY)])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1][:1], right)


@needs_compiled
@pytest.mark.usefixtures("native_calls")
def test_an_engine_refuses_slots_of_another_model_and_serves_on(made: tuple[TorchEngine, FusedForward]) -> None:
    it, _ = made
    slot = it.open(16)
    right = it.logits([Segment(slot, [1, 2, 3], GREEDY)])
    foreign = TorchSlot(Layout((LayerShape(1, 4, 4),), WHOLE), 16, CPU)
    with pytest.raises(ValueError, match="a slot: expected one of"):
        it.forward([Segment(foreign, [1, 2, 3], GREEDY)])
    assert foreign.length == 0
    assert torch.equal(it.logits([Segment(it.open(16), [1, 2, 3], GREEDY)]), right)


@needs_compiled
def test_a_forward_is_not_made_of_parts_that_do_not_fit_together(made: tuple[TorchEngine, FusedForward]) -> None:
    it, forward = made
    decoder, layers = forward.decoder, slot_layout(it).layers
    block = decoder.blocks[0]

    def with_blocks(**changes: Any) -> Decoder:
        return replace(decoder, blocks=tuple(replace(b, **changes) for b in decoder.blocks))

    def product(outputs: int, inputs: int, dtype: torch.dtype = WHOLE) -> CompiledProduct:
        return CompiledProduct(torch.ones(outputs, inputs, dtype=dtype), None)

    short, long, half = Norm(torch.ones(31), 1e-5), Norm(torch.ones(33), 1e-5), Norm(torch.ones(32, dtype=HALF), 1e-5)
    wrong: list[tuple[Decoder, str]] = [
        (replace(decoder, norm=long), "norm: expected 32, given 33"),
        (replace(decoder, norm=Norm(torch.ones(64)[::2], 1e-5)), "norm: expected 32, given"),
        (replace(decoder, head=product(101, 32, HALF)), "head: expected torch.float32, given torch.bfloat16"),
        (with_blocks(before_attention=short), "layer 0: a norm: expected 32, given 31"),
        (with_blocks(before_mlp=half), "layer 0: a norm: expected 32, given"),
        (with_blocks(query_norm=short, key_norm=short), "layer 0: a head's norm: expected 8, given 31"),
        (with_blocks(mixed=product(63, 32)), r"layer 0: qkv_proj: expected \(32, 64\), given \(32, 63\)"),
        (with_blocks(mixed=product(64, 30)), "layer 0: qkv_proj: expected"),
        (with_blocks(attended=product(32, 30)), r"layer 0: o_proj: expected \(32, 32\), given \(30, 32\)"),
        (with_blocks(both=product(100, 32)), r"layer 0: gate_up_proj: expected \(32, 128\), given \(32, 100\)"),
        (with_blocks(gated=product(31, 64)), "layer 0: down_proj: expected 32, given 31"),
        (with_blocks(gated=product(32, 64, HALF)), "layer 0: dtypes: expected"),
        (with_blocks(queries=3), "layer 0: "),
        (replace(decoder, blocks=(block, replace(block, gated=product(32, 62)))), "the layers are not all alike"),
    ]
    for other, text in wrong:
        assert not FusedForward.can(other, layers, WHOLE)
        with pytest.raises(ValueError, match=text):
            FusedForward(other, layers, WHOLE)
    assert FusedForward.can(decoder, layers, WHOLE)


@needs_compiled
def test_a_rotary_table_of_another_size_is_refused(made: tuple[TorchEngine, FusedForward]) -> None:
    it, forward = made
    layers = slot_layout(it).layers

    class Rotary(nn.Module):
        def __init__(self, width: int, rows: int | None = None) -> None:
            super().__init__()
            self.width, self.rows = width, rows

        def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            table = torch.ones(1, self.rows or position_ids.shape[1], self.width)
            return table, table

    for width in (7, 10):
        with pytest.raises(ValueError, match=f"rotary: expected an even number of at most 8, given {width}"):
            FusedForward(replace(forward.decoder, rotary=Rotary(width)), layers, WHOLE)
    few = FusedForward(replace(forward.decoder, rotary=Rotary(8, 2)), layers, WHOLE)
    with pytest.raises(ValueError, match=r"rotary: expected \[3, 8\] of torch.float32 on the CPU, given \[2, 8\]"):
        call(few, [(TorchSlot(slot_layout(it), 8, CPU), 3)])


@needs_compiled
def test_a_linear_layer_of_a_forward_refuses_memory_that_is_too_small_or_of_another_form() -> None:
    linear = Linear([CompiledProduct(torch.ones(8, 6), None) for _ in range(2)])
    x, out = torch.ones(5, 6), torch.empty(5, 8)
    assert [c.jobs.layers for c in linear.calls({"x": x}, "x", out, 1, 5, 2)] == [2]
    inputs = [x[:4], x[:, :5], torch.ones(6, 5).t(), x.to(HALF), x[None], x.to("meta")]
    for wrong in inputs:
        with pytest.raises(ValueError, match=r"x: expected at least 5 contiguous rows of 6 numbers"):
            linear.calls({"x": wrong}, "x", out, 1, 5)
    outs = [out[:4], out[:, :7], torch.empty(8, 5).t(), out.to("meta")]
    for wrong in outs:
        with pytest.raises(ValueError, match=r"out: expected at least 5 contiguous rows of 8 numbers"):
            linear.calls({"x": x}, "x", wrong, 1, 5)
    with pytest.raises(ValueError, match="x: expected at least 6 contiguous rows"):
        linear.calls({"x": x}, "x", out, 1, 5, 6)
    with pytest.raises(ValueError, match="one linear layer of every block"):
        Linear([CompiledProduct(torch.ones(8, 6), None), CompiledProduct(torch.ones(8, 4), None)])


@pytest.mark.usefixtures("native_calls")
@needs_compiled
def test_right_tensors_of_any_strides_are_computed_as_before() -> None:
    weight, bias = torch.randn(8, 6), torch.randn(8)
    x = torch.randn(6, 5).t()
    torch.testing.assert_close(CompiledProduct(weight, bias)(x), nn.functional.linear(x, weight, bias))
    linear = Linear([CompiledProduct(weight, bias)])
    wide, out = torch.randn(5, 20)[:, 3:9], torch.zeros(7, 30)[:5, 4:12]
    program.run([linear.calls({"x": wide}, "x", out, 1, 5)], 1)
    torch.testing.assert_close(out, nn.functional.linear(wide, weight, bias))
