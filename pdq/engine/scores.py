"""Log probabilities of the sampled and the most likely tokens, for those segments whose request wants them.

From the model's logits as they are: before biases, penalties, temperature and filters. A row's numbers do not depend
on its neighbours; of equally likely tokens the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdq.engine.base import LEAST_LOGPROB, Scores, Segment
from pdq.engine.sampling import rows_at_once


def score(logits: Tensor, segments: Sequence[Segment], tokens: Sequence[int | None]) -> None:
    """Append to `scores` of the segments what their requests want to know.

    logits: `[n, vocab]` of the `n` segments that wanted a sample, of any float type; tokens: what was sampled.
    """
    wanted = [
        (i, token, s.sample.logprobs, s.scores)
        for i, (s, token) in enumerate(zip(segments, tokens, strict=True))
        if s.sample is not None and s.sample.logprobs is not None and s.scores is not None and token is not None
    ]
    if not wanted:
        return
    size = rows_at_once(logits)
    for at in range(0, len(wanted), size):
        group = wanted[at : at + size]
        index = torch.tensor([i for i, *_ in group], device=logits.device)
        chosen = torch.tensor([token for _, token, *_ in group], device=logits.device)
        logprobs = torch.log_softmax(logits[index].float(), -1)
        own = logprobs.gather(1, chosen[:, None]).squeeze(1).clamp(min=LEAST_LOGPROB).tolist()
        tops = _top(logprobs, max(count for _, _, count, _ in group))
        for (_, token, count, out), logprob, top in zip(group, own, tops, strict=True):
            out.append(Scores(token, logprob, tuple(top[:count])))


def _top(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most likely tokens of each row. Costs nothing for 0."""
    if not count:
        return [[]] * len(logprobs)
    # `topk` alone takes any of equally likely tokens; it says reliably only how likely the last one is.
    least = logprobs.topk(min(count, logprobs.shape[1])).values[:, -1:]
    row, ids = (logprobs >= least).nonzero(as_tuple=True)
    values, ids = logprobs[row, ids].clamp(min=LEAST_LOGPROB).cpu(), ids.cpu()
    sizes = row.bincount(minlength=len(logprobs)).tolist()
    found = []
    for v, i in zip(torch.split(values, sizes), torch.split(ids, sizes), strict=True):
        order = v.argsort(descending=True, stable=True)[:count]  # the ids come in order, so equal ones stay so
        found.append(list(zip(i[order].tolist(), v[order].tolist(), strict=True)))
    return found
