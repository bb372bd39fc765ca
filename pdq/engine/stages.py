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
from pdq.engine.kv import TorchSlot
from pdq.engine.pointwise import LEVELS_FIELDS
from pdq.engine.program import Call, Jobs, Numbers


def at(**tensors: Tensor) -> dict[str, int]:
    """For each the field of its name, and that of the bytes from row to row."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return addresses | {f"{name}_row": tensor.stride(0) * tensor.itemsize for name, tensor in tensors.items()}


class Rows:
    """The tables of one forward that functions read; their addresses are good as long as this lives.

    count, kept: how many rows there are, and how many are kept. planes: `[planes, pieces]`, addresses. keys, values: of
    each layer, where the addresses of all pieces are.
    """

    def __init__(self, pieces: Pieces, count: int, keep: Tensor) -> None:
        self.pieces, self.count, self.kept = pieces, count, len(keep)
        self.planes: Numbers = np.stack([slot.addresses() for slot, _ in pieces], axis=1)
        places = self.planes.ctypes.data + np.arange(len(self.planes)) * self.planes.strides[0]
        self.keys, self.values = places[::2], places[1::2]
        self._tables: dict[str, Numbers] = {
            "every": np.arange(self.count),
            "kept": keep.numpy(),
            "positions": np.concatenate([np.arange(slot.length, slot.length + count) for slot, count in pieces]),
            "pieces": np.repeat(np.arange(len(pieces)), [count for _, count in pieces]),
            "capacities": np.array([slot.capacity for slot, _ in pieces]),
        }

    def address(self, table: str) -> int:
        return self._tables[table].ctypes.data


class Linear:
    """One linear layer of every block."""

    def __init__(self, products: Sequence[CompiledProduct]) -> None:
        self._first = first = products[0]
        self._jobs = Jobs(first.names, len(products))
        self._levels = Jobs(LEVELS_FIELDS, len(products))
        for i, product in enumerate(products):
            self._jobs.set(i, **product.fields)
            if isinstance(product, CompiledInt8Product):
                self._levels.set(i, **product.levels_fields)

    def calls(
        self, m: dict[str, Tensor], x: str, out: Tensor, threads: int, rows: int, last: int | None = None
    ) -> list[Call]:
        """m: memory, in which `x` is the input. last: rows of the last layer, if those are others."""
        first, given = self._first, at(x=m[x])
        before, more = [], {}
        if isinstance(first, CompiledInt8Product):
            levels, scales = m["levels"][:, : first.row_bytes], {"scales": m["scales"].data_ptr()}
            jobs = self._levels.filled(**given, **at(out=levels), **scales, rows=rows)
            jobs.set(-1, rows=rows if last is None else last)
            before = [Call(compiled_int8.levels_address(first.dtype), jobs)]
            given, more = at(x=levels), {"row_scales": scales["scales"]}
        cut = Cut.of(rows, first.blocks, first.steps, threads)
        jobs = self._jobs.filled(**given, **at(out=out), **more, wide=out.dtype is torch.float32, **cut.fields)
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
        n = [count for _, count in rows.pieces].count(1)
        found = [self._singles_call([slot for slot, _ in rows.pieces[:n]], rows, m, threads)] if n else []
        row = n
        for (slot, count), planes in zip(rows.pieces[n:], rows.planes.T[n:], strict=True):
            part = slice(row, row + count)
            found.append(self._chunk_call(slot, count, planes, m["mixed"][part], m["attended"][part]))
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
            out=m["attended"].data_ptr(),
            query=mixed.data_ptr(),
            query_piece=mixed.stride(0) * size,
            query_head=self._shape.key_dim * size,
        )
        plans = {w: compiled.Plan(self._shape, w, capacities, ends) for w in self._layers}
        for window, layers in self._layers.items():
            jobs.set(layers, **plans[window].fields)
        return Call(self._single, jobs, plans)

    def _chunk_call(self, slot: TorchSlot, count: int, planes: Numbers, mixed: Tensor, attended: Tensor) -> Call:
        """planes: addresses of the slot's. mixed, attended: the rows of this piece."""
        shape, size = self._shape, mixed.itemsize
        jobs = self._chunks.filled(
            query=mixed.data_ptr(),
            query_row=mixed.stride(0) * size,
            query_head=shape.key_dim * size,
            out=attended.data_ptr(),
            out_row=attended.stride(0) * size,
            out_head=shape.value_dim * size,
            capacity=slot.capacity,
        )
        plans = []
        for window, layers in self._layers.items():
            first = 0 if window is None else max(0, slot.length + 1 - window)
            plan = compiled_chunk.plan(shape, count, slot.length + count - first, window)
            keys = planes[::2][layers] + first * shape.key_dim * size
            values = planes[1::2][layers] + first * shape.value_dim * size
            jobs.set(layers, key=keys, value=values, **plan.fields)
            plans.append(plan)
        return Call(self._chunk, jobs, plans)
