"""The prefill backend for CPUs: attention of many new tokens of one sequence over its KV, one native call a layer.

`flash_chunk` has the machine code; here are the tables that it reads, made once for all layers of a forward, and what
calls it. Its threads are those of `compiled`. Called by `attention`; every other case is left to `kernels` and
`products`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdq.engine import flash_chunk, team
from pdq.engine.code import Code
from pdq.engine.cpu import per_host
from pdq.engine.flash import Shape
from pdq.engine.flash_chunk import FIELDS, MOST_VECTORS, NO_WINDOW, TILE
from pdq.engine.llvm import LANES, float_bits
from pdq.engine.operands import require

_Table = npt.NDArray[np.int64]
_MOST_DIM = 1024  # sums of an item's rows lie on a thread's stack
_SERIAL_PRODUCTS = 1 << 19  # with fewer, waking the other threads costs more than they save
_LEAST_SCALE = 2.0**-126  # in place of zero, by which -inf could not be multiplied


def chunk(
    query: Tensor, key: Tensor, value: Tensor, *, window: int | None, scaling: float | None, out: Tensor | None = None
) -> Tensor | None:
    """query `[1, heads, n, dim]`, key and value `[1, kv_heads, visible, dim]` -> `[1, n, heads, value_dim]`.

    Causal: the last n visible tokens are the query's own. window: how many tokens back, itself included, a token sees;
    key and value may begin at the first one that any sees. Tokens of a head follow each other in memory, and the heads
    of K are as many tokens apart as those of V; otherwise they are copied. scaling None: 1 / sqrt(dim). out: where the
    result is to be written, of the same dtype, any strides but 1 for the last. None: this kernel cannot do that shape.
    Raises ValueError for tensors that do not go together.
    """
    heads, n, dim, kv_heads, visible, value_dim = _sizes(query, key, value, window)
    shape = Shape(query.dtype, heads // kv_heads, kv_heads, dim, value_dim)
    if not supported(shape) or not query.dtype == key.dtype == value.dtype:
        return None
    if query.stride(3) != 1:
        query = query.contiguous()
    capacity = key.stride(1) // dim
    if key.stride()[1:] != (capacity * dim, dim, 1) or value.stride()[1:] != (capacity * value_dim, value_dim, 1):
        key, value, capacity = key.contiguous(), value.contiguous(), visible
    if out is None:
        out = torch.empty((1, n, heads, value_dim), dtype=query.dtype)
    require("out", out, query.dtype, 1, n, heads, value_dim)
    if out.stride(3) != 1:
        raise ValueError(f"out: expected numbers that follow each other, given strides {out.stride()}")
    size, (_, query_head, query_row, _), (_, out_row, out_head, _) = query.itemsize, query.stride(), out.stride()
    found = plan(shape, n, visible, window)
    values = {
        "query": query.data_ptr(),
        "query_row": query_row * size,
        "query_head": query_head * size,
        "key": key.data_ptr(),
        "value": value.data_ptr(),
        "capacity": capacity,
        "out": out.data_ptr(),
        "out_row": out_row * size,
        "out_head": out_head * size,
        **scale_fields(shape.dtype, dim**-0.5 if scaling is None else scaling),
        **found.fields,
    }
    team.run(attention(shape), FIELDS, values, 1 if found.serial else torch.get_num_threads())
    return out


def _sizes(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> tuple[int, int, int, int, int, int]:
    """heads, n, dim, kv_heads, visible, value_dim; checked."""
    require("query", query, None, 1, None, None, None)
    require("value", value, None, 1, None, None, None)
    _, heads, n, dim = query.shape
    _, kv_heads, visible, value_dim = value.shape
    require("key", key, None, 1, kv_heads, visible, dim)
    if not (kv_heads and heads and dim and value_dim) or heads % kv_heads:
        raise ValueError(
            f"query: expected heads for groups of {kv_heads}, given {heads} of {dim}, for V of {value_dim}"
        )
    if not 1 <= n <= visible:
        raise ValueError(f"query: expected 1 to {visible} tokens, the last of those visible, given {n}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1, given {window}")
    return heads, n, dim, kv_heads, visible, value_dim


def supported(shape: Shape) -> bool:
    """Any number of heads; the dims of a row are whole words of 32 bits."""
    dims = shape.key_dim, shape.value_dim
    whole = all(dim * shape.dtype.itemsize % 4 == 0 for dim in dims)
    return shape.dtype in (torch.bfloat16, torch.float32) and whole and max(dims) <= _MOST_DIM


def scale_fields(dtype: torch.dtype, scaling: float) -> dict[str, int]:
    """By the names of `flash_chunk`."""
    scale = scaling * math.log2(math.e)
    bits = float_bits(max(abs(scale), _LEAST_SCALE))
    flip = 0x80008000 if dtype is torch.bfloat16 else 0x80000000
    return {"scale": bits, "flip": 0 if scale >= 0 else flip}


class Plan:
    """What is the same for all layers of one shape and window: the tables.

    fields: by the names of `flash_chunk`, valid as long as this lives.
    """

    def __init__(self, shape: Shape, n: int, visible: int, window: int | None) -> None:
        rows = np.arange(-(-n * shape.group // LANES) * LANES, dtype=np.int64)
        tokens, heads = np.divmod(np.minimum(rows, n * shape.group - 1), shape.group)
        limits = (visible - n + tokens).astype(np.int32)
        table = _items(limits, shape.kv_heads, window)
        self._kept: dict[str, npt.NDArray[Any]] = {"table": table, "limits": limits, "tokens": tokens, "heads": heads}
        addresses = {name: array.ctypes.data for name, array in self._kept.items()}
        self.fields = {"window": window or NO_WINDOW, "items": len(table), **addresses}
        seen = int((table[:, 2] * (table[:, 4] - table[:, 3])).sum()) * LANES
        self.serial = seen * (shape.key_dim + shape.value_dim) < _SERIAL_PRODUCTS


def _items(limits: npt.NDArray[np.int32], kv_heads: int, window: int | None) -> _Table:
    """`[items, fields of an item]`, of each head those with most work first. limits: the last token each row sees."""
    vectors = len(limits) // LANES
    bounds = np.linspace(0, vectors, -(-vectors // MOST_VECTORS) + 1).astype(np.int64)
    firsts, ends = bounds[:-1], bounds[1:]
    lowest, highest = limits[firsts * LANES], limits[ends * LANES - 1]
    # Tiles begin where they do for every item, so that sums have one order.
    oldest = lowest * 0 if window is None else np.maximum(lowest - window + 1, 0)
    whole = lowest * 0 if window is None else np.maximum(highest - window + 1, 0)
    columns = (firsts, ends - firsts, oldest // TILE * TILE, highest + 1, whole, lowest + 1)
    blocks = np.stack(columns, axis=1).astype(np.int64)[::-1]
    heads = np.repeat(np.arange(kv_heads), len(blocks))[:, None]
    return np.ascontiguousarray(np.concatenate([heads, np.tile(blocks, (kv_heads, 1))], axis=1))


@lru_cache(maxsize=64)
def plan(shape: Shape, n: int, visible: int, window: int | None) -> Plan:
    return Plan(shape, n, visible, window)


def attention(shape: Shape) -> int:
    """Address of the function of `flash_chunk` for `shape`."""
    return _attention(shape).address("chunk")


@per_host
def _attention(shape: Shape) -> Code:
    return Code([flash_chunk.chunk(shape)])
