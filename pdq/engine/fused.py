"""The forward of a model of usual blocks over KV slots, as one `program` of compiled functions.

The stock code spends a third of a small model's step between the products, in hundreds of small operations; here are
nine functions a layer, and nothing of Python in between. The jobs of all layers are the rows of one table for each
function; a forward fills in what is its own. The model's own modules still embed tokens and make the tables of
positions.

Owns the jobs and the memory between the functions. What it computes is compared with the stock forward by `forwards`
before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pdq.engine import compiled_chunk, flash, pointwise
from pdq.engine.blocks import Block, Decoder, Norm
from pdq.engine.code import Code
from pdq.engine.cpu import per_host
from pdq.engine.forward import Pieces
from pdq.engine.kv import LayerShape
from pdq.engine.llvm import float_bits
from pdq.engine.operands import given, require
from pdq.engine.pointwise import GATE_FIELDS, NORM_FIELDS, ROTATE_FIELDS, Heads
from pdq.engine.program import Call, Jobs, run
from pdq.engine.stages import Attention, Linear, Rows, at

_GROWTH = 64  # rows
_WIDE = ("h", "delta")  # what goes from layer to layer is float32: rounding it is a good part of bfloat16's error


class FusedForward:
    """layers: shapes of the KV, all alike but for windows, as `find_decoder` was given."""

    @staticmethod
    def can(decoder: Decoder, layers: Sequence[LayerShape], dtype: torch.dtype) -> bool:
        """Are all layers alike, and of a shape that the compiled attention knows?"""
        group = _group(decoder, layers[0], dtype)
        return not misfit(decoder, layers, dtype) and group.supported and compiled_chunk.supported(group)

    def __init__(self, decoder: Decoder, layers: Sequence[LayerShape], dtype: torch.dtype) -> None:
        """Raises ValueError for parts that do not fit together: the functions would read past the end of one."""
        if found := misfit(decoder, layers, dtype):
            raise ValueError(found)
        self.decoder, self._layers, self._dtype = decoder, tuple(layers), dtype
        blocks = decoder.blocks
        self._norm, self._gate = _function("norm", dtype), _function("gate", dtype)
        self._before_attention = _norms([b.before_attention for b in blocks])
        self._before_mlp = _norms([b.before_mlp for b in blocks])
        self._before_head = _norms([decoder.norm])
        self._gates = Jobs(GATE_FIELDS, len(blocks)).filled(width=blocks[0].gated.inputs)
        self._mixed = Linear([b.mixed for b in blocks])
        self._attended = Linear([b.attended for b in blocks])
        self._both = Linear([b.both for b in blocks])
        self._gated = Linear([b.gated for b in blocks])
        self._head = Linear([decoder.head])
        self._rotated = rotated = self._angles(torch.zeros(1, dtype=torch.long))[0].shape[-1]
        if rotated > layers[0].key_dim or rotated % 2:
            raise ValueError(f"rotary: expected an even number of at most {layers[0].key_dim}, given {rotated}")
        self._rotate = _function("rotate", _heads(blocks[0], layers[0], dtype, rotated))
        self._rotations = _rotations(blocks)
        self._still = np.array([i for i, block in enumerate(blocks) if not block.turned], dtype=np.int64)
        self._attention = Attention(
            _group(decoder, layers[0], dtype), [s.window for s in layers], [b.scaling for b in blocks]
        )
        self._memory: dict[str, Tensor] = {}

    def __call__(self, pieces: Pieces, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """See `forward.OverSlots`; the logits are float32. Of the last layer only kept rows are computed to the end.

        keep: each row at most once. Raises ValueError, with nothing written, for what does not go together.
        """
        rows = Rows(pieces, positions, keep, self._layers, self._dtype)
        n, kept = rows.count, rows.kept
        require("ids", ids, torch.int64, n)
        threads, m = torch.get_num_threads(), self._room(n)
        m["h"][:n], m["delta"][:n] = self.decoder.embed(ids), 0
        logits = torch.empty((kept, self.decoder.head.outputs))
        cosines, sines = self._angles(positions)
        for table in (cosines, sines):
            require("rotary", table, torch.float32, n, self._rotated)
        still = torch.ones_like(cosines), torch.zeros_like(sines)
        layers = [
            self._norm_call(self._before_attention, rows, m),
            *self._mixed.calls(m, "x", m["mixed"], threads, n),
            self._rotate_call(rows, m, (cosines, sines), still),
            *self._attention.calls(rows, m, threads),
            *self._attended.calls(m, "attended", m["delta"], threads, n),
            self._norm_call(self._before_mlp, rows, m, last_rows="kept"),
            *self._both.calls(m, "x", m["both"], threads, n, kept),
            self._gate_call(rows, m),
            *self._gated.calls(m, "gated", m["delta"], threads, n, kept),
        ]
        end = [
            self._norm_call(self._before_head, rows, m, last_rows="made"),
            *self._head.calls(m, "x", logits, threads, kept),
        ]
        run([layers, end], threads)
        return logits

    def _norm_call(self, norms: Jobs, rows: Rows, m: dict[str, Tensor], last_rows: str = "all") -> Call:
        """last_rows: of the last layer: all; those that are kept; or those, of which `delta` has no others by now."""
        every = rows.address("every")
        where = at(h=m["h"], delta=m["delta"], out=m["x"])
        jobs = norms.filled(rows=rows.count, h_from=every, delta_from=every, **where)
        if last_rows != "all":
            jobs.set(-1, rows=rows.kept, h_from=rows.address("kept"))
        if last_rows == "kept":
            jobs.set(-1, delta_from=rows.address("kept"))
        return Call(self._norm, jobs.keep(rows))

    def _rotate_call(
        self, rows: Rows, m: dict[str, Tensor], angles: tuple[Tensor, Tensor], still: tuple[Tensor, Tensor]
    ) -> Call:
        """angles: cosines and sines; still: those of layers that do not turn their heads."""
        jobs = self._rotations.filled(
            **{"rows": rows.count, **at(mixed=m["mixed"])},
            **{name: rows.address(name) for name in ("pieces", "positions", "capacities")},
            keys=rows.keys,
            values=rows.values,
            cosines=angles[0],
            sines=angles[1],
        )
        jobs.set(self._still, cosines=still[0], sines=still[1])
        return Call(self._rotate, jobs.keep(rows))

    def _gate_call(self, rows: Rows, m: dict[str, Tensor]) -> Call:
        jobs = self._gates.filled(rows=rows.count, **at(both=m["both"], out=m["gated"]))
        jobs.set(-1, rows=rows.kept)
        return Call(self._gate, jobs)

    def hidden(self, rows: int) -> Tensor:
        """float32 `[rows, hidden]`: what the last forward's last layer made of its rows, if it kept them all."""
        return self._memory["h"][:rows].clone()

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, float32 `[n, rotated]`, as the stock code rounds them."""
        like = torch.empty(0, dtype=self._dtype)
        cosines, sines = self.decoder.rotary(like, position_ids=positions.unsqueeze(0))
        return cosines[0].float().contiguous(), sines[0].float().contiguous()

    def _room(self, rows: int) -> dict[str, Tensor]:
        """Memory between the functions, for at least that many rows. It is kept: fresh pages cost time."""
        if not self._memory or len(self._memory["h"]) < rows:
            first, rows = self.decoder.blocks[0], -(-rows // _GROWTH) * _GROWTH
            widths = {
                **dict.fromkeys(_WIDE, first.mixed.inputs),
                "x": first.mixed.inputs,
                "mixed": first.mixed.outputs,
                "attended": first.attended.inputs,
                "both": first.both.outputs,
                "gated": first.gated.inputs,
            }
            found = {
                name: torch.empty((rows, width), dtype=torch.float32 if name in _WIDE else self._dtype)
                for name, width in widths.items()
            }
            found["levels"] = torch.empty((rows, max(widths.values()) + 4), dtype=torch.uint8)
            found["scales"] = torch.empty((rows, 1))
            self._memory = found  # all of it at once: there may be no memory for a part
        return self._memory


def misfit(decoder: Decoder, layers: Sequence[LayerShape], dtype: torch.dtype) -> str:
    """How the parts do not fit together, or not into one table of jobs; "" if they do."""
    hidden, kinds = decoder.head.inputs, set()
    wanted: list[tuple[str, object, object]] = [
        ("norm", _size(decoder.norm), hidden),
        ("head", decoder.head.dtype, dtype),
    ]
    for i, (s, b) in enumerate(zip(layers, decoder.blocks, strict=True)):
        products = (b.mixed, b.attended, b.both, b.gated)
        heads = (s.heads, s.key_dim, s.value_dim, b.queries, b.query_norm is None, b.key_norm is None)
        kinds.add((*heads, *((type(p), p.inputs, p.outputs) for p in products)))
        wanted += [
            (f"layer {i}: qkv_proj", (b.mixed.inputs, b.mixed.outputs), (hidden, _mixed_width(b, s))),
            (f"layer {i}: o_proj", (b.attended.inputs, b.attended.outputs), (b.queries * s.value_dim, hidden)),
            (f"layer {i}: gate_up_proj", (b.both.inputs, b.both.outputs), (hidden, 2 * b.gated.inputs)),
            (f"layer {i}: down_proj", b.gated.outputs, hidden),
            (f"layer {i}: queries of a head", b.queries % s.heads, 0),
            (f"layer {i}: dtypes", {p.dtype for p in products}, {dtype}),
            *((f"layer {i}: a norm", _size(norm), hidden) for norm in (b.before_attention, b.before_mlp)),
            *((f"layer {i}: a head's norm", _size(n), s.key_dim) for n in (b.query_norm, b.key_norm) if n is not None),
        ]
    if len(kinds) != 1:
        return "the layers are not all alike"
    return next((f"{what}: expected {right}, given {found}" for what, found, right in wanted if found != right), "")


def _mixed_width(block: Block, shape: LayerShape) -> int:
    """Of query, key and value heads in one row."""
    return (block.queries + shape.heads) * shape.key_dim + shape.heads * shape.value_dim


def _size(norm: Norm) -> object:
    """How many weights a function can read there."""
    weight = norm.weight
    right = weight.dim() == 1 and weight.dtype is torch.float32 and weight.is_cpu and weight.is_contiguous()
    return len(weight) if right else given(weight)


def _heads(block: Block, shape: LayerShape, dtype: torch.dtype, rotated: int) -> Heads:
    normed = block.query_norm is not None
    return Heads(dtype, block.queries, shape.heads, shape.key_dim, shape.value_dim, rotated, normed)


def _group(decoder: Decoder, shape: LayerShape, dtype: torch.dtype) -> flash.Shape:
    group = decoder.blocks[0].queries // shape.heads
    return flash.Shape(dtype, group, shape.heads, shape.key_dim, shape.value_dim)


def _norms(norms: Sequence[Norm]) -> Jobs:
    jobs = Jobs(NORM_FIELDS, len(norms))
    for i, norm in enumerate(norms):
        jobs.set(i, weight=norm.weight, width=len(norm.weight), epsilon=float_bits(norm.epsilon))
    return jobs


def _rotations(blocks: Sequence[Block]) -> Jobs:
    jobs = Jobs(ROTATE_FIELDS, len(blocks))
    for i, block in enumerate(blocks):
        if block.query_norm is not None and block.key_norm is not None:
            weights = {
                "query_weight": block.query_norm.weight,
                "key_weight": block.key_norm.weight,
            }
            jobs.set(i, epsilon=float_bits(block.query_norm.epsilon), **weights)
    return jobs


def _function(name: str, *how: Any) -> int:
    """Address of a function of `pointwise`."""
    return _compiled(name, *how).address(name)


@per_host
def _compiled(name: str, *how: Any) -> Code:
    return Code([getattr(pointwise, name)(*how)])
