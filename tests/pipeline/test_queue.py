"""The queue protocol: each transition alone, its fences and its repetitions, on every kind of server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import redis.exceptions

from pdq import connection, scripts
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import (
    DeadlineExceeded,
    IdConflict,
    InvalidRequest,
    LostLease,
    PdqError,
    QueueFull,
    RequestCancelled,
    RequestFailed,
    RequestNotFound,
    Unavailable,
)
from pdq.keys import GROUP, Keys
from pdq.messages import Event, Handoff, Usage
from pdq.queue import Job, Queue, renew
from tests.hygiene import end_all
from tests.servers import Server

LEASE = 0.6
USAGE = Usage(3, 2)


class Pool:
    """A client and queues of two workers a stage, on one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.keys = Keys("default")
        self.client = AsyncClient(RedisSettings(redis_url=server.url), max_queued=5)
        self.redis = connection.command(server.url)
        self._waiting: list[connection.AsyncRedis] = []
        self.lease = connection.lease(server.url)

    def queue(self, stage: str, owner: str, *, lease: float = LEASE) -> Queue:
        waiting = connection.blocking(self.server.url)
        self._waiting.append(waiting)
        return Queue(
            *(self.redis, waiting), keys=self.keys, stage=stage, owner=owner, lease_seconds=lease, max_attempts=3,
            result_ttl=60,
        )  # fmt: skip

    async def take(self, queue: Queue, wait: float = 2.0) -> Job:
        for _ in range(int(wait * 10)):
            jobs, failed = await queue.take(1, 0.1)
            assert failed is None
            if jobs:
                return jobs[0]
        raise AssertionError("nothing to take")

    async def take_over(self, queue: Queue) -> Job | None:
        """Reclaim what has been silent for a lease."""
        await asyncio.sleep(LEASE + 0.05)
        entries = await queue.reclaim(10)
        return await queue.claim(entries[0]) if entries else None

    async def depth(self, queue: Queue) -> tuple[int, int]:
        """(entries, pending entries) over the stage's streams."""
        entries = pending = 0
        for stream in queue.streams:
            entries += await self.redis.xlen(stream)
            try:
                pending += (await self.redis.xpending(stream, GROUP))["pending"]
            except redis.exceptions.ResponseError:
                continue
        return entries, pending

    async def close(self) -> None:
        await self.client.aclose()
        for client in (self.redis, *self._waiting):
            await client.aclose()
        self.lease.close()


@pytest.fixture
async def pool(any_server: Server) -> AsyncIterator[Pool]:
    made = Pool(any_server)
    yield made
    await made.close()
    with any_server.client() as client:
        end_all(client)


def handoff(prompt: tuple[int, ...] = (1, 2, 3), tail: str = "") -> Handoff:
    return Handoff(prompt=prompt, kv_length=len(prompt), fingerprint=bytes(32), block_size=4, tail_key=tail)


def last(index: int = 1, *tokens: int) -> Event:
    return Event(index, tokens, "end", "stop", USAGE)


async def test_a_request_goes_through_both_stages_and_leaves_nothing_in_the_queues(pool: Pool) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi", max_tokens=2)
    job = await pool.take(prefill)
    assert (job.request.prompt, job.attempt, job.visible, job.handoff) == ("hi", 1, 0, None)
    assert await prefill.write([(job, Event(0, (7,), "a"))]) == ["ok"]
    await prefill.hand_off(job, handoff())
    job = await pool.take(decode)
    assert (job.attempt, job.visible, job.handoff) == (2, 1, handoff())
    assert await decode.emitted(job) == [7]
    assert await decode.write([(job, last(1, 8))]) == ["ok"]
    result = await handle.result(5)
    assert (result.text, result.token_ids, result.finish_reason, result.usage) == ("aend", (7, 8), "stop", USAGE)
    assert await pool.depth(prefill) == (0, 0)
    assert await pool.depth(decode) == (0, 0)
    assert (await handle.status()).state == "done"
    for key in (pool.keys.request(handle.id), pool.keys.out(handle.id)):
        assert 0 < await pool.redis.pttl(key) <= 60_000


