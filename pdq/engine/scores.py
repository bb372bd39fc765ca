"""Log probabilities of the sampled and the most likely tokens, for those segments whose request wants them.

From the model's logits as they are: before biases, penalties, temperature and filters. A row's numbers do not depend
on its neighbours; of equally likely tokens the lower id comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdq.engine.base import LEAST_LOGPROB, Scores, Segment

_ID_BITS = 0xFFFFFFFF


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
    index = torch.tensor([i for i, *_ in wanted], device=logits.device)
    chosen = torch.tensor([token for _, token, *_ in wanted], device=logits.device)
    logprobs = torch.log_softmax(logits[index].float(), -1)
    own = _finite(logprobs.gather(1, chosen[:, None]).squeeze(1))
    tops = _top(logprobs, max(count for _, _, count, _ in wanted))
    for (_, token, count, out), logprob, top in zip(wanted, own, tops, strict=True):
        out.append(Scores(token, logprob, tuple(top[:count])))


def _top(logprobs: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` most likely tokens of each row. Costs nothing for 0."""
    if not count:
        return [[]] * len(logprobs)
    # One integer a token that orders by probability, then by id: the bits of a float that is not negative order like
    # the float, and minus a log probability is one.
    bits = logprobs.abs().view(torch.int32).long()
    keys = (bits << 32) | torch.arange(logprobs.shape[1], device=logprobs.device)
    least = keys.topk(min(count, logprobs.shape[1]), largest=False, sorted=True).values
    ids = least & _ID_BITS
    values = logprobs.gather(1, ids).clamp(min=LEAST_LOGPROB)
    return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def _finite(logprobs: Tensor) -> list[float]:
    values: list[float] = logprobs.clamp(min=LEAST_LOGPROB).tolist()
    return values
