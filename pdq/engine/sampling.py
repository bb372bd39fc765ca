"""From logits to tokens, a whole batch at once.

A row's token depends on its logits, its `SamplingParams` and the position alone: not on its neighbours, the order of
rows, the worker or torch's generators. Knows nothing of slots or models; `runner` calls `sample` once per forward.

A drawn row is decided by one uniform number and the inverse of the cumulative distribution: over the tokens in order of
their ids where no filter is on, else over those that the filters leave, most probable first and equal ones by id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from pdq.messages import SamplingParams

# Filtered rows are decided among this many most probable tokens where they can be, else among more: sorting a whole
# vocabulary costs more than all the rest of sampling.
_HEADS = (256, 4096)
# Numbers per group of rows on a CPU: what stays in its cache, and is small enough for the allocator to keep at hand.
_CPU_GROUP = 1 << 16
_LOW_BITS = 0x7FFFFFFF
_Pick: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_COLDEST = 1e-30  # lower temperatures would overflow float32; by then the distribution is a point anyway


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of token `position` of a request: 52 bits of SHA-256 over both numbers in decimal.

    52, not 53: so it is at most 1 - 2^-52, and a double multiplied with it always becomes smaller.
    """
    digest = hashlib.sha256(b"%d:%d" % (seed, position)).digest()
    return (int.from_bytes(digest[:8], "little") >> 12) / 2.0**52


def sample(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int | None]:
    """The token of each row: `logits` `[n, vocab]`, of any float type, and (params, position) per row.

    None for a row whose logits hold NaN or +inf, or nothing finite: that request cannot go on, its neighbours can.
    """
    logits = logits.float()
    top, chosen = logits.max(-1)  # NaN wins; of equal logits the first
    for index, limits, pick in _groups(logits, rows):
        # Minus the maximum first: no temperature overflows then. Rows that are not numbers stay so, harmlessly.
        scaled = (logits[index] - top[index, None]).div_(limits[:, :1].float())
        chosen[index] = pick(torch.softmax(scaled, -1), limits)
    return [token if token >= 0 else None for token in torch.where(torch.isfinite(top), chosen, -1).tolist()]


def rows_at_once(logits: Tensor) -> int:
    """How many rows of `logits` are best worked on together, where each needs memory of a row's size."""
    rows, vocab = logits.shape
    return max(1, rows if logits.device.type != "cpu" else _CPU_GROUP // vocab)


def _groups(logits: Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> Iterator[tuple[Tensor, Tensor, _Pick]]:
    """The rows to draw, in groups that share a way to pick: row numbers, limits `[n, 5]` and the way.

    Limits are temperature, top_k, top_p, min_p and the uniform number of each row.
    """
    vocab = logits.shape[1]
    free: list[tuple[int, tuple[float, ...]]] = []
    bound: list[tuple[int, tuple[float, ...]]] = []
    for i, (p, position) in enumerate(rows):
        if p.temperature > 0:
            top_k = p.top_k if 0 < p.top_k < vocab else vocab
            limits = (max(p.temperature, _COLDEST), top_k, p.top_p, p.min_p, uniform(p.seed, position))
            (free if top_k == vocab and p.top_p >= 1 and p.min_p <= 0 else bound).append((i, limits))
    size = rows_at_once(logits)
    for pick, group in ((_unfiltered, free), (_filtered, bound)):
        for at in range(0, len(group), size):
            index, limits = zip(*group[at : at + size], strict=True)
            yield (
                torch.tensor(index, device=logits.device),
                torch.tensor(limits, dtype=torch.float64, device=logits.device),
                pick,
            )


def _unfiltered(probs: Tensor, limits: Tensor) -> Tensor:
    """Token ids `[n]` where no filter is on: the order does not matter then, and sorting can be left out."""
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, limits[:, 4:] * cumulated[:, -1:], right=True).squeeze(1)


def _filtered(probs: Tensor, limits: Tensor) -> Tensor:
    """Token ids `[n]`, looked for among ever more of the most probable tokens of each row."""
    vocab = probs.shape[1]
    total = probs.sum(-1, dtype=torch.float64)
    keys = _sort_keys(probs)
    tokens = torch.empty(len(probs), dtype=torch.long, device=probs.device)
    open_rows = torch.arange(len(probs), device=probs.device)
    for head in (*(h for h in _HEADS if h < vocab), vocab):
        top = keys[open_rows].topk(head).values if head < vocab else keys[open_rows].sort(descending=True).values
        tokens[open_rows], settled = _pick(top, total[open_rows], limits[open_rows], vocab)
        open_rows = open_rows[~settled]
        if not len(open_rows):
            break
    return tokens


def _sort_keys(probs: Tensor) -> Tensor:
    """One int64 per token that orders by probability, then by lower token id; all different, so any sort is stable.

    The bits of a non-negative float32, read as an integer, order like the float.
    """
    ids = torch.arange(probs.shape[1], device=probs.device)
    return (probs.view(torch.int32).long() << 32) | (_LOW_BITS - ids)


def _pick(keys: Tensor, total: Tensor, limits: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Choose among the `head` most probable tokens of each row, given as sorted `keys` `[n, head]`.

    total: sum of all probabilities of a row. limits: temperature, top_k, top_p, min_p and the uniform number of a row.
    Returns token ids `[n]` and whether they are right `[n]`: false where tokens beyond the head matter.
    """
    head = keys.shape[1]
    probs = (keys >> 32).int().view(torch.float32).double()
    cumulated = probs.cumsum(-1)
    _, top_k, top_p, min_p, random = limits.unbind(1)
    last = (top_k.long().clamp(1, head) - 1).unsqueeze(1)
    inside = top_k <= head
    mass = torch.where(inside, cumulated.gather(1, last).squeeze(1), total)

    kept = torch.arange(head, device=keys.device) <= last
    kept &= (cumulated - probs < (top_p * mass).unsqueeze(1)) | (top_p >= 1).unsqueeze(1)
    kept &= (probs >= min_p.unsqueeze(1) * probs[:, :1]) & (probs > 0)
    end = kept.sum(-1, keepdim=True).clamp(min=1) - 1  # every filter keeps a beginning, so what is kept is one

    # With top_k between head and vocab the mass that top_p refers to is not known here.
    settled = inside | ((top_k >= vocab) & (end.squeeze(1) < head - 1))
    target = random.unsqueeze(1) * cumulated.gather(1, end)
    rank = torch.minimum((cumulated <= target).sum(-1, keepdim=True), end)
    return _LOW_BITS - (keys.gather(1, rank).squeeze(1) & _LOW_BITS), settled
