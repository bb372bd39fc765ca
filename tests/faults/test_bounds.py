"""Nothing grows without a bound: 100,000 entries, limits on what is queued and handed over, sums that stay exact."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TypeVar

import pytest
import redis

from pdq import connection, messages
from pdq.client import Handle
from pdq.errors import InvalidRequest, LostLease, QueueFull, RequestCancelled, RequestFailed
from pdq.keys import GROUP, Keys
from pdq.messages import Event, Handoff, Request, SamplingParams, Usage, encode
from pdq.queue import Job, Queue, renew
from tests.faults.owners import Owners
from tests.hygiene import end_all
from tests.pipeline.local import LocalPool
from tests.pipeline.test_pipeline import expected
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("quick_drain")

BACKLOG = 100_000
USAGE = Usage(1, 1)
T = TypeVar("T")


def handoff(length: int) -> Handoff:
    return Handoff(tuple(range(length)), length, bytes(32), 4)


# ---- 100,000 entries ----

# KEYS stream   ARGV request key without id, first, last, message, lane: requests as `submit` writes them
QUEUE_MANY = """
for i = ARGV[2], ARGV[3] do
  local entry = redis.call('XADD', KEYS[1], '*', 'id', i)
  redis.call('HSET', ARGV[1] .. i, 'v', 1, 'msg', ARGV[4], 'lane', ARGV[5], 'cost', 3, 'deadline', 1e15,
    'queue_deadline', 0, 'stage', 'prefill', 'state', 'queued', 'entry', entry, 'attempt', 0, 'owner', '', 'tries', 0,
    'pos', 0, 't_submit', 1)
