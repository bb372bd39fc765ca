"""Changes to the logits before the filters of `sampling` see them: biases, penalties, tokens that may not come.

In this order, which is vLLM's: bias, repetition penalty, presence and frequency penalties, allowed tokens, no end
before min_tokens. What a row becomes depends on its logits and its own segment alone. Steps whose requests ask for none
of this cost nothing here.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from pdq.engine.base import Segment
from pdq.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class _Row:
    """A row to change: its number, what is asked, and the segment's position and history."""

    number: int
    params: SamplingParams
    position: int
    history: Sequence[int]


def edited(logits: Tensor, segments: Sequence[Segment], eos_ids: Collection[int]) -> Tensor:
    """`logits` `[n, vocab]` of the `n` segments that want a sample, as they are or as a changed float32 copy.

    eos_ids: the model's end-of-text tokens. What is not a number stays so. Raises ValueError where a penalty lacks the
    history it needs.
    """
    rows = [
        _Row(i, s.sample, s.position, _history(s, s.sample))
        for i, s in enumerate(segments)
        if s.sample is not None and s.sample.edits_logits(s.position)
    ]
    if not rows:
        return logits
    out = logits.to(torch.float32, copy=True)
    _bias(out, [r for r in rows if r.params.logit_bias])
    _repeat(out, [r for r in rows if r.params.repetition_penalty != 1])
    _recur(out, [r for r in rows if r.params.presence_penalty or r.params.frequency_penalty])
    _restrict(out, [r for r in rows if r.params.allowed_token_ids is not None])
    _go_on(out, [r for r in rows if r.position < r.params.min_tokens], eos_ids)
    return out


def _history(segment: Segment, params: SamplingParams) -> Sequence[int]:
    if not params.counts_tokens:
        return ()
    if segment.history is None or len(segment.history) < segment.position:
        raise ValueError("penalties want the tokens of prompt and completion")
    return segment.history


def _bias(out: Tensor, rows: Sequence[_Row]) -> None:
    if not rows:
        return
    pairs = [(r, *_columns(r.params.logit_bias)) for r in rows]
    at = _places(out, [(r, ids) for r, ids, _ in pairs])
    out.view(-1)[at] += torch.cat([added for *_, added in pairs]).to(out.device)


def _repeat(out: Tensor, rows: Sequence[_Row]) -> None:
    """Hugging Face's rule: less likely by a factor, whatever the sign. All writes of a token are the same."""
    if not rows:
        return
    at = _places(out, [(r, r.history) for r in rows])
    penalty = _per_row(out, [(r, r.params.repetition_penalty) for r in rows])[at // out.shape[1]]
    found = out.view(-1)[at]
    out.view(-1)[at] = torch.where(found > 0, found / penalty, found * penalty)


def _recur(out: Tensor, rows: Sequence[_Row]) -> None:
    """OpenAI's rule: logit - presence - frequency * occurrences, for the tokens of the completion."""
    if not rows:
        return
    completions = [(r, r.history[len(r.history) - r.position :]) for r in rows]
    at, counts = torch.unique(_places(out, completions), return_counts=True)
    row = at // out.shape[1]
    presence = _per_row(out, [(r, r.params.presence_penalty) for r in rows])[row]
    frequency = _per_row(out, [(r, r.params.frequency_penalty) for r in rows])[row]
    out.view(-1)[at] -= presence + frequency * counts


def _restrict(out: Tensor, rows: Sequence[_Row]) -> None:
    for row in rows:  # one by one: a mask of all of them is memory that the allocator would have to ask for every time
        barred = out.new_full(out.shape[1:], -math.inf)
        barred[_tensor(row.params.allowed_token_ids or ()).to(out.device)] = 0.0
        out[row.number] += barred  # a sum, not a fill: a row with NaN must stay one


def _go_on(out: Tensor, rows: Sequence[_Row], eos_ids: Collection[int]) -> None:
    if not rows:
        return
    ends = [(r, sorted({*r.params.stop_token_ids, *(() if r.params.ignore_eos else eos_ids)})) for r in rows]
    out.view(-1)[_places(out, ends)] += -math.inf


def _places(out: Tensor, tokens: Iterable[tuple[_Row, Sequence[int] | Tensor]]) -> Tensor:
    """Where the tokens of the rows stand in the flat `out`."""
    vocab = out.shape[1]
    return torch.cat([_tensor(ids) + row.number * vocab for row, ids in tokens]).to(out.device)


def _per_row(out: Tensor, values: Iterable[tuple[_Row, float]]) -> Tensor:
    """One float32 a row of `out`, zero where there is none."""
    spread = [0.0] * len(out)
    for row, value in values:
        spread[row.number] = value
    return torch.tensor(spread, dtype=out.dtype, device=out.device)


def _tensor(ids: Sequence[int] | Tensor) -> Tensor:
    if isinstance(ids, Tensor):
        return ids
    if isinstance(ids, tuple):
        return _listed(ids)
    if isinstance(ids, array) and ids.typecode == "q" and len(ids):
        return torch.frombuffer(ids, dtype=torch.int64).clone()  # an array that is looked at cannot grow
    return torch.tensor(ids, dtype=torch.int64)


# What a request lists stays the same in all its steps, and building a tensor of a thousand numbers takes a while.
@lru_cache(maxsize=256)
def _listed(ids: tuple[int, ...]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


@lru_cache(maxsize=256)
def _columns(pairs: tuple[tuple[int, float], ...]) -> tuple[Tensor, Tensor]:
    """Token ids and biases."""
    ids, biases = zip(*pairs, strict=True)
    return torch.tensor(ids, dtype=torch.int64), torch.tensor(biases, dtype=torch.float32)
