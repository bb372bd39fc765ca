"""Attention over one piece's K and V where they lie, with grouped query heads: torch's fused kernel, or step by step.

Pure functions of tensors, for any device. Called by `attention`; faster ones for CPUs are in `products` and `compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pdq.engine import products


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """Attention with linear biases (arXiv 2108.12409): a score falls by the head's slope for each token of distance.

    slopes: `[heads]`, in the dtype in which the architecture multiplies them with positions. scale: of the product.
    """

    slopes: Tensor
    scale: float = 1.0

    def bias(self, first: int, end: int) -> Tensor:
        """float32 `[heads, end - first]` for keys at [first, end). The same for every query but for a constant."""
        bias = (self.slopes[:, None] * torch.arange(first, end, device=self.slopes.device)).float() * self.scale
        return bias - bias[:, -1:]  # softmax does not see the constant, but half precision would


@dataclass(frozen=True, slots=True)
class Scores:
    """How an architecture turns q . k into scores. scaling None: 1 / sqrt(dim). sinks: `[heads]`."""

    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Alibi | None = None

    @property
    def fused(self) -> bool:
        """Does torch's fused kernel know them, given a mask?"""
        return self.softcap is None and self.sinks is None

    @property
    def plain(self) -> bool:
        """Nothing but q . k, scaled."""
        return self.fused and self.alibi is None


def decode(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    seen: Sequence[int | None],
    scores: Scores,
    biases: Sequence[Tensor | None],
) -> Tensor:
    """One new token per piece: query `[1, heads, pieces, dim]` -> `[1, pieces, heads, value_dim]`.

    The query heads of a group become the query-length axis, so K and V are read once for all of them and no mask is
    needed: everything in view is in the past. seen: None, or of how many tokens that is true; the others are padding.
    biases: None, or `[heads, visible]` to add to the scores.
    """
    _, heads, count, dim = query.shape
    kv_heads = keys[0].shape[1]
    rows = query.transpose(1, 2).reshape(count, kv_heads, heads // kv_heads, dim)
    sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1)
    outs = []
    for q, k, v, n, bias in zip(torch.split(rows, 1), keys, values, seen, biases, strict=True):
        if n is not None and scores.plain:
            outs.append(products.single(q, k, v, n, scores.scaling))
            continue
        mask = None if bias is None else bias.view(1, kv_heads, heads // kv_heads, -1).to(q.dtype)
        outs.append(_attention(q, k[:, :, :n], v[:, :, :n], mask, scores, sinks))
    return torch.cat(outs).reshape(1, count, heads, -1)


def prefill(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Many new tokens of one piece: query `[1, heads, n, dim]` -> `[1, n, heads, value_dim]`.

    The group becomes the batch axis and K and V are broadcast over it, which copies nothing. mask: additive, `[n,
    visible]` or `[heads, n, visible]`; None: causal from position 0, for plain scores only.
    """
    _, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    rows = query.reshape(kv_heads, group, n, dim).transpose(0, 1)
    keys, values = key.expand(group, -1, -1, -1), value.expand(group, -1, -1, -1)
    if mask is None:
        out = functional.scaled_dot_product_attention(rows, keys, values, is_causal=True, scale=scores.scaling)
    else:
        sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, group).t()[:, :, None]
        if mask.dim() == 3:
            mask = mask.view(kv_heads, group, n, -1).transpose(0, 1)
        out = _attention(rows, keys, values, mask, scores, sinks)
    return out.permute(2, 1, 0, 3).reshape(1, n, heads, -1)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Attention over all that `mask` (additive; None: everything) leaves. sinks `[..., kv_heads, query rows or 1]`."""
    if not scores.fused:
        return written_out(query, key, value, mask, scores, sinks)
    if query.shape[2] == 1 and key.dtype.itemsize < 4 and key.device.type == "cpu":
        # A single row takes a several times slower path in the CPU kernel for half precision than two equal ones.
        query = query.expand(-1, -1, 2, -1)
        mask = None if mask is None else mask.expand(*mask.shape[:-2], 2, -1)
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scores.scaling)[:, :, :1]
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scores.scaling)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scores: Scores, sinks: Tensor | None
) -> Tensor:
    """Attention step by step, for what no fused kernel knows: soft-capped scores (Gemma 2) and sinks (gpt-oss).

    A sink is a learned score of one more, imaginary position with value zero.
    """
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    found = torch.matmul(query, key.transpose(-1, -2)).float() * scaling
    if scores.softcap is not None:
        found = torch.tanh(found / scores.softcap) * scores.softcap
    if mask is not None:
        found = found + mask
    if sinks is not None:
        found = torch.cat([found, sinks.unsqueeze(-1).float().expand(*found.shape[:-1], 1)], -1)
    weights = torch.softmax(found, -1)[..., : key.shape[-2]]
    return torch.matmul(weights.to(value.dtype), value)