end
"""
# KEYS stream   ARGV group, count: read by a worker that dies
TAKE_MANY = (
    "return #redis.call('XREADGROUP', 'GROUP', ARGV[1], 'dead', 'COUNT', ARGV[2], 'STREAMS', KEYS[1], '>')[1][2]"
)


def pile_up(client: redis.Redis, keys: Keys, count: int) -> None:
    """`count` requests pending for a dead worker in lane batch, as many queued in lane normal.

    And as many entries pending in decode that nobody will read again, so that its stream is as long.
    """
    message = encode(Request("x", SamplingParams(), token_ids=(1, 2, 3)))
    for lane, start in (("batch", 0), ("normal", count)):
        client.xgroup_create(keys.prefill(lane), GROUP, id="0", mkstream=True)
        for first in range(start, start + count, 10_000):
            last = min(first + 10_000, start + count) - 1
            client.eval(QUEUE_MANY, 1, keys.prefill(lane), keys.request(""), first, last, message, lane)
    client.hset(keys.load, "queued", 6 * count)
    client.xgroup_create(keys.decode, GROUP, id="0", mkstream=True)
    client.eval(f"for i = 1, {count} do redis.call('XADD', KEYS[1], '*', 'id', 'nobody') end", 1, keys.decode)
    for stream in (keys.prefill("batch"), keys.decode):
        assert client.eval(TAKE_MANY, 1, stream, GROUP, count) == count


@pytest.fixture(scope="module")
def backlog_server() -> Iterator[Server]:
    """A Valkey with the pools "small" and "big", of 10 and 100,000 queued and pending requests."""
    server = Server("valkey9")
    with redis.Redis(port=server.port, protocol=2, socket_timeout=30) as client:
        pile_up(client, Keys("small"), 10)
        pile_up(client, Keys("big"), BACKLOG)
    yield server
    server.close()


async def test_a_hundred_thousand_entries_of_a_dead_worker_are_taken_over_in_bounded_batches(
    backlog_server: Server,
) -> None:
    count = 16
    took: list[float] = []
    seen: set[str] = set()
    async with Owners(backlog_server, "big") as big:
        prefill = big.queue("prefill", "alive")
        for _ in range(40):
            started = time.perf_counter()
            entries = await prefill.reclaim(count)
            took.append(time.perf_counter() - started)
            assert 0 < len(entries) <= count
            assert not seen & {e[1] for e in entries}  # on from where the last look ended
            seen |= {e[1] for e in entries}
            job = await prefill.claim(entries[0])
            assert job is not None
            assert job.attempt == 1
            new = await big.take(prefill)  # and new work goes on meanwhile
            assert new.stream == big.keys.prefill("normal")
            for done in (job, new):
                await prefill.end(done, RequestFailed("enough"))
        pending = await big.redis.xpending(big.keys.prefill("batch"), GROUP)
    owned = {c["name"]: c["pending"] for c in pending["consumers"]}
    assert owned == {b"dead": BACKLOG - len(seen), b"alive": len(seen) - len(took)}
    assert len(seen) > 300
    assert sorted(took)[-3] < 0.1


class Timer:
    """Seconds of each step, by its name."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = defaultdict(list)

    async def __call__(self, name: str, step: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await step
        self.took[name].append(time.perf_counter() - started)
        return result

    @property
    def middle(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.took.items()}


async def test_no_transition_costs_more_with_a_hundred_thousand_entries_than_with_ten(backlog_server: Server) -> None:
    """Both pools in turn, so that whatever else the machine does hits both."""
    small, big = Timer(), Timer()
    async with Owners(backlog_server, "small") as one, Owners(backlog_server, "big") as other:
        with connection.lease(backlog_server.url) as lease:
            for pool in (one, other):
                await pool.queue("prefill", "w").make_groups()
            for i in range(50):
                await every_transition(one, lease, f"w{i}", small)
                await every_transition(other, lease, f"w{i}", big)
    assert len(small.took["submit"]) == len(big.took["submit"]) == 200
    assert big.middle["submit"] < 2 * small.middle["submit"]
    for name, seconds in big.middle.items():
        assert seconds < 2 * small.middle[name] + 0.0005, name


async def every_transition(pool: Owners, lease: connection.SyncRedis, owner: str, timed: Timer) -> None:
    """Four requests of lane high, which the backlog is not in, through every script."""
    prefill, decode = pool.queue("prefill", owner), pool.queue("decode", owner)

    async def take(queue: Queue) -> Job:
        (job,), failed = await timed("take", queue.take(1, 1))
        assert failed is None
        return job

    handles = [await timed("submit", pool.client.submit(token_ids=[1, 2], lane="high")) for _ in range(4)]
    await timed("cancel", handles[0].cancel())
    await timed("release", prefill.release(await take(prefill)))
    job = await take(prefill)
    assert await timed("renew", asyncio.to_thread(renew, lease, pool.keys, job)) == "ok"
    assert await timed("append", prefill.write([(job, Event(0, (7,), "a"))])) == ["ok"]
    await timed("handoff", prefill.hand_off(job, handoff(2)))
    assert await timed("requeue", decode.requeue(await take(decode)))
    assert await timed("fail", prefill.fail(await take(prefill), "boom")) == "retry"
    (entry,) = await timed("reclaim", prefill.reclaim(1))
    for again in (await prefill.claim(entry), await take(prefill), await take(prefill)):
        assert again is not None
        await timed("finish", prefill.end(again, RequestFailed("enough")))
    assert (await timed("check", pool.client.check(handles[1].id))).state == "done"
    await timed("leave", prefill.leave())
    await timed("sweep", decode.sweep(idle=3600))


# ---- limits ----


@pytest.fixture
async def owners(any_server: Server) -> AsyncIterator[Owners]:
    async with Owners(any_server) as made:
        yield made
    with any_server.client() as client:
        end_all(client)


async def test_queued_prompt_tokens_are_bounded_but_a_long_prompt_fits_an_empty_queue(owners: Owners) -> None:
    client, prefill = owners.client, owners.queue("prefill", "p")
    client.max_queued_tokens = 100
    await client.submit(token_ids=[1] * 300, id="long")
    with pytest.raises(QueueFull, match="1 requests with 300 prompt tokens"):
        await client.submit(token_ids=[1], id="refused")
    assert await owners.redis.exists(owners.keys.request("refused")) == 0
    await prefill.end(await owners.take(prefill), RequestFailed("x"))
    await client.submit(token_ids=[1] * 60, id="a")
    await client.submit(token_ids=[1] * 40, id="b")
    with pytest.raises(QueueFull):
        await client.submit(token_ids=[1], id="c")
    assert (await client.submit(token_ids=[1] * 60, id="a")).id == "a"  # accepted before: no new work
    await prefill.hand_off(await owners.take(prefill), handoff(60))  # what decode has does not wait for prefill
    await client.submit(token_ids=[1] * 60, id="c")


async def test_a_refusal_is_quick(owners: Owners) -> None:
    owners.client.max_queued = 3
    for _ in range(3):
        await owners.client.submit(prompt="hi")
    took = []
    for _ in range(100):
        started = time.perf_counter()
        with pytest.raises(QueueFull):
            await owners.client.submit(prompt="hi")
        took.append(time.perf_counter() - started)
    assert sorted(took)[94] < 0.15


@pytest.mark.parametrize("any_server", ["valkey9"], indirect=True)
async def test_a_message_over_the_size_limit_is_the_clients_mistake(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="over the limit of 1000"):
        await owners.client.submit(prompt="x" * 1000)
    assert await owners.redis.keys("*") == []
    await owners.client.submit(prompt="x" * 100)


async def test_prefill_pauses_while_decode_has_more_kv_to_take_than_the_limit(server: Server) -> None:
    """Ten prompts of 11 tokens of 8 bytes each. What is in work when the limit is passed still comes on top."""
    async with LocalPool(server, decode=0, prefill_max_handoff="200B") as pool:
        prompts = [f"prompt no {i}" for i in range(10)]
        handles = [await pool.client.submit(prompt=p, max_tokens=4, temperature=0) for p in prompts]
        prefill = pool.workers["prefill"][0]

        async def handed_over() -> int:
            return sum([(await h.status()).stage == "decode" for h in handles])

        async with asyncio.timeout(15):
            while await handed_over() < 3 or len(prefill.worker.leases):
                await asyncio.sleep(0.01)
        paused = await handed_over()
        assert 3 <= paused <= 5
        await asyncio.sleep(0.5)
        assert await handed_over() == paused
        assert prefill.stage.counters()["prompt_tokens"] == 11 * paused
        assert await prefill.worker.queue.held() == 11 * paused
        pool.add("decode")
        assert [(await h.result(15)).text for h in handles] == [expected(p.encode(), 4) for p in prompts]
        assert await prefill.worker.queue.held() == 0


# ---- the sums ----


class Model:
    """What should be, from what each transition answered. Walks at random; `check` compares Redis with it."""

    def __init__(self, owners: Owners, seed: int) -> None:
        self.owners = owners
        self.random = random.Random(seed)
        self.workers = {
            stage: [owners.queue(stage, f"{stage}{i}") for i in range(2)] for stage in ("prefill", "decode")
        }
        self.cost: dict[str, int] = {}
        self.stage: dict[str, str] = {}
        self.held: dict[str, int] = {}
        self.jobs: dict[str, tuple[Queue, Job]] = {}
        self.zombies: list[tuple[Queue, Job]] = []
        self.done: set[str] = set()
        self.steps: dict[str, int] = defaultdict(int)

    async def step(self) -> None:
        walk = [self.submit] * 3 + [self.claim] * 3 + [self.take_over, self.cancel, self.expire, self.check]
        if self.jobs:
            walk += [self.hand_on] * 3 + [self.fail, self.release, self.end]
        if self.zombies:
            walk.append(self.wake_a_zombie)
        action = self.random.choice(walk)
        self.steps[action.__name__] += 1
        await action()

    async def submit(self) -> None:
        cost, lane = self.random.randint(1, 50), self.random.choice(messages.LANES)
        handle = await self.owners.client.submit(token_ids=[1] * cost, lane=lane, id=f"r{len(self.cost)}")
        self.cost[handle.id], self.stage[handle.id] = cost, "prefill"

    async def claim(self) -> None:
        queue, entries = self._queue(), []
        for stream in queue.streams:  # as `Queue.read`, but without waiting
            for _, found in await self.owners.redis.xreadgroup(GROUP, queue.owner, {stream: ">"}, count=1) or []:
                entries += [(stream, entry.decode(), data[b"id"].decode()) for entry, data in found]
        await self._claim(queue, entries)

    async def take_over(self) -> None:
        """Of whatever is pending: a lease lasts no time here. What ran there is a zombie from now on."""
        queue = self._queue()
        await self._claim(queue, await queue.reclaim(1))

    async def _claim(self, queue: Queue, entries: list[tuple[str, str, str]]) -> None:
        for entry in entries:
            request_id = entry[2]
            if old := self.jobs.pop(request_id, None):
                self.zombies.append(old)
            job = await queue.claim(entry)
            if job is None:
                await self._ended(request_id)
            else:
                self.jobs[request_id] = (queue, job)
                self.held.pop(request_id, None)

    async def hand_on(self) -> None:
        queue, job = self._pop()
        try:
            if queue.stage == "prefill":
                length = self.random.randint(1, 9)
                await queue.hand_off(job, handoff(length))
                self.stage[job.id], self.held[job.id] = "decode", length
            elif await queue.requeue(job):
                self.stage[job.id] = "prefill"
            else:
                self.jobs[job.id] = (queue, job)
        except RequestCancelled:
            self.jobs[job.id] = (queue, job)

    async def end(self) -> None:
        queue, job = self._pop()
        await queue.write([(job, Event(job.visible, (5,), "x", "stop", USAGE))])
        await self._ended(job.id)

    async def fail(self) -> None:
        queue, job = self._pop()
        if await queue.fail(job, "boom", delay=0) == "dead":
            await self._ended(job.id)

    async def release(self) -> None:
        queue, job = self._pop()
        await queue.release(job)

    async def cancel(self) -> None:
        if handle := self._any():
            await handle.cancel()
            if handle.id not in self.jobs:
                await self._ended(handle.id)

    async def expire(self) -> None:
        if handle := self._any():
            await self.owners.redis.hset(self.owners.keys.request(handle.id), "deadline", 1)

    async def check(self) -> None:
        if (handle := self._any()) and (await self.owners.client.check(handle.id)).state == "done":
            await self._ended(handle.id)

    async def wake_a_zombie(self) -> None:
        queue, job = self.zombies.pop()
        assert await queue.write([(job, Event(job.visible, (5,), "x", "stop", USAGE))]) == ["lost"]
        with pytest.raises(LostLease):
            await queue.fail(job, "boom")

    async def _ended(self, request_id: str) -> None:
        """Take note that it is over; fails if Redis does not agree."""
        assert (await self.owners.client.status(request_id)).stage == "done"
        if lost := self.jobs.pop(request_id, None):
            self.zombies.append(lost)
        self.stage[request_id] = "done"
        self.held.pop(request_id, None)

    def _queue(self) -> Queue:
        return self.random.choice(self.workers[self.random.choice(["prefill", "decode"])])

    def _pop(self) -> tuple[Queue, Job]:
        return self.jobs.pop(self.random.choice(sorted(self.jobs)))

    def _any(self) -> Handle | None:
        ids = [i for i, stage in self.stage.items() if stage != "done"]
        return self.owners.client.attach(self.random.choice(ids)) if ids else None

    async def compare(self) -> None:
        keys, stages = self.owners.keys, list(self.stage.values())
        depth = sum([await self.owners.redis.xlen(keys.prefill(lane)) for lane in messages.LANES])
        assert depth == stages.count("prefill")
        assert await self.owners.redis.xlen(keys.decode) == stages.count("decode")
        load = await self.owners.load()
        queued = sum(self.cost[i] for i, stage in self.stage.items() if stage == "prefill")
        assert (load.get("queued", 0), load.get("held", 0)) == (queued, sum(self.held.values()))
        for request_id in set(self.stage) - self.done:
            out = await self.owners.redis.xrange(keys.out(request_id), "1-0", "1-0")
            assert len(out) == (self.stage[request_id] == "done")
            if out:
                self.done.add(request_id)


@pytest.mark.parametrize(("any_server", "seed"), [("valkey9", 1), ("valkey9", 2), ("fake", 3)], indirect=["any_server"])
async def test_the_sums_are_exact_after_any_mix_of_transitions(owners: Owners, seed: int) -> None:
    model = Model(owners, seed)
    for queues in model.workers.values():
        await queues[0].make_groups()
    for _ in range(300):
        await model.step()
        await model.compare()
    assert len(model.steps) == 11
    assert set(model.stage.values()) == {"prefill", "decode", "done"}


async def test_a_lost_sum_counts_from_zero_again_and_never_below(owners: Owners) -> None:
    prefill, decode = owners.queue("prefill", "p"), owners.queue("decode", "d")
    for _ in range(2):
        await owners.client.submit(token_ids=[1] * 5)
        await prefill.make_groups()
        await prefill.hand_off(await owners.take(prefill), handoff(5))
    await owners.client.submit(token_ids=[1] * 5)
    await owners.redis.delete(owners.keys.load)
    await prefill.end(await owners.take(prefill), RequestFailed("x"))
    await owners.take(decode)
    assert await owners.load() == {"queued": 0, "held": 0}
    await owners.client.submit(token_ids=[1] * 7)
    assert await owners.load() == {"queued": 7, "held": 0}
