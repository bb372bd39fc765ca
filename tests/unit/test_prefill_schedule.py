"""Which chunks share a forward: order, ageing and its bound, lanes, budget; and when a worker claims one more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle

import pytest

from pdq.prefill_schedule import AT_ONCE, LONG, PATIENCE, Schedule, Work, has_room, room_for, usual_after

HIGH, NORMAL, BATCH = range(3)
BUDGET = 100


def schedule(*works: Work) -> Schedule:
    found = Schedule()
    for work in works:
        found.add(work)
    return found


def run(plan: Schedule, works: dict[str, Work], forwards: int = 1) -> list[list[tuple[str, int]]]:
    """So many forwards, after each of which the unfinished ask again; the chunks by name."""
    names = {work: name for name, work in works.items()}
    out = []
    for _ in range(forwards):
        chunks = plan.next_chunks(BUDGET)
        out.append([(names[work], tokens) for work, tokens in chunks])
        for work, _ in chunks:
            if work.remaining:
                plan.add(work)
    return out


def test_the_shortest_remaining_goes_first_and_the_longest_fills_the_forward() -> None:
    works = {"long": Work(NORMAL, 500), "short": Work(NORMAL, 30), "shorter": Work(NORMAL, 20)}
    plan = schedule(*works.values())
    assert run(plan, works) == [[("shorter", 20), ("short", 30), ("long", 50)]]
    assert works["long"].remaining == 450
    assert run(plan, works, 5) == [[("long", 100)]] * 4 + [[("long", 50)]]
    assert run(plan, works) == [[]]


def test_equal_prompts_go_in_the_order_of_their_arrival_and_the_first_to_its_end() -> None:
    works = {"a": Work(NORMAL, 150), "b": Work(NORMAL, 150)}
    assert run(schedule(works["b"], works["a"]), works, 3) == [[("a", 100)], [("a", 50), ("b", 50)], [("b", 100)]]


def test_a_forward_has_no_more_tokens_than_its_budget() -> None:
    rng = random.Random(1)
    plan, left = Schedule(), 0
    for _ in range(200):
        for _ in range(rng.randrange(3)):
            work = Work(NORMAL, rng.randrange(1, 300))
            left += work.remaining
            plan.add(work)
        chunks = plan.next_chunks(BUDGET)
        total = sum(tokens for _, tokens in chunks)
        left -= total
        assert total <= BUDGET
        assert all(tokens > 0 for _, tokens in chunks)
        assert total >= min(left, BUDGET) * 7 // 8
        for work, _ in chunks:
            if work.remaining:
                plan.add(work)


def test_a_long_prompt_gets_no_crumbs() -> None:
    works = {"long": Work(NORMAL, 500), "a": Work(NORMAL, 45), "b": Work(NORMAL, 45), "c": Work(NORMAL, 5)}
    assert run(schedule(*works.values()), works) == [[("c", 5), ("a", 45), ("b", 45)]]


def test_what_was_removed_is_not_computed() -> None:
    works = {"a": Work(NORMAL, 10), "b": Work(NORMAL, 10)}
    plan = schedule(*works.values())
    plan.remove(works["a"])
    plan.remove(works["a"])
    assert run(plan, works, 2) == [[("b", 10)], []]


def among_newcomers(longs: list[Work], newcomers: Iterator[Work], forwards: int = 10_000) -> list[dict[Work, int]]:
    """What forwards compute, until the long ones are done, while a worker claims all that it has room for."""
    plan, claimed, out = schedule(*longs), set(longs), []
    while any(work.remaining for work in longs) and len(out) < forwards:
        while has_room([work.remaining for work in claimed], BUDGET):
            new = next(newcomers)
            claimed.add(new)
            plan.add(new)
        out.append(dict(plan.next_chunks(BUDGET)))
        for work in out[-1]:
            if work.remaining:
                plan.add(work)
            else:
                claimed.remove(work)
    return out


def endless(lane: int, *lengths: int) -> Iterator[Work]:
    return (Work(lane, length) for length in cycle(lengths))


@pytest.mark.parametrize("length", [101, 450, 5000])
@pytest.mark.parametrize("newcomers", [(99,), (100,), (40,), (7,), (100, 1, 30)])
def test_a_long_prompt_ends_within_the_bound_among_endless_short_ones(length: int, newcomers: tuple[int, ...]) -> None:
    long = Work(NORMAL, length)
    forwards = among_newcomers([long], endless(NORMAL, *newcomers))
    assert long.remaining == 0
    assert sum(sum(chunks.values()) for chunks in forwards) <= (PATIENCE + 1) * (length + BUDGET)


def test_among_them_it_waits_for_as_long_as_it_is_patient_and_no_longer() -> None:
    long = Work(NORMAL, 100_000)
    forwards = among_newcomers([long], endless(NORMAL, 100), 40)
    assert [long in chunks for chunks in forwards] == ([False] * PATIENCE + [True]) * 10


def test_long_ones_take_turns_and_leave_room_for_short_ones() -> None:
    longs = [Work(NORMAL, 100_000 + i) for i in range(LONG - 1)]
    forwards = among_newcomers(longs, endless(NORMAL, 100), 400)
    for long in longs:
        assert 95 <= sum(long in chunks for chunks in forwards) <= 105


def test_a_higher_lane_goes_first_however_long_it_is_and_shares_no_forward_with_a_lower_one() -> None:
    works = {"batch": Work(BATCH, 10), "normal": Work(NORMAL, 10), "high": Work(HIGH, 150)}
    assert run(schedule(*works.values()), works, 4) == [
        [("high", 100)], [("high", 50)], [("normal", 10)], [("batch", 10)],
    ]  # fmt: skip


def test_a_batch_prompt_delays_a_high_one_by_one_chunk_at_most() -> None:
    works = {"batch": Work(BATCH, 1000), "high": Work(HIGH, 1000)}
    served = [chunk for (chunk,) in run(schedule(*works.values()), works, 11)]
    assert served[:PATIENCE] == [("high", 100)] * PATIENCE
    assert served[PATIENCE] == ("batch", 100)
    assert served[PATIENCE + 1 :] == [("high", 100)] * 7


def test_a_high_prompt_that_came_during_a_batch_chunk_waits_for_no_other() -> None:
    batch = Work(BATCH, 1000)
    plan = schedule(batch)
    assert plan.next_chunks(BUDGET) == [(batch, BUDGET)]
    high = Work(HIGH, 2000)
    plan.add(high)
    plan.add(batch)
    for _ in range(20):
        assert plan.next_chunks(BUDGET) == [(high, BUDGET)]
        plan.add(high)


@pytest.mark.parametrize("length", [100, 30])
def test_a_batch_prompt_is_not_starved_by_an_endless_flow_of_high_ones(length: int) -> None:
    batch = Work(BATCH, 1000)
    forwards = among_newcomers([batch], endless(HIGH, length))
    assert batch.remaining == 0
    assert sum(sum(chunks.values()) for chunks in forwards) <= (PATIENCE + 2) * (1000 + BUDGET)


@pytest.mark.parametrize(
    ("remaining", "room"),
    [
        ([], True),
        ([1], True),
        ([99], True),
        ([100], False),
        ([60, 40], False),
        ([60, 0, 0, 0], True),
        ([1000], True),
        ([1000, 99], True),
        ([1000, 100], False),
        ([1000] * (LONG - 1), True),
        ([1000] * LONG, False),
    ],
)
def test_one_more_is_claimed_if_it_would_start_with_the_next_forward(remaining: list[int], room: bool) -> None:
    assert has_room(remaining, BUDGET) is room


def test_short_prompts_are_claimed_together_and_one_long_one_ends_that() -> None:
    usual = 512
    for _ in range(40):
        usual = usual_after(usual, 20)
    assert usual < 30
    assert room_for([], 512, usual) == AT_ONCE
    assert room_for([400], 512, usual) == 112 // usual
    assert room_for([512], 512, usual) == 0
    assert room_for([9000, 9000], 512, usual) == AT_ONCE  # long ones are not in the way of short ones
    usual = usual_after(usual, 4000)
    assert usual == 4000
    assert room_for([], 512, usual) == 1
