"""When requests are sent, and what they say."""

import asyncio
import itertools
import statistics
from collections.abc import Iterator
from itertools import islice, pairwise

import pytest

from pdq.bench import load
from pdq.bench.load import arrivals, closed_loop, open_loop, until
from pdq.bench.prompts import LONG, MEASURED, WARMUP, Conversation, conversations, limited
from pdq.bench.settings import BenchSettings


def first(settings: BenchSettings, seed: int, count: int, series: str = MEASURED) -> list[Conversation]:
    return list(islice(conversations(settings, seed, series), count))


# ---- arrivals ----


def test_arrivals_are_the_same_for_a_seed_and_others_for_another() -> None:
    found = [list(islice(arrivals(10, None, seed, None), 50)) for seed in (3, 3, 4)]
    assert found[0] == found[1]
    assert not set(found[0]) & set(found[2])
    assert found[0] == sorted(found[0])


@pytest.mark.parametrize(("burst", "variation"), [(None, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_spread_of_a_gamma_process(burst: float | None, variation: float) -> None:
    gaps = [b - a for a, b in pairwise(islice(arrivals(20, burst, 1, None), 20_001))]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) / mean == pytest.approx(variation, rel=0.05)


def test_arrivals_end_with_the_duration() -> None:
    assert list(arrivals(10, None, 3, 2.0)) == [t for t in islice(arrivals(10, None, 3, None), 200) if t < 2.0]


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    sent: list[int] = []
    all_sent = asyncio.Event()

    async def send(one: int) -> None:
        sent.append(one)
        if len(sent) == 5:
            all_sent.set()
        await all_sent.wait()  # none ends before the last is sent

    late: list[float] = []
    await asyncio.wait_for(open_loop(iter(range(5)), send, itertools.repeat(0.0), late), 10)
    assert sent == [0, 1, 2, 3, 4]
    assert len(late) == 5


async def test_an_open_loop_keeps_to_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, sent = [100.0], [], []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += max(0.0, seconds)

    async def send(one: str) -> None:
        sent.append(one)

    monkeypatch.setattr(load, "clock", lambda: now[0])
    monkeypatch.setattr(load.asyncio, "sleep", sleep)
    late: list[float] = []
    await open_loop(iter("abcdef"), send, [0.5, 0.75, 2.0], late)
    assert slept == [0.5, 0.25, 1.25]
    assert late == [0.0, 0.0, 0.0]
    assert sent == ["a", "b", "c"]


async def test_a_closed_loop_keeps_its_number_running() -> None:
    running, most, done = 0, 0, []

    async def send(one: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        done.append(one)

    await closed_loop(iter(range(20)), send, 3)
    assert (most, sorted(done)) == (3, list(range(20)))


def test_work_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    times: Iterator[float] = iter([1.0, 1.9, 2.0])
    monkeypatch.setattr(load, "clock", lambda: next(times))
    assert list(until(2.0, itertools.count())) == [0, 1]
    assert list(until(None, iter("ab"))) == ["a", "b"]


# ---- prompts ----


def test_prompts_have_their_words_and_follow_from_the_seed_alone() -> None:
    settings = BenchSettings(input_tokens=40, output_tokens=9)
    found = first(settings, 5, 20)
    assert found == first(settings, 5, 20)
    assert {len(c.turns[0].split()) for c in found} == {40}
    assert {(len(c.turns), c.output_tokens) for c in found} == {(1, 9)}
    assert len({c.turns[0] for c in found + first(settings, 6, 20) + first(settings, 5, 20, WARMUP)}) == 60


def test_random_prompts_share_no_beginning() -> None:
    starts = [tuple(c.turns[0].split()[:8]) for c in first(BenchSettings(), 5, 200)]
    assert len(set(starts)) == 200


def test_each_group_shares_its_prefix_and_nothing_else() -> None:
    settings = BenchSettings(shape="shared-prefix", prefix_tokens=30, prefixes=3, input_tokens=10)
    words = [c.turns[0].split() for c in first(settings, 5, 12)]
    assert {len(w) for w in words} == {40}
    prefixes = [tuple(w[:30]) for w in words]
    assert prefixes == prefixes[:3] * 4
    assert len(set(prefixes)) == 3
    assert len({tuple(w[30:]) for w in words}) == 12
    warm = {tuple(c.turns[0].split()[:30]) for c in first(settings, 5, 3, WARMUP)}
    assert not warm & set(prefixes)


def test_long_prompts_are_long_and_short_of_output() -> None:
    found = first(BenchSettings(shape="interference", long_tokens=300), 5, 2, LONG)
    assert [(len(c.turns[0].split()), c.output_tokens) for c in found] == [(300, 16)] * 2
    assert found[0].turns != found[1].turns


@pytest.mark.parametrize(("requests", "turns"), [(7, [3, 3, 1]), (6, [3, 3]), (1, [1])])
def test_the_number_of_requests_counts_turns(requests: int, turns: list[int]) -> None:
    settings = BenchSettings(shape="multi-turn", turns=3)
    found = list(limited(conversations(settings, 5), requests))
    assert [len(c.turns) for c in found] == turns
    assert found[0].turns[0] == first(settings, 5, 1)[0].turns[0]
