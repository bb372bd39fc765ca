"""The larger stages of a compiled forward: its tables, linear layers and attention, as calls of a `program`.

Each fills what differs from forward to forward into jobs that it made once for all layers. Used by `fused`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdq.engine import compiled, compiled_chunk, compiled_int8, flash, flash_chunk
from pdq.engine.compiled_int8 import CompiledInt8Product
from pdq.engine.compiled_product import CompiledProduct, Cut
from pdq.engine.forward import Pieces
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.operands import require, require_rows
from pdq.engine.pointwise import LEVELS_FIELDS
from pdq.engine.program import Call, Jobs, Numbers


def at(**tensors: Tensor) -> dict[str, int | Tensor]:
    """For each the field of its name, and that of the bytes from row to row."""
    return {**tensors, **{f"{name}_row": tensor.stride(0) * tensor.itemsize for name, tensor in tensors.items()}}


class Rows:
    """The tables of one forward that functions read; their addresses are good as long as this lives.

    So are those of the slots' planes, even if a slot is closed meanwhile. count, kept: how many rows there are, and how
    many are kept. planes: `[planes, pieces]`, addresses. keys, values: of each layer, where the addresses of all pieces
    are. Raises ValueError for slots of another layout than `layers` of `dtype`, and for tables that do not fit them.
    """

    def __init__(
        self, pieces: Pieces, positions: Tensor, keep: Tensor, layers: tuple[LayerShape, ...], dtype: torch.dtype
    ) -> None:
        _check_pieces(pieces, layers, dtype)
        written = _places(pieces)
        require("positions", positions, torch.int64, len(written))
        kept = _kept(keep, len(written))
        self.pieces, self.count, self.kept = pieces, len(written), len(kept)
        self._memory = [slot.memory for slot, _ in pieces]
        self.planes: Numbers = np.stack([slot.addresses() for slot, _ in pieces], axis=1)
        places = self.planes.ctypes.data + np.arange(len(self.planes)) * self.planes.strides[0]
        self.keys, self.values = places[::2], places[1::2]
        self._tables: dict[str, Numbers] = {
            "every": np.arange(self.count),
            "kept": kept,
            "positions": written,
            "pieces": np.repeat(np.arange(len(pieces)), [count for _, count in pieces]),
            "capacities": np.array([slot.capacity for slot, _ in pieces]),
        }

    def address(self, table: str) -> int:
        return self._tables[table].ctypes.data


class Linear:
    """One linear layer of every block."""

    def __init__(self, products: Sequence[CompiledProduct]) -> None:
        self._first = first = products[0]
        if len({(type(p), p.inputs, p.outputs, p.dtype) for p in products}) != 1:
            raise ValueError(f"one linear layer of every block, given {[(p.inputs, p.outputs) for p in products]}")
        self._jobs = Jobs(first.names, len(products)).keep(*products)
        self._levels = Jobs(LEVELS_FIELDS, len(products)).keep(*products)
        for i, product in enumerate(products):
            self._jobs.set(i, **product.fields)
            if isinstance(product, CompiledInt8Product):
                self._levels.set(i, **product.levels_fields)

    def calls(
        self, m: dict[str, Tensor], x: str, out: Tensor, threads: int, rows: int, last: int | None = None
    ) -> list[Call]:
        """m: memory, in which `x` is the input. last: rows of the last layer, if those are others.

        out: float32, or of the layers' dtype. Raises ValueError for memory of another width or dtype, or too little.
        """
        first, given, most = self._first, at(x=m[x]), max(rows, last or 0)
        wide = out.dtype is torch.float32
        require_rows(x, m[x], first.dtype, most, first.inputs)
        require_rows("out", out, torch.float32 if wide else first.dtype, most, first.outputs)
        before, more = [], {}
        if isinstance(first, CompiledInt8Product):
            levels, scales = m["levels"][:, : first.row_bytes], m["scales"]
            require_rows("levels", levels, torch.uint8, most, first.row_bytes)
            require_rows("scales", scales, torch.float32, most, 1)
            jobs = self._levels.filled(**given, **at(out=levels), scales=scales, rows=rows)
            jobs.set(-1, rows=rows if last is None else last)
            before = [Call(compiled_int8.levels_address(first.dtype), jobs)]
            given, more = at(x=levels), {"row_scales": scales}
        cut = Cut.of(rows, first.blocks, first.steps, threads)
        jobs = self._jobs.filled(**given, **at(out=out), **more, wide=wide, **cut.fields)
        functions: Numbers = np.full(jobs.layers, first.address(cut.height))
        if last is not None and last != rows:
            cut = Cut.of(last, first.blocks, first.steps, threads)
            jobs.set(-1, **cut.fields)
            functions[-1] = first.address(cut.height)
        return [*before, Call(functions, jobs)]


class Attention:
    """The attention of every block: one function for all pieces of one token, and one for each other piece."""

    def __init__(self, shape: flash.Shape, windows: Sequence[int | None], scalings: Sequence[float]) -> None:
        self._shape = shape
        self._layers = {w: np.array([i for i, x in enumerate(windows) if x == w]) for w in dict.fromkeys(windows)}
        self._single, self._chunk = compiled.attention(shape), compiled_chunk.attention(shape)
        self._singles = Jobs(flash.FIELDS, len(windows)).filled(scale=[compiled.scale_bits(s) for s in scalings])
        self._chunks = Jobs(flash_chunk.FIELDS, len(windows))
        for i, scaling in enumerate(scalings):
            self._chunks.set(i, **compiled_chunk.scale_fields(shape.dtype, scaling))

    def calls(self, rows: Rows, m: dict[str, Tensor], threads: int) -> list[Call]:
        """m: memory, in which `mixed` is the input and `attended` the result. Raises ValueError if it does not fit."""
        shape = self._shape
        heads, kv = shape.group * shape.kv_heads, shape.kv_heads
        require_rows("mixed", m["mixed"], shape.dtype, rows.count, (heads + kv) * shape.key_dim + kv * shape.value_dim)
        require_rows("attended", m["attended"], shape.dtype, rows.count, heads * shape.value_dim)
        n = [count for _, count in rows.pieces].count(1)
        found = [self._singles_call([slot for slot, _ in rows.pieces[:n]], rows, m, threads)] if n else []
        row = n
        for (slot, count), planes in zip(rows.pieces[n:], rows.planes.T[n:], strict=True):
            part = slice(row, row + count)
            call = self._chunk_call(slot, count, planes, m["mixed"][part], m["attended"][part])
            call.jobs.keep(rows)
            found.append(call)
            row += count
        return found

    def _singles_call(self, slots: Sequence[TorchSlot], rows: Rows, m: dict[str, Tensor], threads: int) -> Call:
        capacities = np.array([slot.capacity for slot in slots])
        ends = np.array([slot.length + 1 for slot in slots])
        size, mixed = m["mixed"].itemsize, m["mixed"]
        jobs = self._singles.filled(
            threads=threads,
            keys=rows.keys,
            values=rows.values,
            out=m["attended"],
            query=mixed,
            query_piece=mixed.stride(0) * size,
            query_head=self._shape.key_dim * size,
        )
        plans = {w: compiled.Plan(self._shape, w, capacities, ends) for w in self._layers}
        for window, layers in self._layers.items():
            jobs.set(layers, **plans[window].fields)
        return Call(self._single, jobs.keep(rows, *plans.values()))

    def _chunk_call(self, slot: TorchSlot, count: int, planes: Numbers, mixed: Tensor, attended: Tensor) -> Call:
        """planes: addresses of the slot's. mixed, attended: the rows of this piece."""
        shape, size = self._shape, mixed.itemsize
        jobs = self._chunks.filled(
            query=mixed,
            query_row=mixed.stride(0) * size,
            query_head=shape.key_dim * size,
            out=attended,
            out_row=attended.stride(0) * size,
            out_head=shape.value_dim * size,
            capacity=slot.capacity,
        )
        for window, layers in self._layers.items():
            first = 0 if window is None else max(0, slot.length + 1 - window)
            plan = compiled_chunk.plan(shape, count, slot.length + count - first, window)
            keys = planes[::2][layers] + first * shape.key_dim * size
            values = planes[1::2][layers] + first * shape.value_dim * size
            jobs.keep(plan).set(layers, key=keys, value=values, **plan.fields)
        return Call(self._chunk, jobs)


