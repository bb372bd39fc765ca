"""The end of a forward: from its logits to the tokens that its segments want.

Edits, sampling and log probabilities are each a module of their own; this is their order. `runner` calls `choose`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from torch import Tensor

from pdq.engine import drafted
from pdq.engine.base import Segment
from pdq.engine.edits import edited
from pdq.engine.sampling import sample
from pdq.engine.scores import score


def choose(logits: Tensor, segments: Sequence[Segment], eos_ids: Collection[int]) -> list[int | None]:
    """A token for each segment, all of which want one; `scores` and `further` are filled where they are wanted.

    logits: `[rows, vocab]`, of any float type, not changed: a row a segment and one for each of its drafts. eos_ids:
    the model's end-of-text tokens. None for a row that is not numbers, or whose request leaves no token to choose.
    """
    groups = [drafted.rows(s) for s in segments]
    rows = [row for group in groups for row in group]
    tokens = sample(edited(logits, rows, eos_ids), [(r.sample, r.position) for r in rows if r.sample is not None])
    score(logits, rows, tokens)
    left = iter(tokens)
    return [drafted.settle(s, group, list(islice(left, len(group)))) for s, group in zip(segments, groups, strict=True)]
