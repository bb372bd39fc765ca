"""Redis refuses a write of one job: the job is still found, fails by its attempts and ends once; no other job notices.

Refusals are real: a reply stream that holds another request's end, a stream whose ids are used up, a key of a wrong
type.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from pdq.connection import RedisError, is_outage
from pdq.errors import RequestFailed
from pdq.keys import GROUP, Keys
from pdq.messages import BadMessage, Event, Handoff, Request, Usage, decode, encode
from pdq.queue import Job, Queue
from pdq.suspects import Suspects
from tests.faults.audit import END, expected, reply
from tests.faults.owners import Owners
from tests.faults.pool import read, submit, text_of, until
from tests.faults.test_redis_loss import full
from tests.hygiene import end_all
from tests.pipeline.local import LocalPool
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("quick_drain")

KEYS = Keys("default")
USAGE = Usage(1, 1)
REAL = pytest.mark.parametrize("any_server", ["valkey9", "redis7", "redis6"], indirect=True)
FOREIGN = encode(Event(0, (), "of another request", "stop", USAGE))
TOO_SMALL = "equal or smaller than the target stream top item"
LEASE = 60.0  # of a pool: nothing here may wait for the end of a lease


@pytest.fixture
async def owners(any_server: Server) -> AsyncIterator[Owners]:
    async with Owners(any_server) as made:
        yield made
    with any_server.client() as client:
        client.hdel(KEYS.load, "held")  # of handoffs that end_all ends
        end_all(client)


def handoff() -> Handoff:
    return Handoff((1,), 1, bytes(32), 4)


def taken(direct: redis.Redis, request_id: str) -> None:
    """The reply stream holds the end of something else, and refuses every event."""
    direct.xadd(KEYS.out(request_id), {"e": FOREIGN}, id="1-0")


def pending(direct: redis.Redis, stream: str) -> tuple[int, int]:
    """(entries, pending ones) of a stream."""
    length: Any = direct.xlen(stream)
    found: Any = direct.xpending(stream, GROUP)
    return length, found["pending"]


# ---- what is refused leaves the job where it was ----


async def test_a_handoff_whose_token_0_is_refused_leaves_the_job_in_prefill(owners: Owners, any_server: Server) -> None:
    prefill = owners.queue("prefill", "p")
    await owners.client.submit(token_ids=[1, 2, 3], id="a")
    job = await owners.take(prefill)
    with any_server.client() as direct:
        taken(direct, "a")
        with pytest.raises(ResponseError, match=TOO_SMALL):
            await prefill.hand_off(job, handoff(), Event(0, (7,), "a"))
        assert direct.hmget(KEYS.request("a"), "stage", "state", "pos") == [b"prefill", b"running", b"0"]
        assert pending(direct, job.stream) == (1, 1)
        assert direct.xlen(KEYS.decode) == 0
        assert await owners.load() == {"queued": 3}
        assert await prefill.fail(job, "refused", delay=0.0) == "retry"
        (entry,) = await prefill.reclaim(10)
        assert entry[2] == "a"


@contextmanager
def used_up(direct: redis.Redis, stream: str) -> Iterator[None]:
    """A stream that has no further ids, until the end of the block."""
    before = direct.xinfo_stream(stream)["last-generated-id"]
    direct.execute_command("XSETID", stream, "18446744073709551615-18446744073709551615")
    yield
    direct.execute_command("XSETID", stream, before)


async def hand_off(owners: Owners) -> tuple[Job, str, Callable[[], Awaitable[object]]]:
    prefill = owners.queue("prefill", "p")
    job = await owners.take(prefill)
    return job, KEYS.decode, lambda: prefill.hand_off(job, handoff(), Event(0, (7,), "a"))


async def release(owners: Owners) -> tuple[Job, str, Callable[[], Awaitable[object]]]:
    prefill = owners.queue("prefill", "p")
    job = await owners.take(prefill)
    return job, job.stream, lambda: prefill.release(job)


async def requeue(owners: Owners) -> tuple[Job, str, Callable[[], Awaitable[object]]]:
    prefill, decode = owners.queue("prefill", "p"), owners.queue("decode", "d")
    await prefill.hand_off(await owners.take(prefill), handoff(), Event(0, (7,), "a"))
    job = await owners.take(decode)
    return job, KEYS.prefill("normal"), lambda: decode.requeue(job)


@REAL
@pytest.mark.parametrize("transition", [hand_off, release, requeue])
async def test_a_refused_queueing_leaves_the_job_with_its_worker(
    owners: Owners,
    any_server: Server,
    transition: Callable[[Owners], Awaitable[tuple[Job, str, Callable[[], Awaitable[object]]]]],
) -> None:
    await owners.queue("decode", "d").make_groups()
    await owners.client.submit(token_ids=[1, 2, 3], id="a")
    job, target, again = await transition(owners)
    with any_server.client() as direct:
        before = direct.hmget(KEYS.request("a"), "stage", "state", "owner", "entry", "tries", "requeues")
        load = await owners.load()
        with used_up(direct, target):
            with pytest.raises(ResponseError, match="exhausted"):
                await again()
            assert direct.hmget(KEYS.request("a"), "stage", "state", "owner", "entry", "tries", "requeues") == before
            assert pending(direct, job.stream) == (1, 1)
            assert await owners.load() == load
        await again()  # what was visible already is so once
        assert pending(direct, target) == (1, 0)
        if job.stream != target:
            assert pending(direct, job.stream) == (0, 0)
        assert direct.hget(KEYS.request("a"), "state") == b"queued"
        assert reply(direct, KEYS, "a").faults == ()
        assert len(reply(direct, KEYS, "a").tokens) == int(direct.hget(KEYS.request("a"), "pos") or 0)


@REAL
async def test_a_refused_cancel_hint_does_not_keep_a_cancel_from_its_request(
    owners: Owners, any_server: Server
) -> None:
    prefill = owners.queue("prefill", "p")
    for name in ("running", "between"):
        await owners.client.submit(prompt="hi", id=name)
    running = await owners.take(prefill)
    await prefill.hand_off(await owners.take(prefill), Handoff((1,), 1, bytes(32), 4, tail_key="a tail"))
    with any_server.client() as direct:
        direct.xadd(KEYS.cancels, {"id": "none"})
        with used_up(direct, KEYS.cancels):
            assert await owners.client.cancel("running") is True
            assert await owners.client.cancel("between") is True
        assert await prefill.write([(running, Event(0, (7,), "a"))]) == ["cancel"]
        ended = reply(direct, KEYS, "between").end
        assert ended is not None
        assert ended.finish_reason == "cancelled"
        assert direct.xlen(KEYS.decode) == 0


# ---- each way to end a request, with a reply stream that refuses the end ----


async def by_its_worker(owners: Owners, prefill: Queue) -> None:
    job = await owners.take(prefill)
    assert await prefill.write([(job, Event(0, (7,), "right", "stop", USAGE))]) == ["ok"]


async def by_its_last_failure(owners: Owners, prefill: Queue) -> None:
    job = await owners.take(prefill)
    await owners.redis.hset(KEYS.request("a"), "tries", 3)
    assert await prefill.fail(job, "boom") == "dead"


async def by_its_last_death(owners: Owners, prefill: Queue) -> None:
    await owners.take(prefill)
    await owners.redis.hset(KEYS.request("a"), "tries", 3)
    (entry,) = await prefill.reclaim(1)
    assert await prefill.claim(entry) is None


async def by_a_cancel(owners: Owners, _: Queue) -> None:
    assert await owners.client.cancel("a") is True


async def by_a_claim_past_its_deadline(owners: Owners, prefill: Queue) -> None:
    await owners.redis.hset(KEYS.request("a"), "deadline", 1)
    assert await prefill.claim_all((), more=1) == ([], None)


async def by_its_reader(owners: Owners, _: Queue) -> None:
    await owners.redis.hset(KEYS.request("a"), "deadline", 1)
    assert (await owners.client.check("a")).state == "done"


ENDS = {
    by_its_worker: ("stop", None),
    by_its_last_failure: ("error", "request_failed"),
    by_its_last_death: ("error", "request_failed"),
    by_a_cancel: ("cancelled", "cancelled"),
    by_a_claim_past_its_deadline: ("error", "deadline_exceeded"),
    by_its_reader: ("error", "deadline_exceeded"),
}


@pytest.mark.parametrize("end", [pytest.param(end, id=end.__name__) for end in ENDS])
async def test_a_request_ends_once_and_with_its_own_end_although_its_reply_stream_refuses_it(
    owners: Owners, any_server: Server, end: Callable[[Owners, Queue], Awaitable[None]]
) -> None:
    prefill = owners.queue("prefill", "p")
    await prefill.make_groups()
    await owners.client.submit(prompt="hi", id="a")
    with any_server.client() as direct:
        taken(direct, "a")
        await end(owners, prefill)
        found = reply(direct, KEYS, "a")
        assert found.faults == ()
        assert found.end is not None
        assert (found.end.finish_reason, found.end.error and found.end.error.code) == ENDS[end]
        assert [entry for entry, _ in direct.xrange(KEYS.out("a"))] == [END]
        assert 0 < direct.pttl(KEYS.out("a")) <= 60_000
        assert direct.hget(KEYS.request("a"), "stage") == b"done"
        assert pending(direct, KEYS.prefill("normal")) == (0, 0)
        assert await owners.load() == {"queued": 0}


# ---- one job's refusal is its own ----


async def test_a_batch_of_writes_has_an_outcome_for_each_job(owners: Owners, any_server: Server) -> None:
    prefill = owners.queue("prefill", "p")
    for name in ("a", "b", "c"):
        await owners.client.submit(prompt="hi", id=name)
    jobs = [await owners.take(prefill) for _ in range(3)]
    with any_server.client() as direct:
        taken(direct, "b")
        first, refused, last = await prefill.write([(job, Event(0, (7,), "a")) for job in jobs])
        assert (first, last) == ("ok", "ok")
        assert isinstance(refused, ResponseError)
        assert TOO_SMALL in str(refused)
        with pytest.raises(ResponseError, match=TOO_SMALL):
            await prefill.write_one(jobs[1], Event(0, (7,), "a"))
        assert [reply(direct, KEYS, name).tokens for name in ("a", "c")] == [(7,), (7,)]


async def test_a_claimed_job_that_cannot_be_refused_costs_the_others_of_its_claim_nothing(
    owners: Owners, any_server: Server
) -> None:
    prefill = owners.queue("prefill", "p")
    for name in ("bad", "good"):
        await owners.client.submit(prompt=name, id=name)
    await prefill.make_groups()
    with any_server.client() as direct:
        direct.hset(KEYS.request("bad"), "msg", b"\x80\x04garbage")
        direct.hset(KEYS.load, "queued", "no number")  # so the script that ends the bad one fails, too
        jobs, failed = await prefill.claim_all((), more=2)
        assert [job.request.prompt for job in jobs] == ["good"]
        assert isinstance(failed, ResponseError)
        ended = reply(direct, KEYS, "bad").end
        assert ended is not None
        assert ended.error == RequestFailed(f"the queued request cannot be read: {bad_message()}").wire()
        direct.hset(KEYS.load, "queued", int(direct.hget(KEYS.request("good"), "cost") or 0))
        bad = next(entry for entry in await prefill.reclaim(10) if entry[2] == "bad")
        assert await prefill.claim(bad) is None  # it drops the entry that was left
        assert pending(direct, KEYS.prefill("normal")) == (1, 1)


def bad_message() -> str:
    with pytest.raises(BadMessage) as bad:
        decode(Request, b"\x80\x04garbage")
    return str(bad.value)


async def test_a_wrong_key_among_the_reclaimed_keeps_no_other_from_being_taken_over(
    owners: Owners, any_server: Server
) -> None:
    prefill = owners.queue("prefill", "p")
    for name in ("a", "wrong", "c"):
        await owners.client.submit(prompt="hi", id=name)
        await owners.take(prefill)
    with any_server.client() as direct:
        direct.delete(KEYS.request("wrong"))
        direct.set(KEYS.request("wrong"), "no hash")
        entries = await prefill.reclaim(10)
        found = await Suspects(owners.redis, KEYS, "p", 60.0, 3).sift(entries, set())
        assert [name for _, _, name in found] == ["a", "wrong", "c"]
        jobs, failed = await prefill.claim_all(found)
        assert [job.id for job in jobs] == ["a", "c"]
        assert isinstance(failed, ResponseError)
        direct.delete(KEYS.request("wrong"), KEYS.load)
        direct.xack(KEYS.prefill("normal"), GROUP, entries[1][1])
        direct.xdel(KEYS.prefill("normal"), entries[1][1])
        direct.hset(KEYS.load, "queued", 2)


async def test_the_tokens_of_a_reply_that_lost_some_are_not_looked_for_for_ever(
    owners: Owners, any_server: Server
) -> None:
    prefill = owners.queue("prefill", "p")
    await owners.client.submit(prompt="hi", id="a")
    await owners.take(prefill)
    with any_server.client() as direct:
        direct.hset(KEYS.request("a"), "pos", 5)
        taken(direct, "a")
        (entry,) = await prefill.reclaim(1)
        job = await prefill.claim(entry)
        assert job is not None
        async with asyncio.timeout(10):
            with pytest.raises(ValueError, match="5 tokens are visible, 0 were found"):
                await prefill.emitted(job)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids whose events were refused, once for each time."""
    found: list[str] = []
    write = Queue.write

    async def noted(self: Queue, writes: list[tuple[Job, Event]]) -> list[str | RedisError]:
        try:
            outcomes = await write(self, writes)
        except RedisError:
            found.extend(job.id for job, _ in writes)
            raise
        found.extend(job.id for (job, _), o in zip(writes, outcomes, strict=True) if isinstance(o, RedisError))
        return outcomes

    monkeypatch.setattr(Queue, "write", noted)
    return found


