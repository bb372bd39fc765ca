"""Attention of prefill chunks by matrix products, where those beat torch's fused kernel.

The fused CPU kernel for bfloat16 gets a small part of what the CPU's matrix instructions give a plain product: outside
AMX a chunk of 512 tokens is three times as fast this way. Scores are rounded to bfloat16 before the softmax, as stock
"eager" attention does (error against float64: 0.4 % rms; the fused kernel: 0.2 %). Which one wins is a matter of CPU,
threads and torch build, so `wins` tries both once.

Owns this kernel alone; what may be seen comes in as a mask from `attention`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

_SCORE_BYTES = 8 << 20  # of one block: fits in the cache of a CPU, and bounds memory for long contexts
_ROW_STEP = 64
FEWEST = 8  # tokens in a chunk: with fewer, a product's fixed costs show


class Scratch:
    """Memory for scores that all layers of a forward share: fresh pages for each would cost as much as the softmax."""

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None

    def pair(self, shape: tuple[int, int, int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two uninitialised tensors of `shape`, valid until the next call."""
        size = shape[0] * shape[1] * shape[2]
        if self._flat is None or len(self._flat) < 2 * size:
            self._flat = torch.empty(2 * size, dtype=like.dtype, device=like.device)
        return self._flat[:size].view(shape), self._flat[size : 2 * size].view(shape)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    windowed: bool,
    scaling: float | None,
    scratch: Scratch,
) -> torch.Tensor:
    """query `[1, heads, n, dim]`, key and value `[1, kv_heads, visible, dim]` -> `[1, n, heads, value_dim]`.

    mask: additive `[n, visible]`, causal: the last n visible tokens are the query's own. windowed: does it also hide
    tokens before those? Blocks of rows leave out what is in the future of all of them.
    """
    _, heads, n, dim = query.shape
    _, kv_heads, visible, value_dim = value.shape
    group = heads // kv_heads
    scaling = dim**-0.5 if scaling is None else scaling
    rows = query.reshape(kv_heads, group, n, dim)
    out = torch.empty((n, kv_heads, group, value_dim), dtype=value.dtype, device=value.device)
    step = _block_rows(heads * visible * query.element_size())
    for start in range(0, n, step):
        stop = min(n, start + step)
        own = visible - n + start  # first column of the block's own tokens
        end = visible - n + stop
        block = rows[:, :, start:stop].reshape(kv_heads, -1, dim)
        scores, weights = scratch.pair((kv_heads, block.shape[1], end), query)
        torch.baddbmm(scores, block, key[0, :, :end].transpose(1, 2), beta=0, alpha=scaling, out=scores)
        first = 0 if windowed else own
        scores.view(kv_heads, group, -1, end)[..., first:].add_(mask[start:stop, first:end])
        torch.softmax(scores, -1, out=weights)
        part = torch.bmm(weights, value[0, :, :end])
        out[start:stop] = part.view(kv_heads, group, -1, value_dim).permute(2, 0, 1, 3)
    return out.view(1, n, heads, value_dim)


def _block_rows(row_bytes: int) -> int:
    """Query tokens per block, for scores of `row_bytes` bytes per token: a multiple of 64 up to 256."""
    return max(_ROW_STEP, min(4 * _ROW_STEP, _SCORE_BYTES // row_bytes // _ROW_STEP * _ROW_STEP))


@cache
def wins(dtype: torch.dtype) -> bool:
    """Is this kernel the faster one here? Takes a few hundredths of a second, once."""
    if dtype is not torch.bfloat16:
        return False
    n, visible = 256, 1024
    query = torch.ones((1, 8, n, 64), dtype=dtype)
    key = torch.ones((1, 8, visible, 64), dtype=dtype)
    mask = torch.zeros((n, visible), dtype=dtype)
    scratch = Scratch()
    ours = _fastest(lambda: attend(query, key, key, mask, windowed=False, scaling=None, scratch=scratch))
    fused = _fastest(lambda: functional.scaled_dot_product_attention(query, key, key, mask))
    return ours < fused


def _fastest(run: Callable[[], object]) -> float:
    """Seconds of the fastest of four runs."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