def _check_pieces(pieces: Pieces, layers: tuple[LayerShape, ...], dtype: torch.dtype) -> None:
    counts = [count for _, count in pieces]
    singles = counts.count(1)
    if not counts or min(counts) < 1 or counts[:singles] != [1] * singles:
        raise ValueError(f"expected pieces of at least one token, those of one token first, given {counts}")
    for slot, count in pieces:
        layout = slot.layout
        if layout.dtype is not dtype or layout.layers != layers:
            raise ValueError(
                f"a slot: expected one of {Layout(layers, dtype).text} in {dtype}, given one of {layout.text} "
                f"in {layout.dtype}"
            )
        if not slot.memory[0].is_cpu:
            raise ValueError(f"a slot: expected one on the CPU, given one on {slot.memory[0].device}")
        if slot.length < 0 or slot.length + count > slot.capacity:
            raise ValueError(f"a slot of {slot.capacity} tokens holds {slot.length}: {count} more were given")


def _places(pieces: Pieces) -> Numbers:
    """`[rows]`: the place in its slot at which the KV of each row is written. Positions in the text may be others."""
    return np.concatenate([np.arange(slot.length, slot.length + count) for slot, count in pieces])


def _kept(keep: Tensor, count: int) -> Numbers:
    """`[kept]`, contiguous; checked: a row that is kept twice would be worked on by two threads at once."""
    require("keep", keep, torch.int64, None)
    found: Numbers = np.ascontiguousarray(keep.numpy())
    rows = found.tolist()
    if rows and (min(rows) < 0 or max(rows) >= count or len(set(rows)) != len(rows)):
        raise ValueError(f"keep: expected each row at most once, of {count}, given {rows}")
    return found