async def test_in_a_decode_batch_a_refused_event_fails_its_own_job_and_is_sent_once_an_attempt(
    server: Server, refusals: list[str]
) -> None:
    async with LocalPool(server, lease_seconds=LEASE, decode_engine="scripted:step_ms=2") as pool:
        good = await submit(pool.client, "good", 400)
        bad = await submit(pool.client, "bad", 3000)
        with server.client() as direct:
            for handle in (good, bad):
                await until(lambda handle=handle: int(direct.hget(KEYS.request(handle.id), "pos") or 0) > 10)
            taken(direct, bad.id)
            assert text_of(await read(good, 20)) == expected(b"good", 400)
            await until(lambda: direct.hget(KEYS.request(bad.id), "reason") == b"dead")
            with pytest.raises(RequestFailed, match="decode failed 3 times"):
                await bad.result(5)
            assert refusals == [bad.id] * 3
            ((_, letter),) = direct.xrange(KEYS.dead)
            assert TOO_SMALL in letter[b"reason"].decode()
            assert direct.hmget(KEYS.request(good.id), "attempt", "tries") == [b"2", b"1"]


async def test_a_prefill_job_whose_token_0_is_refused_fails_by_its_attempts(server: Server) -> None:
    async with LocalPool(server, prefill=0, lease_seconds=LEASE) as pool:
        handle = await submit(pool.client, "refused", 20)
        with server.client() as direct:
            taken(direct, handle.id)
            pool.add("prefill")
            await until(lambda: direct.hget(KEYS.request(handle.id), "reason") == b"dead")
            with pytest.raises(RequestFailed, match="prefill failed 3 times"):
                await handle.result(5)
            assert reply(direct, KEYS, handle.id).faults == ()
            assert direct.hget(KEYS.load, "queued") == b"0"
        assert pool.workers["prefill"][0].worker.counters["failed"] == 3


