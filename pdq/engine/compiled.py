"""The decode backend for CPUs: KV writes and attention of all single tokens of a step, one native call a layer each.

`flash` has the machine code; here are the tables that it reads, and its threads. Those are torch's own, from the same
OpenMP pool: two pools would spin against each other for the cores. Every other case is left to `kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdq.engine import flash, team
from pdq.engine.code import Code
from pdq.engine.cpu import per_host
from pdq.engine.flash import FIELDS, SPLIT, WRITE_FIELDS, Shape
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.llvm import float_bits
from pdq.engine.operands import require

_Numbers = npt.NDArray[np.int64]
_SERIAL_TOKENS = 512  # of all sequences and heads: with fewer, waking the other threads costs more than they save


class Batch:
    """Sequences with one new token each, at position `slot.length`; they stay as they are for one forward.

    Raises ValueError for slots without room for it or of several layouts, and the methods for tensors that do not fit.
    """

    def __init__(self, slots: Sequence[TorchSlot]) -> None:
        self._layout = _common_layout(slots)
        self._memory = [slot.memory for slot in slots]  # or a slot that is closed too early would be a crash
        self._planes: _Numbers = np.stack([slot.addresses() for slot in slots], axis=1)
        self._capacities: _Numbers = np.array([slot.capacity for slot in slots], dtype=np.int64)
        self._ends: _Numbers = np.array([slot.length + 1 for slot in slots], dtype=np.int64)
        self._first_plane = self._planes.ctypes.data
        tables = {"capacities": self._capacities.ctypes.data, "ends": self._ends.ctypes.data}
        self._pieces = {"pieces": len(slots), **tables}
        self._threads = torch.get_num_threads()
        self._plans: dict[tuple[Shape, int | None], Plan] = {}

    def write(self, index: int, key: Tensor, value: Tensor) -> None:
        """Put the new K and V of layer `index`, `[1, kv_heads, pieces, dim]` each, into the slots."""
        stored, dtype, pieces = self._layer(index), self._layout.dtype, len(self._ends)
        require("key", key, None, 1, stored.heads, pieces, stored.key_dim)
        require("value", value, None, 1, stored.heads, pieces, stored.value_dim)
        for plane, rows in ((2 * index, key), (2 * index + 1, value)):
            if rows.dtype is not dtype or rows.stride(3) != 1:
                rows = rows.to(dtype).contiguous()
            size = rows.itemsize
            _, heads, _, dim = rows.shape
            _, from_head, from_piece, _ = rows.stride()
            where = {"source": rows.data_ptr(), "from_head": from_head * size, "from_piece": from_piece * size}
            to = {"planes": self._plane(plane), "heads": heads, "size": dim * size}
            team.run(_writer().address("write"), WRITE_FIELDS, {**where, **to, **self._pieces}, 1)

    def _layer(self, index: int) -> LayerShape:
        if not 0 <= index < len(self._layout.layers):
            raise ValueError(f"layer: expected one of {len(self._layout.layers)}, given {index}")
        return self._layout.layers[index]

    def _plane(self, plane: int) -> int:
        """Address of the addresses of a plane, one per piece."""
        return self._first_plane + plane * self._planes.strides[0]

    def attend(self, index: int, layer: LayerShape, query: Tensor, scaling: float | None) -> Tensor | None:
        """query `[1, heads, pieces, dim]` -> `[1, pieces, heads, value_dim]`; None: this kernel cannot do that shape.

        What each sequence sees is its window of the layer, the new token included. scaling None: 1 / sqrt(dim).
        """
        stored, pieces, dim = self._layer(index), len(self._ends), layer.key_dim
        if (layer.heads, dim, layer.value_dim) != (stored.heads, stored.key_dim, stored.value_dim):
            raise ValueError(f"layer {index}: the slots hold {stored}, given {layer}")
        require("query", query, None, 1, None, pieces, dim)
        heads = query.shape[1]
        if not heads or heads % layer.heads:
            raise ValueError(f"query: expected heads for groups of {layer.heads}, given {heads}")
        shape = Shape(query.dtype, heads // layer.heads, layer.heads, dim, layer.value_dim)
        if not shape.supported or query.dtype != self._layout.dtype:
            return None
        if query.stride(3) != 1:
            query = query.contiguous()
        plan = self._plans.get((shape, layer.window))
        if plan is None:
            plan = Plan(shape, layer.window, self._capacities, self._ends)
            self._plans[shape, layer.window] = plan
        out = torch.empty((1, pieces, heads, layer.value_dim), dtype=query.dtype)
        threads, size = 1 if plan.serial else self._threads, query.itemsize
        _, head, piece, _ = query.stride()
        values = {
            "threads": threads,
            "scale": scale_bits(dim**-0.5 if scaling is None else scaling),
            "keys": self._plane(2 * index),
            "values": self._plane(2 * index + 1),
            "query": query.data_ptr(),
            "query_piece": piece * size,
            "query_head": head * size,
            "out": out.data_ptr(),
            **plan.fields,
        }
        team.run(attention(shape), FIELDS, values, threads)
        return out


def _common_layout(slots: Sequence[TorchSlot]) -> Layout:
    """That of all slots, on the CPU, each with room for a token more."""
    if not slots:
        raise ValueError("expected at least one slot, given none")
    layout = slots[0].layout
    for slot in slots:
        if slot.layout != layout:
            raise ValueError(f"a slot: expected one of {layout.text}, given one of {slot.layout.text}")
        if not slot.memory[0].is_cpu:
            raise ValueError(f"a slot: expected one on the CPU, given one on {slot.memory[0].device}")
        if not 0 <= slot.length < slot.capacity:
            raise ValueError(f"a slot of {slot.capacity} tokens holds {slot.length}: one more was given")
    return layout


class Plan:
    """What is the same for all layers of one shape and window: tables, and memory for results of splits.

    capacities: of each piece's planes, in tokens; ends: up to where it sees. fields: by the names of `flash`, valid as
    long as this lives.
    """

    def __init__(self, shape: Shape, window: int | None, capacities: _Numbers, ends: _Numbers) -> None:
        firsts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        table = _items(ends - firsts, shape.kv_heads)
        self._kept = {
            "table": table,
            "capacities": capacities,
            "firsts": firsts,
            "ends": ends,
            "partial": np.empty(len(table) * shape.partial_floats, dtype=np.float32),
            "pending": np.zeros(len(ends) * shape.kv_heads, dtype=np.int64),
        }
        self.fields = {"items": len(table), **{name: array.ctypes.data for name, array in self._kept.items()}}
        self.serial = int((ends - firsts).sum()) * shape.kv_heads < _SERIAL_TOKENS


def scale_bits(scaling: float) -> int:
    """The field of that name: scores are exponents of two."""
    return float_bits(scaling * math.log2(math.e))


def _items(lengths: _Numbers, kv_heads: int) -> _Numbers:
    """`[items, 4]`: piece, head, split and number of splits; the splits of a head are neighbours."""
    splits = np.repeat(-(-lengths // SPLIT), kv_heads)
    heads = np.arange(len(splits))
    item_of = np.repeat(heads, splits)
    split = np.arange(len(item_of)) - np.repeat(np.cumsum(splits) - splits, splits)
    return np.stack([item_of // kv_heads, item_of % kv_heads, split, splits[item_of]], axis=1)


def attention(shape: Shape) -> int:
    """Address of the function of `flash` for `shape`."""
    return _attention(shape).address("attend")


@per_host
def _attention(shape: Shape) -> Code:
    return Code([flash.attend(shape)])


@per_host
def _writer() -> Code:
    return Code([flash.write()])
