"""The forward of a model of usual blocks over KV slots, as one `program` of compiled functions.

The stock code spends a third of a small model's step between the products, in hundreds of small operations; here are
nine functions a layer, and nothing of Python in between. The jobs of all layers are the rows of one table for each
function; a forward fills in what is its own. The model's own modules still embed tokens and make the tables of
positions.

Owns the jobs and the memory between the functions. What it computes is compared with the stock forward by `runner`
before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdq.engine import compiled, compiled_chunk, compiled_int8, flash, flash_chunk, pointwise
from pdq.engine.blocks import AnyProduct, Block, Decoder, Norm
from pdq.engine.code import Code
from pdq.engine.compiled_int8 import CompiledInt8Product
from pdq.engine.compiled_product import Cut
from pdq.engine.gemm import BYTE_FIELDS
from pdq.engine.gemm import FIELDS as PRODUCT_FIELDS
from pdq.engine.kv import LayerShape, TorchSlot
from pdq.engine.pointwise import GATE_FIELDS, LEVELS_FIELDS, NORM_FIELDS, ROTATE_FIELDS, Heads
from pdq.engine.program import Call, Jobs, Numbers, run

_GROWTH = 64  # rows
_WIDE = ("h", "delta")  # what goes from layer to layer is float32: rounding it is a good part of bfloat16's error


class FusedForward:
    """layers: shapes of the KV, all alike but for windows, as `find_decoder` was given."""

    @staticmethod
    def can(decoder: Decoder, layers: Sequence[LayerShape], dtype: torch.dtype) -> bool:
        """Are all layers alike, and of a shape that the compiled attention knows?"""
        shapes = {(s.heads, s.key_dim, s.value_dim, b.queries) for s, b in zip(layers, decoder.blocks, strict=True)}
        widths = {tuple((p.inputs, p.outputs) for p in (b.mixed, b.attended, b.both, b.gated)) for b in decoder.blocks}
        normed = {(b.query_norm is None, b.key_norm is None) for b in decoder.blocks}
        group = _group(decoder, layers[0], dtype)
        return len(shapes) == len(widths) == len(normed) == 1 and group.supported and compiled_chunk.supported(group)

    def __init__(self, decoder: Decoder, layers: Sequence[LayerShape], dtype: torch.dtype) -> None:
        self._decoder, self._dtype = decoder, dtype
        blocks, shape = decoder.blocks, layers[0]
        queries = blocks[0].queries
        self._norms = [_norms([b.before_attention for b in blocks]), _norms([b.before_mlp for b in blocks])]
        self._mixed = _Linear([b.mixed for b in blocks])
        self._attended = _Linear([b.attended for b in blocks])
        self._both = _Linear([b.both for b in blocks])
        self._gated = _Linear([b.gated for b in blocks])
        self._gates = Jobs(GATE_FIELDS, len(blocks)).filled(width=blocks[0].gated.inputs)
        self._last_norm, self._head = _norms([decoder.norm]), _Linear([decoder.head])
        rotated = self._positions(torch.zeros(1, dtype=torch.long))[0].shape[-1]
        heads = Heads(
            dtype, queries, shape.heads, shape.key_dim, shape.value_dim, rotated, blocks[0].query_norm is not None
        )
        self._rotate, self._rotations = _function("rotate", heads), _rotations(blocks)
        self._still = np.array([i for i, block in enumerate(blocks) if not block.turned], dtype=np.int64)
        self._norm, self._gate = _function("norm", dtype), _function("gate", dtype)
        self._attention = _Attention(
            _group(decoder, shape, dtype),
            [s.window for s in layers],
            [b.scaling for b in blocks],
        )
        self._memory: dict[str, Tensor] = {}

    def __call__(self, pieces: Sequence[tuple[TorchSlot, int]], ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Logits `[n, vocab]` of the rows `keep` `[n]`; ids and positions: `[tokens]`, those of `pieces` in order.

        pieces: (slot, new tokens), those of one token first; their positions begin at `slot.length`. The KV is
        written, the lengths are not. Of the last layer only the kept rows are computed to the end.
        """
        n, threads, m = len(ids), torch.get_num_threads(), self._room(len(ids))
        m["h"][:n], m["delta"][:n] = self._decoder.embed(ids), 0
        every, kept = np.arange(n), keep.numpy()
        logits = torch.empty((len(kept), self._decoder.head.outputs))
        planes = np.stack([slot.addresses() for slot, _ in pieces], axis=1)
        of = planes.ctypes.data + np.arange(len(planes)) * planes.strides[0]
        capacities = np.array([slot.capacity for slot, _ in pieces])
        where = np.repeat(np.arange(len(pieces)), [count for _, count in pieces])
        cosines, sines = self._positions(positions)
        rotations = self._rotations.filled(
            **{"rows": n, **_at(mixed=m["mixed"]), "cosines": cosines.data_ptr(), "sines": sines.data_ptr()},
            keys=of[::2],
            values=of[1::2],
            pieces=where.ctypes.data,
            positions=positions.data_ptr(),
            capacities=capacities.ctypes.data,
        )
        ones, zeros = torch.ones_like(cosines), torch.zeros_like(sines)
        rotations.set(self._still, cosines=ones.data_ptr(), sines=zeros.data_ptr())
        attention = self._attention.calls(pieces, planes, m["mixed"], m["attended"], threads)
        first, second, last = (
            jobs.filled(
                rows=n,
                h_from=every.ctypes.data,
                delta_from=every.ctypes.data,
                **_at(h=m["h"], delta=m["delta"], out=m["x"]),
            )
            for jobs in (*self._norms, self._last_norm)
        )
        gates = self._gates.filled(rows=n, **_at(both=m["both"], out=m["gated"]))
        for jobs in (second, last):
            jobs.set(-1, rows=len(kept), h_from=kept.ctypes.data)
        second.set(-1, delta_from=kept.ctypes.data)
        gates.set(-1, rows=len(kept))
        layers = [
            Call(self._norm, first),
            *self._mixed.calls(m, "x", m["mixed"], n, threads),
            Call(self._rotate, rotations),
            *attention.calls,
            *self._attended.calls(m, "attended", m["delta"], n, threads),
            Call(self._norm, second),
            *self._both.calls(m, "x", m["both"], n, threads, len(kept)),
            Call(self._gate, gates),
            *self._gated.calls(m, "gated", m["delta"], n, threads, len(kept)),
        ]
        end = [Call(self._norm, last), *self._head.calls(m, "x", logits, len(kept), threads)]
        run([layers, end], threads)
        return logits

    def hidden(self, rows: int) -> Tensor:
        """float32 `[rows, hidden]`: what the last forward's last layer made of its rows, if it kept them all."""
        return self._memory["h"][:rows].clone()

    def _positions(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 `[n, rotated]`, as the stock code rounds them."""
        like = torch.empty(0, dtype=self._dtype)
        cosines, sines = self._decoder.rotary(like, position_ids=positions.unsqueeze(0))
        return cosines[0].float().contiguous(), sines[0].float().contiguous()

    def _room(self, rows: int) -> dict[str, Tensor]:
        """Memory between the functions, for at least that many rows. It is kept: fresh pages cost time."""
        if not self._memory or len(self._memory["h"]) < rows:
            first, rows = self._decoder.blocks[0], -(-rows // _GROWTH) * _GROWTH
            widths = {
                **dict.fromkeys(_WIDE, first.mixed.inputs),
                "x": first.mixed.inputs,
                "mixed": first.mixed.outputs,
                "attended": first.attended.inputs,
                "both": first.both.outputs,
                "gated": first.gated.inputs,
            }
            self._memory = {
                name: torch.empty((rows, width), dtype=torch.float32 if name in _WIDE else self._dtype)
                for name, width in widths.items()
            }
            self._memory["levels"] = torch.empty((rows, max(widths.values()) + 4), dtype=torch.uint8)
            self._memory["scales"] = torch.empty((rows, 1))
        return self._memory


class _Linear:
    """One linear layer of every block."""

    def __init__(self, products: Sequence[AnyProduct]) -> None:
        self._first = first = products[0]
        in_bytes = isinstance(first, CompiledInt8Product)
        self._jobs = Jobs(BYTE_FIELDS if in_bytes else PRODUCT_FIELDS, len(products))
        self._levels = Jobs(LEVELS_FIELDS, len(products))
        for i, product in enumerate(products):
            self._jobs.set(i, **product.fields)
            if isinstance(product, CompiledInt8Product):
                self._levels.set(i, **product.levels_fields)

    def calls(
        self, m: dict[str, Tensor], x: str, out: Tensor, rows: int, threads: int, last: int | None = None
    ) -> list[Call]:
        """m: memory, in which `x` is the input. last: rows of the last layer, if those are others."""
        first, given = self._first, _at(x=m[x])
        before, more = [], {}
        if isinstance(first, CompiledInt8Product):
            levels, scales = m["levels"][:, : first.row_bytes], {"scales": m["scales"].data_ptr()}
            jobs = self._levels.filled(**given, **_at(out=levels), **scales, rows=rows)
            jobs.set(-1, rows=rows if last is None else last)
            before = [Call(compiled_int8.levels_address(first.dtype), jobs)]
            given, more = _at(x=levels), {"row_scales": scales["scales"]}
        cut = Cut.of(rows, first.blocks, threads)
        jobs = self._jobs.filled(**given, **_at(out=out), **more, wide=out.dtype is torch.float32, **cut.fields)
        functions: Numbers = np.full(jobs.layers, first.address(cut.height))
        if last is not None and last != rows:
            cut = Cut.of(last, first.blocks, threads)
            jobs.set(-1, **cut.fields)
            functions[-1] = first.address(cut.height)
        return [*before, Call(functions, jobs)]


class _Attention:
    """The attention of every block: one function for all pieces of one token, and one for each other piece."""

    def __init__(self, shape: flash.Shape, windows: Sequence[int | None], scalings: Sequence[float]) -> None:
        self._shape = shape
        self._layers = {w: np.array([i for i, x in enumerate(windows) if x == w]) for w in dict.fromkeys(windows)}
        self._single, self._chunk = compiled.attention(shape), compiled_chunk.attention(shape)
        self._singles = Jobs(flash.FIELDS, len(windows)).filled(scale=[compiled.scale_bits(s) for s in scalings])
        self._chunks = Jobs(flash_chunk.FIELDS, len(windows))
        for i, scaling in enumerate(scalings):
            self._chunks.set(i, **compiled_chunk.scale_fields(shape.dtype, scaling))

    def calls(
        self, pieces: Sequence[tuple[TorchSlot, int]], planes: Numbers, mixed: Tensor, attended: Tensor, threads: int
    ) -> _Attending:
        """planes: `[planes, pieces]`, addresses. mixed, attended: rows of query heads, and of results."""
        n = [count for _, count in pieces].count(1)
        found = _Attending([], [])
        if n:
            self._add_singles(found, [slot for slot, _ in pieces[:n]], planes, mixed, attended, threads)
        row = n
        for i, (slot, count) in enumerate(pieces[n:], n):
            rows = slice(row, row + count)
            self._add_chunk(found, slot, count, planes[:, i], mixed[rows], attended[rows])
            row += count
        return found

    def _add_singles(
        self, to: _Attending, slots: Sequence[TorchSlot], planes: Numbers, mixed: Tensor, attended: Tensor, threads: int
    ) -> None:
        capacities = np.array([slot.capacity for slot in slots])
        ends = np.array([slot.length + 1 for slot in slots])
        of = planes.ctypes.data + np.arange(len(planes)) * planes.strides[0]
        size = mixed.itemsize
        jobs = self._singles.filled(
            threads=threads,
            keys=of[::2],
            values=of[1::2],
            out=attended.data_ptr(),
            query=mixed.data_ptr(),
            query_piece=mixed.stride(0) * size,
            query_head=self._shape.key_dim * size,
        )
        for window, layers in self._layers.items():
            plan = compiled.Plan(self._shape, window, capacities, ends)
            jobs.set(layers, **plan.fields)
            to.kept.append(plan)
        to.calls.append(Call(self._single, jobs))

    def _add_chunk(
        self, to: _Attending, slot: TorchSlot, count: int, planes: Numbers, mixed: Tensor, attended: Tensor
    ) -> None:
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
        for window, layers in self._layers.items():
            first = 0 if window is None else max(0, slot.length + 1 - window)
            plan = compiled_chunk.plan(shape, count, slot.length + count - first, window)
            keys = planes[::2][layers] + first * shape.key_dim * size
            values = planes[1::2][layers] + first * shape.value_dim * size
            jobs.set(layers, key=keys, value=values, **plan.fields)
            to.kept.append(plan)
        to.calls.append(Call(self._chunk, jobs))


class _Attending:
    """Calls, and what must live as long as they do."""

    def __init__(self, calls: list[Call], kept: list[object]) -> None:
        self.calls, self.kept = calls, kept


def _group(decoder: Decoder, shape: LayerShape, dtype: torch.dtype) -> flash.Shape:
    group = decoder.blocks[0].queries // shape.heads
    return flash.Shape(dtype, group, shape.heads, shape.key_dim, shape.value_dim)


def _norms(norms: Sequence[Norm]) -> Jobs:
    jobs = Jobs(NORM_FIELDS, len(norms))
    for i, norm in enumerate(norms):
        jobs.set(i, weight=norm.weight.data_ptr(), width=len(norm.weight), epsilon=_bits(norm.epsilon))
    return jobs


def _rotations(blocks: Sequence[Block]) -> Jobs:
    jobs = Jobs(ROTATE_FIELDS, len(blocks))
    for i, block in enumerate(blocks):
        if block.query_norm is not None and block.key_norm is not None:
            weights = {
                "query_weight": block.query_norm.weight.data_ptr(),
                "key_weight": block.key_norm.weight.data_ptr(),
            }
            jobs.set(i, epsilon=_bits(block.query_norm.epsilon), **weights)
    return jobs


def _at(**tensors: Tensor) -> dict[str, int]:
    """For each the field of its name, and that of the bytes from row to row."""
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    return addresses | {f"{name}_row": tensor.stride(0) * tensor.itemsize for name, tensor in tensors.items()}


def _bits(x: float) -> int:
    """Of a float32."""
    return int.from_bytes(struct.pack("<f", x), "little")


def _function(name: str, *how: Any) -> int:
    """Address of a function of `pointwise`."""
    return _compiled(name, *how).address(name)


@cache
def _compiled(name: str, *how: Any) -> Code:
    return Code([getattr(pointwise, name)(*how)])