async def test_an_answer_of_one_token_replaces_what_is_not_its_own(server: Server) -> None:
    async with LocalPool(server, prefill=0, lease_seconds=LEASE) as pool:
        handle = await submit(pool.client, "one token", 1)
        with server.client() as direct:
            taken(direct, handle.id)
            pool.add("prefill")
            await until(lambda: direct.hget(KEYS.request(handle.id), "stage") == b"done")
            assert (await handle.result(5)).text == expected(b"one token", 1)


# ---- what is an outage, and what a refusal ----


def no_replicas(direct: redis.Redis) -> Callable[[], object]:
    direct.config_set("min-replicas-to-write", 1)
    return lambda: direct.config_set("min-replicas-to-write", 0)


def read_only(direct: redis.Redis) -> Callable[[], object]:
    direct.replicaof("127.0.0.1", 1)  # no server is there, so it keeps its data
    return lambda: direct.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("any_server", "fault"),
    [  # Redis 6 does not ask for replicas inside a script
        *((kind, read_only) for kind in ("valkey9", "redis7", "redis6")),
        *((kind, no_replicas) for kind in ("valkey9", "redis7")),
    ],
    indirect=["any_server"],
)
async def test_a_server_that_takes_no_writes_is_an_outage(
    owners: Owners, any_server: Server, fault: Callable[[redis.Redis], Callable[[], object]]
) -> None:
    prefill = owners.queue("prefill", "p")
    await owners.client.submit(prompt="hi", id="a")
    job = await owners.take(prefill)
    with any_server.client() as direct:
        heal = fault(direct)
        with pytest.raises(RedisError) as refused:
            await prefill.write_one(job, Event(0, (7,), "a"))
        heal()
    assert is_outage(refused.value)
    assert await prefill.write_one(job, Event(0, (7,), "a")) == "ok"


