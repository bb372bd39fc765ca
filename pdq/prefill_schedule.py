"""Which prompts' chunks go into the next forward, and whether a worker should claim another prompt. Pure.

A forward has a budget of tokens. The prompt that lacks the fewest goes first and several share a forward, so that short
prompts neither wait for long ones nor cost a forward each. What a prompt lacks counts for less the longer it waits:
after `PATIENCE` forwards' worth of other prompts' tokens it goes first. So a prompt of n tokens is computed within
(PATIENCE + 1) * (n + budget) tokens, whatever comes after it and beside as many others as a worker holds (`LONG`).

A higher lane goes before a lower one. A lower one that was patient for so long takes one chunk out of turn, but never
a second one from the same prompt: a batch prompt delays a high one by one chunk at most. For the same reason a forward
that begins with one lane is not filled up from lower ones.

Used by `prefill_forwards`; knows nothing of slots, engines or Redis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

PATIENCE = 3
LEAST = 8  # a piece that does not finish its prompt is at least this part of the budget: it reads all KV before it
LONG = 3  # prompts of more than a forward that one worker has claimed: one computes, two are not in the way of others

AT_ONCE = 8  # prompts claimed together: a worker that dies takes them along, and their length is a guess

_turns = count()


@dataclass(eq=False, slots=True)
class Work:
    """What is to be computed of one prompt. lane: 0 goes first. remaining: tokens that have no KV yet.

    waited: tokens of others that were computed while it could go on, less PATIENCE times its own. delayed: it has
    waited for a chunk of a lower lane. turn: when it came or, since then, had a chunk.
    """

    lane: int
    remaining: int
    waited: int = 0
    delayed: bool = False
    turn: int = 0

    def __post_init__(self) -> None:
        self.turn = next(_turns)


class Schedule:
    """The prompts that could go on now."""

    def __init__(self) -> None:
        self._works: dict[Work, None] = {}
        self._lane = 0  # the lowest in the latest forward

    def add(self, work: Work) -> None:
        """Its next chunk may be computed now."""
        self._works[work] = None
        work.delayed |= work.lane < self._lane  # that forward may still run

    def remove(self, work: Work) -> None:
        self._works.pop(work, None)

    def next_chunks(self, budget: int) -> list[tuple[Work, int]]:
        """The chunks of the next forward as (prompt, tokens), at most `budget` tokens in all; none if there is nothing.

        They are taken out, and the tokens off `remaining`: whoever has more is to be added again.
        """
        chunks: list[tuple[Work, int]] = []
        room, lane = budget, 0
        for work in self._ordered(PATIENCE * budget):
            if not room or (chunks and work.lane > lane):
                break
            tokens = min(work.remaining, room)
            if chunks and tokens < work.remaining and tokens * LEAST < budget:
                continue
            chunks.append((work, tokens))
            room, lane = room - tokens, work.lane
        self._account(chunks, budget)
        return chunks

    def _ordered(self, patience: int) -> list[Work]:
        delayed = min((w.lane for w in self._works if w.delayed), default=None)

        def order(work: Work) -> tuple[bool, int, int, int]:
            out_of_turn = work.waited >= patience and (delayed is None or work.lane <= delayed)
            return not out_of_turn, work.lane, work.remaining * max(patience - work.waited, 0), work.turn

        return sorted(self._works, key=order)

    def _account(self, chunks: list[tuple[Work, int]], budget: int) -> None:
        own = dict(chunks)
        total = sum(own.values())
        self._lane = max((work.lane for work in own), default=0)
        for work in self._works:
            mine = own.get(work, 0)
            waited = work.waited + total - mine - PATIENCE * mine
            work.waited = min(max(waited, 0), (PATIENCE + 1) * budget)
            work.delayed |= work.lane < self._lane
        for work, tokens in chunks:
            work.remaining -= tokens
            work.turn = next(_turns)
            self.remove(work)


def has_room(remaining: Iterable[int], budget: int) -> bool:
    """Would one more prompt start with the next forward, beside prompts that lack `remaining` tokens each?

    Not if short ones fill it. A long one is not in the way of a short one, and what it lacks may be in the store; but
    only a few are held, since another worker may be idle before this one comes to them.
    """
    lacking = list(remaining)
    short = [tokens for tokens in lacking if tokens <= budget]
    return sum(short) < budget and len(lacking) - len(short) < LONG


def room_for(remaining: Iterable[int], budget: int, usual: int) -> int:
    """How many more prompts of about `usual` tokens would start with the next forward (see `has_room`)?"""
    lacking = list(remaining)
    if not has_room(lacking, budget):
        return 0
    free = budget - sum(tokens for tokens in lacking if tokens <= budget)
    return max(min(free // max(usual, 1), AT_ONCE), 1)


def usual_after(usual: int, tokens: int) -> int:
    """The usual length of prompts after one of `tokens`: a long one counts at once, and is forgotten slowly."""
    return max(tokens, (7 * usual + tokens) // 8)
