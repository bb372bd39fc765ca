"""Every key class has a bound and an owner; an idle pool is back at its baseline; names of workers do not pile up."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import redis

from pdq import cache_admin, connection, keys, kv_transfer
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import DeadlineExceeded, RequestCancelled, RequestFailed
from pdq.keys import CANCELS, DEAD_LETTERS, GROUP, Keys
from pdq.messages import LANES
from pdq.queue import Queue
from pdq.worker import STALE_MS
from tests.faults.programs import Programs
from tests.hygiene import NODE, RULES, end_all, leaks, row_of
from tests.pipeline.local import LocalPool
from tests.pipeline.test_pipeline import ask, expected
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("quick_drain")

KEYS = Keys("default")
TYPES = {b"stream", b"hash", b"zset", b"string"}


def table() -> dict[str, str]:
    """The rows of the table at the head of pdq/keys.py: key -> type."""
    found = re.findall(r"^    (\S+) +(stream|hash|zset|string) +\S+.*$", keys.__doc__ or "", re.MULTILINE)
    return dict(found)


def test_every_row_of_the_table_has_a_rule_and_every_key_a_row() -> None:
    assert set(table()) == set(RULES)
    spelled = [
        *map(KEYS.prefill, LANES), KEYS.decode, KEYS.request("i:d"), KEYS.out("i:d"), KEYS.load, KEYS.dead,
        KEYS.cancels, KEYS.workers, KEYS.worker("n"), KEYS.took("n"), KEYS.wake("r"),
        keys.BlockKeys(bytes(32)).block(bytes(32)), keys.BlockKeys(bytes(32)).index,
        keys.BlockKeys(bytes(32)).epoch, keys.tail("i:d", 3),
    ]  # fmt: skip
    assert {row_of(k) for k in spelled} == set(RULES)
    assert [row_of(k) for k in ("{pdq:default}:new", "pdq:other", "{pdq:default}:prefill")] == [None] * 3


class Watcher:
    """Looks through all keys again and again: which rows of the table occurred, and with which types."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.types: dict[str, set[str]] = {}

    async def look(self) -> None:
        with self._server.client() as client:
            for raw in client.scan_iter(count=1000):
                row = row_of(raw.decode())
                assert row is not None, raw
                kind = client.type(raw)
                if kind in TYPES:
                    self.types.setdefault(row, set()).add(kind.decode())

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.05)


async def two_hundred_requests(pool: LocalPool) -> None:
    """Answers mostly; cancels, failures and missed deadlines among them."""

    async def one(i: int) -> None:
        if i % 20 == 3:
            handle = await pool.client.submit(prompt=f"no {i}", max_tokens=4000)
            while (await handle.status()).stage != "decode":
                await asyncio.sleep(0.01)
            await handle.cancel()
            with pytest.raises(RequestCancelled):
                await handle.result(20)
        elif i % 20 == 7:
            handle = await pool.client.submit(prompt=f"no {i}", max_tokens=4000, timeout=0.5)
            with pytest.raises(DeadlineExceeded):
                await handle.result(20)
        else:
            assert (await ask(pool, f"no {i}", 3 + i % 5)).text == expected(f"no {i}".encode(), 3 + i % 5)

    for start in range(0, 200, 50):
        await asyncio.gather(*(one(i) for i in range(start, start + 50)))


async def test_after_two_hundred_requests_every_key_is_bounded_and_owned(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "SMALL", 0)  # else tails travel in handoffs and have no key
    options = {"engine": "scripted:step_ms=1", "decode_flush_ms": 5.0, "lease_seconds": 1.0, "result_ttl": 30.0}
    async with LocalPool(server, prefill=2, decode=2, **options) as pool:
        watcher = Watcher(server)
        watching = asyncio.create_task(watcher.run())
        await two_hundred_requests(pool)
        await asyncio.to_thread(cache_admin.clear, RedisSettings(redis_url=server.url))
        await a_dead_letter(pool, monkeypatch)
        await watcher.look()
        watching.cancel()
    assert watcher.types == {row: {kind} for row, kind in table().items()}
    with server.client() as client:
        assert leaks(client) == []
        ttls = [client.pttl(k) for row in (":req:", ":out:") for k in client.scan_iter(f"*{row}*", count=1000)]
        assert len(ttls) == 2 * 201
        assert max(ttls) <= 60_000  # of whoever ended it: a worker (result_ttl) or a client (a minute)
        # Workers that left are forgotten at once; only results, blocks and counters that read zero stay.
        kept = {row_of(k.decode()) for k in client.scan_iter(count=1000)}
        assert kept <= set(RULES) - {"{pdq:P}:worker:<name>", "{pdq:P}:workers", "{pdq:P}:wake:<reader>"}
        for stream in (*map(KEYS.prefill, LANES), KEYS.decode):
            assert client.xinfo_consumers(stream, GROUP) == []