@REAL
async def test_a_write_refused_for_what_it_is_is_no_outage(owners: Owners, any_server: Server) -> None:
    with any_server.client() as direct:
        direct.set("{pdq:default}:wake:x", "no stream", px=60_000)
        taken(direct, "a")
        direct.pexpire(KEYS.out("a"), 60_000)
        direct.pexpire("{pdq:default}:wake:x", 60_000)
    for key in ("{pdq:default}:wake:x", KEYS.out("a")):
        with pytest.raises(ResponseError) as refused:
            await owners.redis.eval("return redis.call('XADD', KEYS[1], '0-1', 'e', '')", 1, key)
        assert not is_outage(refused.value)
    with full(any_server), pytest.raises(ResponseError) as refused:
        await owners.redis.set("{pdq:default}:wake:y", "", px=60_000)
    assert not is_outage(refused.value)


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ResponseError("MISCONF Redis is configured to save RDB snapshots, but cannot persist"), True),
        (ResponseError("BUSY Redis is busy running a script."), True),
        (redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"), True),
        (redis.exceptions.TryAgainError("Multiple keys request during rehashing of slot"), True),
        (ResponseError("BUSYGROUP Consumer Group name already exists"), False),
        (ResponseError("NOGROUP No such key"), False),
    ],
)
def test_what_a_server_answers_to_everybody_is_an_outage(error: RedisError, outage: bool) -> None:
    assert is_outage(error) is outage