async def test_control_keys_of_a_live_request_have_no_ttl(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    await prefill.write([(job, Event(0, (7,), "a"))])
    for key in (pool.keys.request(handle.id), pool.keys.out(handle.id), job.stream):
        assert await pool.redis.pttl(key) == -1


async def test_submitting_twice_with_one_id_makes_one_job(pool: Pool) -> None:
    for _ in range(3):
        assert (await pool.client.submit(prompt="hi", id="a")).id == "a"  # each draws its own seed
    prefill = pool.queue("prefill", "p1")
    await pool.take(prefill)
    assert await prefill.read(10, 0.05) == []
    with pytest.raises(IdConflict):
        await pool.client.submit(prompt="ho", id="a")
    with pytest.raises(IdConflict):
        await pool.client.submit(prompt="hi", id="a", temperature=0.5)


async def test_an_idempotency_key_stands_for_one_request_of_one_tenant(pool: Pool) -> None:
    first = await pool.client.submit(prompt="hi", idempotency_key="k")
    assert (await pool.client.submit(prompt="hi", idempotency_key="k")).id == first.id
    assert (await pool.client.submit(prompt="hi", idempotency_key="k", tenant="t")).id != first.id
    with pytest.raises(InvalidRequest, match="idempotency_key"):
        await pool.client.submit(prompt="hi", idempotency_key="k", id="x")


async def test_a_full_queue_refuses_and_queues_nothing(pool: Pool) -> None:
    for _ in range(5):
        await pool.client.submit(prompt="hi")
    with pytest.raises(QueueFull) as full:
        await pool.client.submit(prompt="hi", lane="high", id="x")
    assert full.value.retry_after == 1.0
    assert await pool.redis.exists(pool.keys.request("x")) == 0


async def test_lanes_are_taken_best_first_and_first_come_first_served(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    for name, lane in (("b", "batch"), ("n1", "normal"), ("n2", "normal"), ("h", "high")):
        await pool.client.submit(prompt="hi", id=name, lane=lane)
    assert [(await pool.take(prefill)).id for _ in range(4)] == ["h", "n1", "n2", "b"]


async def test_no_more_is_taken_than_asked_over_all_lanes(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await prefill.make_groups()
    for lane in ("batch", "normal", "high", "normal"):
        await pool.client.submit(prompt=lane, lane=lane)
    jobs, failed = await prefill.take(3, 0.1)
    assert failed is None
    assert [job.request.prompt for job in jobs] == ["high", "normal", "normal"]
    assert await pool.depth(prefill) == (4, 3)


async def test_what_has_come_beside_an_awaited_entry_is_taken_with_it(pool: Pool) -> None:
    decode = pool.queue("decode", "d1")
    await decode.make_groups()
    prefill = pool.queue("prefill", "p1")
    for prompt in ("a", "b", "c"):
        await pool.client.submit(prompt=prompt)
        await prefill.hand_off(await pool.take(prefill), handoff())
    jobs, failed = await decode.take(2, 1)
    assert ([job.request.prompt for job in jobs], failed) == (["a", "b"], None)
    jobs, failed = await decode.take(2, 0)
    assert ([job.request.prompt for job in jobs], failed) == (["c"], None)


async def test_a_take_sent_again_gives_the_same_jobs_and_charges_them_once(pool: Pool, repeated: list[Any]) -> None:
    prefill = pool.queue("prefill", "p1")
    await prefill.make_groups()
    for prompt in ("a", "b", "c"):
        await pool.client.submit(prompt=prompt)
    for expected in (["a", "b"], ["c"], []):
        jobs, failed = await prefill.take(2, 0)
        assert ([job.request.prompt for job in jobs], failed) == (expected, None)
        for job in jobs:
            assert await pool.redis.hmget(pool.keys.request(job.id), "attempt", "tries") == [b"1", b"1"]
            assert await prefill.write([(job, last(0, 7))]) == ["ok"]


async def test_a_claim_that_fails_costs_its_neighbours_nothing(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    for prompt in ("a", "b", "c"):
        await pool.client.submit(prompt=prompt)
    entries = await prefill.read(3, 0.1)
    while not entries:
        entries = await prefill.read(3, 0.1)
    key = pool.keys.request(entries[1][2])
    await pool.redis.rename(key, pool.keys.request("elsewhere"))
    await pool.redis.set(key, "not a hash")
    jobs, failed = await prefill.claim_all(entries)
    assert [job.request.prompt for job in jobs] == ["a", "c"]
    assert isinstance(failed, redis.exceptions.ResponseError)
    await pool.redis.rename(pool.keys.request("elsewhere"), key)


async def test_a_claim_brings_the_first_events_and_the_rest_are_read(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi", max_tokens=50)
    job = await pool.take(prefill)
    assert (job.events, await prefill.emitted(job), prefill.first_usage(job)) == ((), [], None)
    for i in range(40):
        assert await prefill.write([(job, Event(i, (100 + i,), "x", usage=USAGE if i == 0 else None))]) == ["ok"]
    again = await pool.take_over(pool.queue("prefill", "p2"))
    assert again is not None
    assert 0 < len(again.events) < 40
    assert await prefill.emitted(again) == list(range(100, 140))
    assert prefill.first_usage(again) == USAGE


async def test_requests_queued_before_the_first_worker_are_seen(pool: Pool) -> None:
    await pool.client.submit(prompt="early", id="a")
    assert (await pool.take(pool.queue("prefill", "p1"))).id == "a"


async def test_a_group_that_vanished_is_made_again(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi", id="a")
    await pool.take(prefill)
    await pool.redis.flushall()
    assert await prefill.read(1, 0.05) == []
    await pool.client.submit(prompt="hi", id="b")
    assert (await pool.take(prefill)).id == "b"
    await pool.redis.delete(*prefill.streams)
    assert await prefill.reclaim(1) == []


async def test_a_silent_workers_job_is_taken_over_and_the_zombie_can_do_nothing(pool: Pool) -> None:
    zombie, healthy = pool.queue("prefill", "p1"), pool.queue("prefill", "p2")
    handle = await pool.client.submit(prompt="hi")
    old = await pool.take(zombie)
    new = await pool.take_over(healthy)
    assert new is not None
    assert (new.attempt, new.id) == (2, old.id)
    assert await zombie.write([(old, Event(0, (1,), "z"))]) == ["lost"]
    assert await zombie.write([(old, last(0, 1))]) == ["lost"]
    assert renew(pool.lease, pool.keys, old) == "lost"
    for transition in (
        zombie.hand_off(old, handoff()), zombie.release(old), zombie.fail(old, "x"), zombie.end(old, RequestFailed("x"))
    ):  # fmt: skip
        with pytest.raises(LostLease):
            await transition
    assert await healthy.write([(new, last(0, 5))]) == ["ok"]
    assert (await handle.result(5)).token_ids == (5,)


async def test_renewing_keeps_a_slow_job_and_does_not_count_as_a_delivery(pool: Pool) -> None:
    slow, other = pool.queue("prefill", "p1"), pool.queue("prefill", "p2")
    await pool.client.submit(prompt="hi")
    job = await pool.take(slow)
    for _ in range(8):
        await asyncio.sleep(LEASE / 3)
        assert renew(pool.lease, pool.keys, job) == "ok"
        assert await other.reclaim(10) == []
    (pending,) = await pool.redis.xpending_range(job.stream, GROUP, "-", "+", 10)
    assert pending["times_delivered"] == 1


async def test_eight_sweepers_and_one_winner(pool: Pool) -> None:
    """The lease is long, and the dead worker's entry old: however slow the sweepers are, one's lease does not end."""
    await pool.client.submit(prompt="hi")
    job = await pool.take(pool.queue("prefill", "dead"))
    await pool.redis.xclaim(job.stream, GROUP, "dead", 0, [job.entry], idle=120_000, justid=True)

    async def sweep(owner: str) -> list[Job | None]:
        queue = pool.queue("prefill", owner, lease=60.0)
        return [await queue.claim(entry) for entry in await queue.reclaim(10)]

    (won,) = [job for jobs in await asyncio.gather(*(sweep(f"s{i}") for i in range(8))) for job in jobs]
    assert won is not None
    assert won.attempt == 2


async def test_a_job_whose_workers_always_die_is_a_dead_letter_after_three_claims(pool: Pool) -> None:
    handle = await pool.client.submit(prompt="poison")
    await pool.take(pool.queue("prefill", "p0"))
    for n in (1, 2):
        job = await pool.take_over(pool.queue("prefill", f"p{n}"))
        assert job is not None
        assert job.attempt == n + 1
    assert await pool.take_over(pool.queue("prefill", "p3")) is None
    with pytest.raises(RequestFailed, match="tried 3 times"):
        await handle.result(5)
    ((_, letter),) = await pool.redis.xrange(pool.keys.dead)
    assert (letter[b"id"], letter[b"stage"], letter[b"tries"]) == (handle.id.encode(), b"prefill", b"3")
    assert await pool.depth(pool.queue("prefill", "p4")) == (0, 0)


async def test_the_last_owner_of_a_dead_letter_is_told_that_it_lost_the_job(pool: Pool) -> None:
    """The takeover that found no attempt left has ended the request without raising the attempt."""
    handle = await pool.client.submit(prompt="poison")
    prefill = pool.queue("prefill", "p0")
    job = await pool.take(prefill)
    await pool.redis.hset(pool.keys.request(handle.id), "tries", 3)
    assert await pool.take_over(pool.queue("prefill", "p1")) is None
    assert (await handle.status()).reason == "dead"
    with pytest.raises(LostLease):
        await prefill.fail(job, "boom")


async def test_a_failed_attempt_is_tried_again_after_its_delay_and_dead_lettered_in_the_end(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    for attempt in (1, 2, 3):
        assert job.attempt == attempt
        verdict = await prefill.fail(job, "boom", delay=0.2)
        if attempt == 3:
            break
        assert verdict == "retry"
        assert await prefill.reclaim(10) == []
        await asyncio.sleep(0.3)
        (entry,) = await prefill.reclaim(10)
        again = await prefill.claim(entry)
        assert again is not None
        job = again
    assert verdict == "dead"
    with pytest.raises(RequestFailed, match="prefill failed 3 times"):
        await handle.result(5)


async def test_release_gives_the_job_back_at_once_without_charging_the_attempt(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi")
    for attempt in range(1, 6):
        job = await pool.take(prefill)
        assert job.attempt == attempt
        await prefill.release(job)


async def test_sent_again_after_a_lost_reply_each_write_answers_as_before_and_repeats_nothing(pool: Pool) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    for _ in range(2):
        assert await prefill.write([(job, Event(0, (7,), "a"))]) == ["ok"]
    for _ in range(2):
        await prefill.hand_off(job, handoff())
    job = await pool.take(decode)
    assert await decode.read(1, 0.05) == []
    for _ in range(2):
        assert await decode.write([(job, Event(1, (8, 9), "b"))]) == ["ok"]
    for _ in range(2):
        assert await decode.write([(job, last(3, 10))]) == ["ok"]
    assert [e.token_ids async for e in handle.stream()] == [(7,), (8, 9), (10,)]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every transition is sent twice, as after a lost reply; holds the second answers."""
    answers: list[Any] = []
    run = scripts.Call.run

    async def twice(self: scripts.Call, redis: connection.AsyncRedis) -> Any:
        await run(self, redis)
        answers.append(await run(self, redis))
        return answers[-1]

    monkeypatch.setattr(scripts.Call, "run", twice)
    return answers


async def test_a_claim_sent_again_is_the_same_claim(pool: Pool, repeated: list[Any]) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi", max_tokens=2)
    job = await pool.take(prefill)
    assert (job.attempt, job.request.prompt, job.visible) == (1, "hi", 0)
    assert await prefill.write([(job, Event(0, (7,), "a"))]) == ["ok"]
    await prefill.hand_off(job, handoff())
    job = await pool.take(decode)
    assert (job.attempt, job.handoff, job.visible) == (2, handoff(), 1)
    assert 0 <= job.timings.handoff_ms < 60_000
    assert await pool.redis.hmget(pool.keys.request(handle.id), "tries", "attempt") == [b"1", b"2"]
    assert await prefill.held() == 0
    assert await decode.write([(job, last(1, 8))]) == ["ok"]
    assert (await handle.result(5)).token_ids == (7, 8)


async def test_a_claim_sent_again_after_somebody_elses_changes_nothing(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[scripts.Call] = []
    run = scripts.Call.run

    async def kept(self: scripts.Call, redis: connection.AsyncRedis) -> Any:
        calls.append(self)
        return await run(self, redis)

    handle = await pool.client.submit(prompt="hi")
    with monkeypatch.context() as patch:
        patch.setattr(scripts.Call, "run", kept)
        await pool.take(pool.queue("prefill", "p1"))
    claim = calls[-1]
    assert claim.script is scripts.claim
    new = await pool.take_over(pool.queue("prefill", "p2"))
    assert new is not None
    ((*_, answer),) = await claim.run(pool.redis)
    assert answer == [b"lost"]
    found = await pool.redis.hmget(pool.keys.request(handle.id), "owner", "attempt", "tries")
    assert found == [b"p2", b"2", b"2"]


async def test_what_gives_a_job_back_answers_as_before_when_sent_again(pool: Pool, repeated: list[Any]) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi")
    tries = partial(pool.redis.hget, pool.keys.request(handle.id), "tries")
    job = await pool.take(prefill)
    await prefill.release(job)
    assert (await tries(), await pool.depth(prefill)) == (b"0", (1, 0))
    job = await pool.take(prefill)
    await prefill.hand_off(job, handoff())
    assert await decode.requeue(await pool.take(decode)) is True
    assert await pool.depth(prefill) == (1, 0)
    assert await pool.redis.hget(pool.keys.request(handle.id), "requeues") == b"1"
    job = await pool.take(prefill)
    assert await prefill.fail(job, "boom", delay=0.0) == "retry"
    assert await tries() == b"1"
    (entry,) = await prefill.reclaim(10)
    job = await prefill.claim(entry)
    assert job is not None
    await pool.redis.hset(pool.keys.request(handle.id), "tries", 3)
    assert await prefill.fail(job, "boom") == "dead"
    assert await pool.redis.xlen(pool.keys.dead) == 1


async def test_a_cancel_sent_again_says_again_that_it_ended_the_request(pool: Pool, repeated: list[Any]) -> None:
    handle = await pool.client.submit(prompt="hi")
    assert await handle.cancel() is True
    assert repeated[-1] == b"cancelled"


async def test_a_cancel_repeated_after_the_worker_obeyed_still_counts(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    assert await handle.cancel() is True
    await prefill.end(job, RequestCancelled("cancelled"))
    assert await handle.cancel() is True


async def test_tokens_that_would_leave_a_gap_are_refused(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    assert await prefill.write([(job, Event(1, (7,), "a"))]) == ["gap"]
    assert await prefill.write([(job, last(2, 7))]) == ["gap"]
    assert await pool.redis.xlen(pool.keys.out(job.id)) == 0


async def test_token_0_becomes_visible_with_the_handoff_or_not_at_all(pool: Pool) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi", max_tokens=2)
    job = await pool.take(prefill)
    with pytest.raises(LostLease):  # a gap
        await prefill.hand_off(job, handoff(), Event(1, (7,), "a"))
    await pool.redis.hset(pool.keys.request(job.id), "deadline", 1)
    with pytest.raises(DeadlineExceeded):
        await prefill.hand_off(job, handoff(), Event(0, (7,), "a"))
    assert await pool.redis.xlen(pool.keys.out(job.id)) == 0
    assert await pool.redis.xlen(pool.keys.decode) == 0
    await pool.redis.hset(pool.keys.request(job.id), "deadline", 1 << 50)
    assert await prefill.hand_off(job, handoff(), Event(0, (7,), "a")) == 3
    job = await pool.take(decode)
    assert (job.visible, job.handoff, await decode.emitted(job)) == (1, handoff(), [7])
    assert await decode.write([(job, last(1, 8))]) == ["ok"]
    assert [e.token_ids async for e in handle.stream()] == [(7,), (8,)]


async def test_a_handoff_with_token_0_sent_again_repeats_nothing(pool: Pool, repeated: list[Any]) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi", max_tokens=2)
    job = await pool.take(prefill)
    await prefill.hand_off(job, handoff(), Event(0, (7,), "a"))
    assert repeated[-1] == [b"ok", 0]
    assert await pool.redis.xlen(pool.keys.out(handle.id)) == 1
    assert await pool.redis.xlen(pool.keys.decode) == 1


async def test_a_handoff_leaves_token_0_as_it_is_if_that_is_visible_already(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi", max_tokens=2)
    job = await pool.take(prefill)
    assert await prefill.write([(job, Event(0, (7,), "a"))]) == ["ok"]
    assert await prefill.hand_off(job, handoff(), Event(0, (7,), "a")) == 3
    assert await pool.redis.xlen(pool.keys.out(job.id)) == 1


async def test_a_cancelled_request_is_not_handed_off_and_shows_no_token_0(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi", max_tokens=2)
    job = await pool.take(prefill)
    assert await handle.cancel() is True
    with pytest.raises(RequestCancelled):
        await prefill.hand_off(job, handoff(), Event(0, (7,), "a"))
    assert await pool.redis.xlen(pool.keys.out(job.id)) == 0
    assert await pool.redis.xlen(pool.keys.decode) == 0
    await prefill.end(job, RequestCancelled("cancelled"))


async def test_redis_itself_refuses_a_second_end_and_tokens_after_the_end(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    assert await prefill.write([(job, last(0, 7))]) == ["ok"]
    out = pool.keys.out(job.id)
    for entry in ("0-1", "0-2", "1-0"):
        with pytest.raises(redis.exceptions.ResponseError):
            await pool.redis.xadd(out, {"e": "x"}, id=entry)


async def test_cancel_of_a_queued_request_ends_it_at_once(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi", lane="batch")
    assert await handle.cancel() is True
    with pytest.raises(RequestCancelled):
        await handle.result(5)
    assert await pool.depth(prefill) == (0, 0)
    with pytest.raises(RequestNotFound):
        await pool.client.attach("nobody").cancel()


async def test_cancel_between_the_stages_ends_it_at_once_and_names_the_tail_to_drop(pool: Pool) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi")
    await prefill.hand_off(await pool.take(prefill), handoff(tail="its tail"))
    assert await handle.cancel() is True
    with pytest.raises(RequestCancelled):
        await handle.result(5)
    assert await pool.depth(decode) == (0, 0)
    assert [hint for _, hint in await pool.redis.xrange(pool.keys.cancels)] == [
        {b"id": handle.id.encode(), b"tail": b"its tail"}
    ]


async def test_cancel_does_not_name_the_tail_of_a_handoff_that_went_back_to_prefill(pool: Pool) -> None:
    """Its worker has dropped that tail, and the next handoff has another."""
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi")
    await prefill.hand_off(await pool.take(prefill), handoff(tail="its tail"))
    assert await decode.requeue(await pool.take(decode)) is True
    assert await handle.cancel() is True
    assert await pool.redis.xlen(pool.keys.cancels) == 0


async def test_cancel_of_a_running_request_is_told_to_its_worker_by_every_answer(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    assert await handle.cancel() is True
    assert renew(pool.lease, pool.keys, job) == "cancel"
    assert await prefill.write([(job, Event(0, (7,), "a"))]) == ["cancel"]
    with pytest.raises(RequestCancelled):
        await prefill.hand_off(job, handoff())
    ((_, hint),) = await pool.redis.xrange(pool.keys.cancels)
    assert hint[b"id"] == handle.id.encode()
    await prefill.end(job, RequestCancelled("cancelled"))
    with pytest.raises(RequestCancelled):
        await handle.result(5)


async def test_cancel_of_a_read_but_unclaimed_entry_leaves_nothing(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi")
    await prefill.make_groups()
    (entry,) = await prefill.read(1, 1)
    await handle.cancel()
    assert await prefill.claim(entry) is None
    assert await pool.depth(prefill) == (0, 0)


async def test_a_request_past_its_deadline_is_never_run(pool: Pool) -> None:
    handle = await pool.client.submit(prompt="hi", timeout=0.05)
    await asyncio.sleep(0.1)
    prefill = pool.queue("prefill", "p1")
    await prefill.make_groups()
    (entry,) = await prefill.read(1, 1)
    assert await prefill.claim(entry) is None
    with pytest.raises(DeadlineExceeded):
        await handle.result(5)
    assert await pool.depth(prefill) == (0, 0)


async def test_a_running_request_past_its_deadline_is_told(pool: Pool) -> None:
    await pool.client.submit(prompt="hi", timeout=0.2)
    job = await pool.take(pool.queue("prefill", "p1"))
    await asyncio.sleep(0.25)
    assert renew(pool.lease, pool.keys, job) == "expired"


async def test_lost_kv_sends_a_request_back_once_and_its_tokens_stay(pool: Pool) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    await prefill.write([(job, Event(0, (7,), "a"))])
    await prefill.hand_off(job, handoff())
    assert await decode.requeue(await pool.take(decode)) is True
    job = await pool.take(prefill)
    assert (job.visible, await prefill.emitted(job)) == (1, [7])
    await prefill.hand_off(job, handoff())
    job = await pool.take(decode)
    assert job.requeues == 1
    assert await decode.requeue(job) is False


async def test_a_damaged_message_fails_its_request_and_harms_no_other(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    bad = await pool.client.submit(prompt="bad")
    await pool.redis.hset(pool.keys.request(bad.id), "msg", b"\x80\x04garbage")
    good = await pool.client.submit(prompt="good")
    assert (await pool.take(prefill)).id == good.id
    with pytest.raises(RequestFailed, match="cannot be read"):
        await bad.result(5)
    await pool.redis.delete(pool.keys.dead)


async def test_a_request_lost_between_the_stages_leaves_no_back_pressure_and_no_endless_replies(pool: Pool) -> None:
    prefill, decode = pool.queue("prefill", "p1"), pool.queue("decode", "d1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    await prefill.write([(job, Event(0, (7,), "a"))])
    await prefill.hand_off(job, handoff())
    assert await prefill.held() == 3
    await pool.redis.delete(pool.keys.request(handle.id))
    await decode.make_groups()
    (entry,) = await decode.read(1, 1)
    assert await decode.claim(entry) is None
    assert await prefill.held() == 0
    assert 0 < await pool.redis.pttl(pool.keys.out(handle.id)) <= 60_000
    await pool.redis.delete(pool.keys.load)  # the sum goes with the next handoff into the empty stream


async def test_the_end_of_a_request_is_read_from_any_position(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    handle = await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    for i in range(4):
        await prefill.write([(job, Event(i, (i,), str(i)))])
    await prefill.write([(job, last(4))])
    for after in range(5):
        events = [e async for e in pool.client.attach(handle.id).stream(after)]
        assert "".join(e.text for e in events) == "0123"[after:] + "end"
        assert events[-1].usage == USAGE


async def test_reading_a_request_that_is_not_there_says_so(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.1)
    with pytest.raises(RequestNotFound):
        await pool.client.attach("nobody").result(5)
    handle = await pool.client.submit(prompt="hi")
    reading = asyncio.create_task(handle.result(5))
    await asyncio.sleep(0.05)
    await pool.redis.flushall()
    with pytest.raises(Unavailable, match="lost the request"):
        await reading


async def test_many_readers_share_one_connection(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    pool.client.max_queued = 0
    handles = [await pool.client.submit(prompt="hi", id=f"r{i}") for i in range(60)]
    reading = [asyncio.create_task(h.result(20)) for h in handles]
    jobs = [await pool.take(prefill) for _ in handles]
    writes: list[tuple[Job, Event]] = [(job, replace(last(0, 1), text=job.id)) for job in jobs]
    assert await prefill.write(writes) == ["ok"] * 60
    assert [r.text for r in await asyncio.gather(*reading)] == [h.id for h in handles]
    if pool.server.kind != "fake":
        assert len([c for c in await pool.redis.client_list() if c["cmd"] == "xread"]) == 1


async def test_scripts_survive_a_server_that_forgot_them(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi", id="a")
    await pool.client.submit(prompt="hi", id="b")
    jobs = [await pool.take(prefill), await pool.take(prefill)]
    await pool.redis.script_flush()
    assert await prefill.write([(job, Event(0, (1,), "x")) for job in jobs]) == ["ok", "ok"]
    await pool.redis.script_flush()
    assert await pool.client.attach("a").cancel() is True


async def test_a_worker_that_leaves_removes_its_consumer_but_never_pending_work(pool: Pool) -> None:
    prefill = pool.queue("prefill", "p1")
    await pool.client.submit(prompt="hi")
    job = await pool.take(prefill)
    await prefill.leave()
    assert [c["name"] for c in await pool.redis.xinfo_consumers(job.stream, GROUP)] == [b"p1"]
    await prefill.write([(job, last(0, 1))])
    await prefill.leave()
    assert await pool.redis.xinfo_consumers(job.stream, GROUP) == []


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.0.x"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [True]}, "token_ids"),
        ({"token_ids": [2**31]}, "token_ids"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": 1.5}, "top_k"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "lane": "vip"}, "lane"),
        ({"prompt": "a", "timeout": 0}, "timeout"),
        ({"prompt": "a", "timeout": float("inf")}, "timeout"),
        ({"prompt": "a", "id": "a b"}, "id"),
        ({"prompt": "a", "id": "{x}"}, "id"),
        ({"prompt": "a", "id": ""}, "id"),
        ({"prompt": "a", "colour": 1}, "colour"),
    ],
)
async def test_a_wrong_option_is_named_before_anything_is_sent(options: dict[str, object], param: str) -> None:
    async with AsyncClient(RedisSettings(redis_url="redis://127.0.0.1:1/0")) as client:
        with pytest.raises(InvalidRequest) as wrong:
            await client.submit(**options)  # type: ignore[arg-type]
    assert wrong.value.param == param


def test_every_script_declares_what_it_touches() -> None:
    names = [n for n in vars(scripts) if isinstance(getattr(scripts, n), scripts.Script)]
    assert len(names) == 15
    assert len({getattr(scripts, n).sha for n in names}) == 15
    for name in names:
        assert "pdq:" not in getattr(scripts, name).text


def test_errors_keep_their_class_over_the_wire() -> None:
    from pdq.errors import from_wire

    for error in (InvalidRequest("a", param="b"), DeadlineExceeded("c"), RequestFailed("d"), RequestCancelled("e")):
        back = from_wire(error.wire())
        assert (type(back), back.message, back.param) == (type(error), error.message, error.param)
    assert issubclass(InvalidRequest, PdqError)
