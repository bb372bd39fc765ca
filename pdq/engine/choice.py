"""The end of a forward: from its logits to the tokens that its segments want.

Edits, sampling and log probabilities are each a module of their own; this is their order. `runner` calls `choose`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from pdq.engine.base import Segment
from pdq.engine.edits import edited
from pdq.engine.sampling import sample
from pdq.engine.scores import score


def choose(logits: Tensor, segments: Sequence[Segment], eos_ids: Collection[int]) -> list[int | None]:
    """A token for each segment, all of which want one; `scores` are filled where they are wanted.

    logits: `[n, vocab]`, of any float type, not changed. eos_ids: the model's end-of-text tokens. None for a row that
    is not numbers, or whose request leaves no token to choose.
    """
    rows = [(s.sample, s.position) for s in segments if s.sample is not None]
    tokens = sample(edited(logits, segments, eos_ids), rows)
    score(logits, segments, tokens)
    return tokens