async def a_dead_letter(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for worker in pool.workers["prefill"]:
        monkeypatch.setattr(worker.engine, "forward", lambda _: 1 / 0)
    handle = await pool.client.submit(prompt="poison")
    with pytest.raises(RequestFailed, match="failed 3 times"):
        await handle.result(20)


async def test_an_ended_requests_keys_go_when_their_time_is_up(server: Server) -> None:
    async with LocalPool(server, result_ttl=1.0) as pool:
        handles = [await pool.client.submit(prompt=f"no {i}", max_tokens=2) for i in range(5)]
        for handle in handles:
            await handle.result(10)
        names = [f(h.id) for h in handles for f in (KEYS.request, KEYS.out)]
        with server.client() as client:
            async with asyncio.timeout(10):
                while client.exists(*names):
                    await asyncio.sleep(0.05)


async def test_dead_letters_and_cancel_hints_are_trimmed(any_server: Server) -> None:
    client = AsyncClient(RedisSettings(redis_url=any_server.url))
    redis_, waiting = connection.command(any_server.url), connection.blocking(any_server.url)
    prefill = Queue(
        *(redis_, waiting), keys=KEYS, stage="prefill", owner="p", lease_seconds=9, max_attempts=1, result_ttl=60
    )
    with any_server.client() as sync:
        for key, most in ((KEYS.dead, DEAD_LETTERS), (KEYS.cancels, CANCELS)):
            pipe = sync.pipeline(transaction=False)
            for _ in range(most + 3 * NODE):
                pipe.xadd(key, {"id": "x"})
            pipe.execute()
        await prefill.make_groups()
        for _ in range(2):
            await client.submit(prompt="hi")
        job = await prefill.claim(*await prefill.read(1, 1))
        assert job is not None
        assert await prefill.fail(job, "boom") == "dead"
        job = await prefill.claim(*await prefill.read(1, 1))
        assert job is not None
        assert await client.cancel(job.id) is True
        for key, most in ((KEYS.dead, DEAD_LETTERS), (KEYS.cancels, CANCELS)):
            assert most <= sync.xlen(key) <= most + NODE
        end_all(sync)
    for used in (client, redis_, waiting):
        await used.aclose()


# ---- names of workers ----


@pytest.fixture
async def clients(any_server: Server) -> AsyncIterator[tuple[connection.AsyncRedis, connection.AsyncRedis]]:
    made = (connection.command(any_server.url), connection.blocking(any_server.url))
    yield made
    for client in made:
        await client.aclose()
    with any_server.client() as sync:
        end_all(sync)


def queue(clients: tuple[connection.AsyncRedis, connection.AsyncRedis], owner: str) -> Queue:
    return Queue(*clients, keys=KEYS, stage="prefill", owner=owner, lease_seconds=0.0, max_attempts=500, result_ttl=60)


async def consumers(clients: tuple[connection.AsyncRedis, connection.AsyncRedis]) -> int:
    return max([len(await clients[0].xinfo_consumers(KEYS.prefill(lane), GROUP)) for lane in LANES])


@pytest.mark.parametrize("any_server", ["valkey9", "redis6"], indirect=True)
async def test_two_hundred_killed_workers_leave_few_consumers_and_no_work_behind(
    any_server: Server, clients: tuple[connection.AsyncRedis, connection.AsyncRedis]
) -> None:
    """Each reads, takes over the only request, and vanishes; the next one forgets those before it."""
    async with AsyncClient(RedisSettings(redis_url=any_server.url)) as client:
        await client.submit(prompt="hi", id="a")
    await queue(clients, "first").make_groups()
    most = 0
    for n in range(200):
        mortal = queue(clients, f"w{n}")
        entries = await mortal.read(1, 0.001) if n == 0 else await mortal.reclaim(1)
        job = await mortal.claim(*entries)
        assert job is not None  # sweeping never drops what a dead worker had
        assert (job.id, job.attempt) == ("a", n + 1)
        if n % 10 == 9:
            await asyncio.sleep(0.03)
            await mortal.sweep(idle=0.02)
        most = max(most, await consumers(clients))
    assert 1 < most <= 12
    names = [c["name"] for c in await clients[0].xinfo_consumers(KEYS.prefill("normal"), GROUP)]
    assert names == [b"w199"]


async def test_a_sweep_is_bounded_and_spares_the_living(
    clients: tuple[connection.AsyncRedis, connection.AsyncRedis],
) -> None:
    await queue(clients, "first").make_groups()
    for n in range(30):
        await clients[0].xgroup_createconsumer(KEYS.prefill("normal"), GROUP, f"gone{n}")
    await asyncio.sleep(0.3)
    await clients[0].xgroup_createconsumer(KEYS.prefill("normal"), GROUP, "alive")
    sweeper = queue(clients, "sweeper")
    assert [await sweeper.sweep(idle=0.2, most=20) for _ in range(3)] == [20, 10, 0]
    assert [c["name"] for c in await clients[0].xinfo_consumers(KEYS.prefill("normal"), GROUP)] == [b"alive"]


async def test_drained_workers_leave_no_trace(server: Server) -> None:
    async with LocalPool(server) as pool:
        for n in range(3):
            assert (await ask(pool, f"no {n}", 3)).text == expected(f"no {n}".encode(), 3)
            old = [group[-1] for group in pool.workers.values()]
            for stage in pool.workers:
                pool.add(stage)
            await asyncio.gather(*(worker.stop() for worker in old))
        with server.client() as client:
            for stream in (*map(KEYS.prefill, LANES), KEYS.decode):
                assert len(client.xinfo_consumers(stream, GROUP)) <= 1
            async with asyncio.timeout(10):
                while client.zcard(KEYS.workers) != 2:
                    await asyncio.sleep(0.02)
            assert len(list(client.scan_iter(KEYS.worker("*")))) == 2


async def test_the_heartbeat_of_a_living_worker_removes_the_long_dead(server: Server) -> None:
    with server.client() as client:
        now = client.time()[0] * 1000
        for name, age in (("dead", STALE_MS + 1000), ("silent", STALE_MS - 30_000)):
            client.zadd(KEYS.workers, {name: now - age})
        async with LocalPool(server, decode=0) as pool:
            async with asyncio.timeout(10):
                while client.zscore(KEYS.workers, "dead") is not None:
                    await asyncio.sleep(0.02)
            assert {m.decode() for m in client.zrange(KEYS.workers, 0, -1)} == {
                "silent", pool.workers["prefill"][0].worker.name,
            }  # fmt: skip


async def test_a_killed_process_is_forgotten_by_its_successors(server: Server) -> None:
    """kill -9 of a real worker: its heartbeat has a TTL, and its successors remove its name."""
    with Programs(server, engine="scripted", lease_seconds=1.0) as programs, server.client() as client:

        async def until(count: int) -> None:
            async with asyncio.timeout(20):
                while len(list(client.scan_iter(KEYS.worker("*")))) != count:
                    await asyncio.sleep(0.05)

        victim = programs.start("decode")
        await until(1)
        victim.kill()
        victim.wait()
        (name,) = client.zrange(KEYS.workers, 0, -1)
        assert 0 < client.pttl(KEYS.worker(name.decode())) <= 10_000
        client.pexpire(KEYS.worker(name.decode()), 1)
        client.zadd(KEYS.workers, {name: 1})
        programs.start("decode")
        async with asyncio.timeout(20):
            while client.zscore(KEYS.workers, name) is not None:
                await asyncio.sleep(0.05)
        await until(1)


# ---- the leak check itself ----


def test_the_leak_check_sees_every_kind_of_leak(server: Server) -> None:
    with server.client() as client:
        wrong = {
            KEYS.request("a"): lambda k: client.hset(k, "x", 1),
            KEYS.out("a"): lambda k: client.xadd(k, {"e": ""}),
            KEYS.prefill("high"): lambda k: client.xadd(k, {"id": "a"}),
            KEYS.decode: lambda k: orphaned(client, k),
            KEYS.load: lambda k: client.hset(k, "queued", -3),
            KEYS.worker("w"): lambda k: client.set(k, ""),
            KEYS.took("w"): lambda k: client.set(k, ""),
            KEYS.wake("r"): lambda k: client.xadd(k, {"w": "1"}),
            keys.tail("a", 1): lambda k: client.set(k, ""),
            keys.BlockKeys(bytes(32)).index: lambda k: client.zadd(k, {"h": 1}),
            KEYS.dead: lambda k: fill(client, k, DEAD_LETTERS + NODE + 1),
            "{pdq:default}:unheard-of": lambda k: client.set(k, ""),
        }
        for key, make in wrong.items():
            make(key)
            assert [text.split(" ")[0] for text in leaks(client)] == [key]
            client.delete(key)
        assert leaks(client) == []


def orphaned(client: redis.Redis, stream: str) -> None:
    """An entry deleted without its ack."""
    client.xgroup_create(stream, GROUP, id="0", mkstream=True)
    entry = client.xadd(stream, {"id": "a"})
    client.xreadgroup(GROUP, "w", {stream: ">"})
    client.xdel(stream, entry)


def fill(client: redis.Redis, stream: str, count: int) -> None:
    pipe = client.pipeline(transaction=False)
    for _ in range(count):
        pipe.xadd(stream, {"id": "x"})
    pipe.execute()


@pytest.mark.leaves_keys("shows that the marker works")
async def test_a_test_may_leave_keys_if_it_says_so(server: Server) -> None:
    async with AsyncClient(RedisSettings(redis_url=server.url)) as client:
        await client.submit(prompt="hi")
    with server.client() as sync:
        assert leaks(sync)
