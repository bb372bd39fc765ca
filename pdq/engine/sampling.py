"""From logits to tokens, a whole batch at once.

A row's token depends on its logits, its `SamplingParams` and the position alone: not on its neighbours, the order of
rows, the worker or torch's generators. Knows nothing of slots or models; `runner` calls `sample` once per forward.

A drawn row is decided by one uniform number and the inverse cumulative distribution over the tokens that the filters
leave, most probable first and equal ones by token id.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from pdq.messages import SamplingParams

# Rows are decided among this many most probable tokens where they can be: sorting a whole vocabulary costs more than
# all the rest of sampling.
_HEAD = 256
_LOW_BITS = 0x7FFFFFFF
_COLDEST = 1e-30  # lower temperatures would overflow float32; by then the distribution is a point anyway


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of token `position` of a request: 53 bits of SHA-256 over both numbers in decimal."""
    digest = hashlib.sha256(b"%d:%d" % (seed, position)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2.0**53


def sample(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> list[int | None]:
    """The token of each row: `logits` `[n, vocab]`, of any float type, and (params, position) per row.

    None for a row whose logits hold NaN or +inf, or nothing finite: that request cannot go on, its neighbours can.
    """
    logits = logits.float()
    top, chosen = logits.max(-1)  # NaN wins; of equal logits the first
    good = torch.isfinite(top)
    drawn = [i for i, (params, _) in enumerate(rows) if params.temperature > 0]
    if drawn:
        everyone = len(drawn) == len(rows)
        index = slice(None) if everyone else torch.tensor(drawn, device=logits.device)
        shifted = torch.where(good[index, None], logits[index] - top[index, None], 0.0)
        chosen[index] = _draw(shifted, [rows[i] for i in drawn])
    return [token if token >= 0 else None for token in torch.where(good, chosen, -1).tolist()]


def _draw(logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, int]]) -> torch.Tensor:
    """Token ids `[n]` drawn from `logits` `[n, vocab]` with maximum 0: temperature, then top_k, top_p, min_p."""
    vocab = logits.shape[1]
    settings = [
        (
            max(p.temperature, _COLDEST),
            p.top_k or vocab,
            p.top_p if p.top_p < 1 else math.inf,
            p.min_p,
            uniform(p.seed, position),
        )
        for p, position in rows
    ]
    limits = torch.tensor(settings, dtype=torch.float64, device=logits.device)
    probs = torch.softmax(logits / limits[:, :1].float(), -1)
    total = probs.sum(-1, dtype=torch.float64)
    keys = _sort_keys(probs)
    tokens, settled = _pick(keys.topk(min(_HEAD, vocab)).values, total, limits, vocab)
    for i in torch.nonzero(~settled).flatten().tolist():
        one = slice(i, i + 1)
        tokens[one], _ = _pick(keys[one].sort(descending=True).values, total[one], limits[one], vocab)
    return tokens


def _sort_keys(probs: torch.Tensor) -> torch.Tensor:
    """One int64 per token that orders by probability, then by lower token id; all different, so any sort is stable.

    The bits of a non-negative float32, read as an integer, order like the float.
    """
    ids = torch.arange(probs.shape[1], device=probs.device)
    return (probs.view(torch.int32).long() << 32) | (_LOW_BITS - ids)


def _pick(
    keys: torch.Tensor, total: torch.Tensor, limits: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
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
    mass_k = torch.where(inside, cumulated.gather(1, last).squeeze(1), total)

    kept = torch.arange(head, device=keys.device) <= last
    kept &= cumulated - probs < (top_p * mass_k).unsqueeze(1)
    kept &= (probs >= min_p.unsqueeze(1) * probs[:, :1]) & (probs > 0)
    count = kept.sum(-1).clamp(min=1)  # every filter keeps a beginning, so what is kept is one

    every = top_k >= vocab
    ends_here = inside | (every & (count < head))  # between head and vocab the mass of the top k is not known here
    unfiltered = every & (top_p >= 1) & (min_p <= 0)
    mass = torch.where(ends_here, cumulated.gather(1, (count - 1).unsqueeze(1)).squeeze(1), total)
    target = random * mass
    settled = ends_here | (unfiltered & (target < cumulated[:, -1]))
    rank = torch.minimum((cumulated <= target.unsqueeze(1)).sum(-1), count - 1)
    return _LOW_BITS - (keys.gather(1, rank.unsqueeze(1)).squeeze(1) & _LOW_BITS), settled