async def test_a_server_that_takes_no_writes_for_a_while_charges_no_attempt(
    server: Server, refusals: list[str]
) -> None:
    options = {
        "lease_seconds": LEASE,
        "decode_engine": "scripted:step_ms=2",
        "prefill_engine": "scripted:prefill_us=500",
    }
    async with LocalPool(server, **options) as pool:
        handle = await submit(pool.client, "waited out", 300)
        with server.client() as direct:
            await until(lambda: int(direct.hget(KEYS.request(handle.id), "pos") or 0) > 10)
            second = await submit(pool.client, "p" * 200, 20)
            await until(lambda: direct.hget(KEYS.request(second.id), "state") == b"running")
            heal = no_replicas(direct)
            await until(lambda: len(refusals) > 2)
            heal()
            assert text_of(await read(handle)) == expected(b"waited out", 300)
            assert text_of(await read(second)) == expected(b"p" * 200, 20)
            for name in (handle.id, second.id):
                assert direct.hget(KEYS.request(name), "tries") == b"1"
            assert direct.xlen(KEYS.dead) == 0


@REAL
async def test_a_full_redis_refuses_no_transition_of_a_running_request(any_server: Server) -> None:
    """With prompts that need memory to be handed over: 4 KB of tokens."""
    big = Handoff(tuple(range(2000)), 2000, bytes(32), 4)
    async with Owners(any_server) as owners:
        prefill, decode = owners.queue("prefill", "p"), owners.queue("decode", "d")
        await prefill.make_groups()
        await decode.make_groups()
        for name in "abcdef":
            await owners.client.submit(token_ids=[1], id=name)
        with full(any_server):
            jobs = {job.id: job for job in [await owners.take(prefill) for _ in range(6)]}
            assert await prefill.write([(jobs["a"], Event(0, (7,), "x" * 4000))]) == ["ok"]
            await prefill.hand_off(jobs["a"], big)
            await prefill.hand_off(jobs["b"], big, Event(0, (7,), "x" * 4000))
            assert await decode.requeue(await owners.take(decode)) is True
            assert await decode.write([(await owners.take(decode), Event(1, (8,), "y", "stop", Usage(1, 2)))]) == ["ok"]
            await prefill.release(jobs["c"])
            assert await prefill.fail(jobs["d"], "boom") == "retry"
            await prefill.end(jobs["e"], RequestFailed("x" * 4000))
            for name in "acdf":
                assert await owners.client.cancel(name) is True
            await prefill.end(jobs["f"], RequestFailed("cancelled"))
        with any_server.client() as direct:
            for name in "abcdef":
                assert direct.hget(KEYS.request(name), "stage") == b"done"
                assert reply(direct, KEYS, name).faults == ()
            assert await owners.load() == {"queued": 0, "held": 0}
