"""Attention by plain matrix products, where those beat torch's fused kernel: bfloat16 on a CPU, most of the time.

The fused CPU kernel gets a small part of what the CPU's matrix instructions give a plain product. Measured outside AMX,
one thread: a chunk of 512 tokens is three times as fast this way, a single token after 1,024 one and a half times.
Scores are rounded to bfloat16 before the softmax, as stock "eager" attention does (rms error against float64 0.4 %;
the fused kernel 0.2 %). Which one wins depends on the CPU: `kernel_selection`.

Owns these two kernels; what may be seen comes in as masks from `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Every new shape costs oneDNN a fraction of a millisecond, once; so single tokens look at a multiple of this many.
PADDING = 64
_SCORE_BYTES = 8 << 20  # of one block of rows: fits in the cache of a CPU, and bounds memory for long contexts
_ROW_STEP = 64
_FEWEST_ROWS = 8
_FEWEST_SCORES = 4096  # of a head: with fewer, the more exact kernel costs nothing worth saving
_FEWEST_KEYS = 96 * 1024  # numbers in K: with fewer, the fixed costs of three operations outweigh the gain


@dataclass(frozen=True, slots=True)
class Bmm:
    """Where to use the kernels of this module."""

    chunks: bool = False
    singles: bool = False

    def chunk(self, tokens: int, visible: int) -> bool:
        return self.chunks and tokens >= _FEWEST_ROWS and tokens * visible >= _FEWEST_SCORES

    def single(self, kv_heads: int, visible: int, dim: int) -> bool:
        return self.singles and kv_heads * visible * dim >= _FEWEST_KEYS


class Scratch:
    """Memory for scores that all layers of a forward share: fresh pages for each would cost as much as the softmax."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None

    def pair(self, shape: tuple[int, int, int], like: Tensor) -> tuple[Tensor, Tensor]:
        """Two uninitialised tensors of `shape`, valid until the next call."""
        size = shape[0] * shape[1] * shape[2]
        if self._flat is None or len(self._flat) < 2 * size:
            self._flat = torch.empty(2 * size, dtype=like.dtype, device=like.device)
        return self._flat[:size].view(shape), self._flat[size : 2 * size].view(shape)


def single(query: Tensor, key: Tensor, value: Tensor, seen: int, scaling: float | None) -> Tensor:
    """One token: query `[1, kv_heads, group, dim]`, key and value `[1, kv_heads, tokens, dim]` -> like query.

    Only the first `seen` tokens are there; the rest is padding, of any numbers. K comes first in the product: the
    other way round it would be reordered.
    """
    _, kv_heads, group, dim = query.shape
    scaling = dim**-0.5 if scaling is None else scaling
    scores = torch.empty((kv_heads, key.shape[2], group), dtype=key.dtype, device=key.device)
    torch.baddbmm(scores, key[0], query[0].transpose(1, 2), beta=0, alpha=scaling, out=scores)
    if seen < key.shape[2]:
        scores[:, seen:] = float("-inf")
    return torch.bmm(torch.softmax(scores.transpose(1, 2), -1), value[0]).unsqueeze(0)


def chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    windowed: bool,
    scaling: float | None,
    scratch: Scratch,
) -> Tensor:
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
