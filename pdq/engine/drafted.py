"""Segments that end in drafts: the rows that are sampled, and which of their tokens count.

The row of the last known token and that of each draft are sampled as they would be one by one, with the position and
the history that they would have. A draft that equals the token sampled in the row before it was right, so the next
row's token counts as well. What comes out is what would have come without drafts; wrong ones only cost their rows.

Without torch: both engines use it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from pdq.engine.base import Segment


def check(segment: Segment) -> None:
    """Raises ValueError for drafts that cannot be verified."""
    if not segment.drafts:
        return
    if segment.sample is None or not 0 < segment.drafts < len(segment.token_ids):
        raise ValueError("drafts come after at least one known token, in a segment that wants a sample")
    if segment.further is None or segment.further:
        raise ValueError("drafts want an empty list for the further tokens")


def rows(segment: Segment) -> list[Segment]:
    """What to sample, a segment a row: its own, or one for the last known token and one for each draft."""
    if not segment.drafts:
        return [segment]
    drafts = segment.token_ids[-segment.drafts :]
    return [
        replace(
            segment,
            position=segment.position + i,
            history=_history(segment, drafts[:i]),
            scores=None if segment.scores is None else [],
            drafts=0,
            further=None,
        )
        for i in range(segment.drafts + 1)
    ]


def settle(segment: Segment, sampled: Sequence[Segment], tokens: Sequence[int | None]) -> int | None:
    """The token of a segment, after `further` and `scores` got what the drafts brought.

    sampled: its `rows`, with their scores; tokens: of those. A row that is not numbers ends what counts before it.
    """
    if not segment.drafts or segment.further is None:
        return tokens[0]
    drafts = segment.token_ids[-segment.drafts :]
    for draft, token, following in zip(drafts, tokens, tokens[1:], strict=False):
        if token != draft or following is None:
            break
        segment.further.append(following)
    if tokens[0] is not None and segment.scores is not None:
        for row in sampled[: len(segment.further) + 1]:
            segment.scores.extend(row.scores or ())
    return tokens[0]


def dropped(segment: Segment, token: int | None) -> int:
    """How many tokens at the end of a settled segment with drafts have no KV that is worth keeping."""
    return len(segment.token_ids) if token is None else segment.drafts - len(segment.further or ())


def _history(segment: Segment, drafts: Sequence[int]) -> Sequence[int] | None:
    if segment.history is None or not drafts:
        return segment.history
    longer = array("q", segment.history)
    longer.extend(drafts)
    return longer
