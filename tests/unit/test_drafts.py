"""Guesses from repetitions in a text: what is found, what it costs, and how many are made after hits and misses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from pdq.drafts import AT_ONCE, LEAST_PAUSE, LONGEST, MOST_PAUSE, SHORTEST, Drafter, PromptLookup


def searched(tokens: Sequence[int], count: int) -> list[int]:
    """As `PromptLookup.following`, by a search of the whole text."""
    for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                out = list(tokens)
                for i in range(count):
                    out.append(out[start + n + i])
                return out[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], []),
        ([5], []),
        ([5, 5], []),
        ([5, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 1], []),  # a single token is no reason
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 1, 2], [3, 1, 2]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2]),  # the latest
        ([7, 1, 2, 8, 1, 2, 9, 7, 1, 2], [8, 1, 2]),  # but a longer end first
        ([6, 7, 1, 2, 3, 3, 7, 1, 2, 4, 4, 6, 7, 1, 2], [3, 3, 7]),
        ([0, 6, 7, 1, 2, 3, 9, 6, 7, 1, 2, 4, 0, 6, 7, 1, 2], [4, 0, 6]),  # five tokens are no more than four
        ([1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 3, 4], []),
    ],
)
def test_what_followed_the_longest_latest_end_is_proposed(tokens: list[int], found: list[int]) -> None:
    assert PromptLookup(tokens).following(3) == found == searched(tokens, 3)


@pytest.mark.parametrize("words", [2, 3, 5, 12])
@pytest.mark.parametrize("at_once", [1, 3, 200])
def test_a_growing_text_gives_what_a_search_of_the_whole_gives(words: int, at_once: int) -> None:
    rng = random.Random(words)
    tokens: list[int] = []
    lookup, hits = PromptLookup(tokens), 0
    while len(tokens) < 400:
        tokens += [rng.randrange(words) for _ in range(at_once)]
        found = lookup.following(6)
        assert found == searched(tokens, 6)
        hits += bool(found)
    assert hits > 0


def test_nothing_is_proposed_where_nothing_is_wanted() -> None:
    assert PromptLookup([5, 5, 5, 5]).following(0) == []


class Counted(list[int]):
    """A text that counts how many of its tokens were read."""

    read = 0

    def __getitem__(self, at: object) -> object:  # type: ignore[override]
        found = super().__getitem__(at)  # type: ignore[index]
        self.read += len(found) if isinstance(found, list) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the whole text is walked through")


def test_a_token_costs_the_same_after_a_long_text_as_after_a_short_one() -> None:
    reads = []
    for length in (100, 20_000):
        text = Counted(i % 90 for i in range(length))
        lookup = PromptLookup(text)
        for _ in range(length // AT_ONCE + 1):
            lookup.following(4)
        text.read = 0
        for i in range(50):
            text.append(i)
            lookup.following(4)
        reads.append(text.read)
    assert reads[0] == reads[1] < 50 * 30


def test_a_long_prompt_is_looked_at_over_several_steps() -> None:
    text = Counted([1, 2, 3, *range(10, 10 + 3 * AT_ONCE), 7, 8, 9, *range(6), 7, 8])
    lookup, found = PromptLookup(text), []
    for _ in range(4):
        text.read = 0
        found.append(lookup.following(1))
        assert text.read <= AT_ONCE * (2 + 3 + 4) + 20
    assert found == [[], [], [], [9]]


# ---- how many ----

ALIKE = [5] * 20


def misses(drafter: Drafter, steps: int) -> list[int]:
    """How many drafts each step gets while none comes true."""
    found = []
    for _ in range(steps):
        drafts = drafter.propose(100)
        found.append(len(drafts))
        if drafts:
            drafter.learn(0)
    return found


def test_misses_halve_the_drafts_and_then_pause_longer_each_time() -> None:
    expected, pause = [4, 2, 1], LEAST_PAUSE
    while len(expected) < 300:
        expected += [0] * pause + [1]
        pause = min(2 * pause, MOST_PAUSE)
    assert misses(Drafter(ALIKE, 4), 300) == expected[:300]


def test_a_hit_makes_as_many_as_before_and_ends_the_pauses() -> None:
    drafter = Drafter(ALIKE, 6)
    misses(drafter, 200)
    while not drafter.propose(100):
        pass
    drafter.learn(1)
    assert misses(drafter, 5 + LEAST_PAUSE) == [6, 3, 1, *[0] * LEAST_PAUSE, 1, 0]


def test_little_room_makes_few_drafts() -> None:
    drafter = Drafter(ALIKE, 4)
    assert drafter.propose(0) == drafter.propose(-3) == []
    assert drafter.propose(1) == [5]
    drafter.learn(1)
    assert len(drafter.propose(9)) == 4
    assert len(Drafter(ALIKE, 2).propose(9)) == 2


def test_a_text_without_repetition_makes_no_drafts_and_no_pause() -> None:
    tokens = list(range(50))
    drafter = Drafter(tokens, 4)
    assert all(drafter.propose(9) == [] for _ in range(20))
    tokens += [10, 11]
    assert drafter.propose(9) == [12, 13, 14, 15]
