"""What replaces the cache and the attention of a stock model: one `Step` per forward over ragged pieces of slots.

The modelling code gets a `Step` as its cache. For every layer it calls `update`, which writes the new KV into the
slots, and then the registered attention function, which reads them in place: no copies, no padding, no repeated heads.
The function finds its step through a thread-local, since not every architecture passes extra arguments down; engines
in different threads do not meet. Masks are made here: the modelling code makes none for an implementation whose name
it does not know, so causality and windows follow from positions and the layout alone.

Owns masking and the choice of kernels. Knows nothing of sampling, wire bytes or which model runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import AttentionInterface

from pdq.engine import blocked
from pdq.engine.kv import LayerShape, TorchSlot

IMPLEMENTATION = "pdq"
_running = threading.local()


class Attending(Protocol):
    """Whatever can stand behind the registered function during a forward: a `Step`, or the probe."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        module: torch.nn.Module,
        **options: Any,
    ) -> torch.Tensor:
        """query `[1, heads, tokens, key_dim]` -> `[1, tokens, heads, value_dim]`."""
        ...


@contextmanager
def running(step: Attending) -> Iterator[None]:
    """Within the block attention calls of this thread go to `step`."""
    _running.step = step
    try:
        yield
    finally:
        del _running.step


def current() -> Attending:
    """Whose forward this thread is in. Raises RuntimeError outside `running`."""
    step: Attending | None = getattr(_running, "step", None)
    if step is None:
        raise RuntimeError("attention was called outside an engine's forward")
    return step


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers under IMPLEMENTATION."""
    return current().attend(query, key, value, attention_mask, module=module, **options), None


AttentionInterface.register(IMPLEMENTATION, attention_forward)


@dataclass(frozen=True, slots=True)
class Scores:
    """How an architecture turns q . k into scores. scaling None: 1 / sqrt(dim). sinks: `[heads]`."""

    scaling: float | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


class Step:
    """KV writes and attention of one forward.

    pieces: (slot, new tokens) in the order of the packed rows; all pieces of one token come first. The new tokens of a
    slot get the positions from `slot.length` on; the lengths are not changed here. choice: where products are used
    instead of the fused kernel.
    """

    is_compileable = False  # asked by transformers of every cache

    def __init__(
        self, layers: Sequence[LayerShape], pieces: Sequence[tuple[TorchSlot, int]], choice: Choice = _FUSED
    ) -> None:
        self._layers = layers
        self._choice = choice
        self._counts = [n for _, n in pieces]
        self._singles = self._counts.count(1)
        self._chunks = [(slot.length, n) for slot, n in pieces[self._singles :]]
        self._written = _by_plane([slot.planes(slot.length, slot.length + n) for slot, n in pieces])
        self._sights: dict[LayerShape, _Sight] = {}
        for layer in layers:
            if layer not in self._sights:
                self._sights[layer] = self._sight(layer, pieces)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}
        self._scratch = products.Scratch()
        self._layer = -1  # whose KV has been written and not been attended to yet

    def _sight(self, layer: LayerShape, pieces: Sequence[tuple[TorchSlot, int]]) -> _Sight:
        planes, masks = [], []
        for i, (slot, n) in enumerate(pieces):
            first, end = _first(slot.length, layer.window), slot.length + n
            padded, mask = end, None
            if i < self._singles and self._choice.single(layer.heads, end - first, layer.key_dim):
                padded = min(slot.capacity, first - (first - end) // products.PADDING * products.PADDING)
            planes.append(slot.planes(first, padded))
        return _Sight(_by_plane(planes), masks)
def _first(start: int, window: int | None) -> int:
    """The oldest position that a token at `start` sees."""
    return 0 if window is None else max(0, start + 1 - window)


def causal_mask(start: int, n: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive mask for tokens at [start, start + n) over positions from the oldest visible one to start + n."""
    first = _first(start, window)
    seen = torch.ones((n, start + n - first), dtype=torch.bool, device=like.device).tril_(start - first)
    if window is not None:
        seen.triu_(start - first - window + 1)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def decode(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], scores: Scores
) -> torch.Tensor:
    """One new token per piece: query `[1, heads, pieces, dim]` -> `[1, pieces, heads, value_dim]`.

    The query heads of a group become the query-length axis, so K and V are read once for all of them and no mask is
    needed: everything in view is in the past.
    """
    _, heads, count, dim = query.shape
    kv_heads = keys[0].shape[1]
    rows = query.transpose(1, 2).reshape(count, kv_heads, heads // kv_heads, dim)
    sinks = None if scores.sinks is None else scores.sinks.view(kv_heads, -1)
    singles = zip(torch.split(rows, 1), keys, values, strict=True)
    outs = [_attention(q, k, v, None, scores, sinks) for q, k, v in singles]
    return torch.cat(outs).reshape(1, count, heads, -1)


def prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scores: Scores
) -> torch.Tensor:
    """Many new tokens of one piece: query `[1, heads, n, dim]` -> `[1, n, heads, value_dim]`.

    The group becomes the batch axis and K and V are broadcast over it, which copies nothing. mask None: causal from
    position 0, for plain scores only.
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
        out = _attention(rows, keys, values, mask, scores, sinks)
    return out.permute(2, 1, 0, 3).reshape(1, n, heads, -1)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over all that `mask` (additive; None: everything) leaves. sinks `[..., kv_heads, query rows or 1]`."""
    if not scores.plain:
        return written_out(query, key, value, mask, scores, sinks)
    if query.shape[2] == 1 and key.dtype.itemsize < 4:
        # A single row takes a several times slower path in the CPU kernel for half precision than two equal ones.
        query = query.expand(-1, -1, 2, -1)
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scores.scaling)[:, :, :1]
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scores.scaling)


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scores: Scores,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
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
