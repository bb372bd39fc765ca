"""Connections that are cut, half closed, slow or silent, and answers that get lost after the deed was done.

A pool of workers in the test's own process, all of whose connections go through a proxy.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from redis.exceptions import ReadOnlyError

from pdq import connection, scripts
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import DeadlineExceeded, RequestCancelled, RequestFailed, Unavailable
from pdq.gateway.pool import PoolView, Snapshot
from tests.faults.audit import expected, reply
from tests.faults.pool import submit
from tests.faults.proxy import Proxy
from tests.faults.work import RIGHT, begin, healed, reading, text, texts
from tests.pipeline.local import LocalPool
from tests.servers import Server

SLOW = pytest.mark.slow
LEASE = 0.5
OPTIONS = {
    "engine": "scripted:step_ms=3,prefill_us=500",
    "lease_seconds": LEASE, "decode_max_batch": 1, "prefill_chunk_tokens": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Behind:
    """A pool behind a proxy."""

    server: Server
    proxy: Proxy
    pool: LocalPool

    @property
    def client(self) -> AsyncClient:
        return self.pool.client

    def claims(self) -> int:
        return sum(w.worker.counters["claimed"] for group in self.pool.workers.values() for w in group)

    def faults(self, request_id: str) -> tuple[str, ...]:
        with self.server.client() as direct:
            return reply(direct, self.client.keys, request_id).faults

    def requests(self) -> int:
        with self.server.client() as direct:
            return len(direct.keys(self.client.keys.request("*")))


@pytest.fixture
async def behind(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Behind]:
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.2)
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)  # the workers end sooner
    with server.client() as direct:
        for script in vars(scripts).values():
            if isinstance(script, scripts.Script):  # else a lost reply may be one that asks for the script's text
                direct.script_load(script.text)
    async with Proxy(server.port) as proxy, LocalPool(proxy, **OPTIONS) as pool:  # type: ignore[arg-type]
        yield Behind(server, proxy, pool)
        await proxy.listen()
        proxy.hole(False)
        await healed(server, pool.client)
        assert not any(w.task.done() for group in pool.workers.values() for w in group)


# ---- connections ----


async def cut(proxy: Proxy) -> None:
    for _ in range(10):
        await asyncio.sleep(0.05)
        proxy.cut()


async def half_close(proxy: Proxy) -> None:
    for _ in range(5):
        await asyncio.sleep(0.1)
        proxy.half_close()


async def refuse(proxy: Proxy) -> None:
    proxy.refuse()
    proxy.cut()
    await asyncio.sleep(2 * LEASE)
    await proxy.listen()


async def delay(proxy: Proxy) -> None:
    proxy.delay = 0.05
    await asyncio.sleep(2 * LEASE)
    proxy.delay = 0.0


@pytest.mark.parametrize("fault", [cut, *(pytest.param(f, marks=SLOW) for f in (half_close, refuse, delay))])
async def test_bad_connections_cost_no_request(behind: Behind, fault: Callable[[Proxy], Awaitable[None]]) -> None:
    readers = reading(await begin(behind.client))
    await fault(behind.proxy)
    assert await texts(readers) == RIGHT


async def test_writes_that_a_replica_refuses_are_sent_to_the_new_master_next(server: Server) -> None:
    """Several in one round trip, and alone; the old master is up, so nothing else would end the connection to it."""
    replica = Server("valkey9")
    with replica.client() as direct:
        direct.replicaof("127.0.0.1", 1)
    async with Proxy(replica.port) as proxy:
        client = connection.command(proxy.url)
        call = scripts.append(["request", "out"], 1, "nobody", 0, 1, b"", 1)
        with pytest.raises(ReadOnlyError):
            await scripts.run_many(client, [call])
        proxy.target = server.port
        assert await scripts.run_many(client, [call]) == [b"lost"]
        proxy.target = replica.port
        proxy.cut()
        with pytest.raises(ReadOnlyError):
            await call.run(client)
        proxy.target = server.port
        assert await call.run(client) == b"lost"
        await client.aclose()
    replica.close()


async def test_a_pool_works_over_a_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)
    server = Server("valkey9", "--unixsocket", "valkey.sock")

    class Socket:
        url = f"unix://{server.folder}/valkey.sock"

    async with LocalPool(Socket, **OPTIONS) as pool:  # type: ignore[arg-type]
        await healed(server, pool.client)
    server.close()


# ---- black holes, with all timeouts a tenth of the real ones ----

TIMEOUTS = (
    "pdq.connection.BLOCK_SECONDS", "pdq.queue.BLOCK_SECONDS", "pdq.replies.BLOCK_SECONDS",
    "pdq.connection.BLOCK_MARGIN", "pdq.connection.COMMAND_TIMEOUT", "pdq.connection.LEASE_TIMEOUT",
    "pdq.connection.BULK_TIMEOUT", "pdq.connection.POOL_WAIT", "pdq.replies.OUTAGE_SECONDS",
    "pdq.replies.SHORT_SECONDS", "pdq.client.OVERDUE_GRACE_MS",
)  # fmt: skip


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TIMEOUTS:
        value = pytest.importorskip(name.rpartition(".")[0]).__dict__[name.rpartition(".")[2]]
        monkeypatch.setattr(name, type(value)(value / 10))


@pytest.mark.usefixtures("impatient")
async def test_a_black_hole_of_twelve_seconds_costs_no_request(behind: Behind) -> None:
    readers = reading(await begin(behind.client))
    behind.proxy.hole()
    await asyncio.sleep(1.2)
    behind.proxy.hole(False)
    assert await texts(readers) == RIGHT


@pytest.mark.slow  # measures haste, which needs a quiet machine
@pytest.mark.usefixtures("impatient")
async def test_a_black_hole_for_good_is_told_in_time_and_without_haste(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = reading(await begin(behind.client))
    urgent = await submit(behind.client, "urgent, and not begun", 5, timeout=0.3)
    overdue = asyncio.create_task(text(urgent))
    behind.proxy.hole()
    fault, accepted = time.monotonic(), behind.proxy.accepted
    with pytest.raises(DeadlineExceeded, match="Redis does not answer"):
        await overdue
    with pytest.raises(Unavailable):
        await submit(behind.client, "refused", 5)
    for reader in readers.values():
        with pytest.raises(Unavailable, match="been away"):
            await reader
    assert time.monotonic() - fault < LEASE + 5
    assert behind.proxy.accepted - accepted < 200
    behind.proxy.hole(False)
    await a_short_outage_does_not_continue_an_old_one(behind, monkeypatch)


async def a_short_outage_does_not_continue_an_old_one(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.replies.OUTAGE_SECONDS", 15.0)
    hub = behind.client.hub
    assert hub._task is not None
    await hub._task  # nobody reads, so nobody sees the end of the outage either
    hub._outage = time.monotonic() - 60
    handle = await submit(behind.client, "afterwards", 20)
    behind.proxy.refuse()
    behind.proxy.cut()
    reader = asyncio.create_task(text(handle))
    await asyncio.sleep(0.5)
    await behind.proxy.listen()
    assert await reader == expected(b"afterwards", 20)


async def test_the_gateways_view_of_the_pool_is_back_soon_after_a_black_hole(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.gateway.pool.WAIT_SECONDS", 0.1)
    monkeypatch.setattr("pdq.gateway.pool.FRESH_SECONDS", 0.0)
    async with Proxy(server.port) as proxy, AsyncClient(RedisSettings(redis_url=proxy.url)) as client:
        view = PoolView(client)
        assert await view.look("m") == Snapshot()
        proxy.hole()
        with pytest.raises(Unavailable, match="did not answer within"):
            await view.look("m")
        proxy.hole(False)
        async with asyncio.timeout(connection.COMMAND_TIMEOUT / 2):  # sooner than the lost question would be given up
            while True:
                with suppress(Unavailable):
                    assert await view.look("m") == Snapshot()
                    break
        await view.aclose()


# ---- lost replies ----

BY_ONE_REQUEST = {
    "submit": (scripts.submit.sha.encode(), b"created"),
    "delivery": (b"XREADGROUP", b"id"),
    "claim": (scripts.claim.sha.encode(), b"ok"),
    "append": (scripts.append.sha.encode(), b"ok"),
    "check": (scripts.check.sha.encode(), b""),
    "renew": (scripts.renew.sha.encode(), b"ok"),
    "handoff": (scripts.handoff.sha.encode(), b"ok"),
    "finish": (scripts.finish.sha.encode(), b"ok"),
    "blocks": (b"SET", b"OK"),
}
LESS = ("check", "renew", "blocks")


@pytest.mark.parametrize("what", [pytest.param(w, marks=SLOW if w in LESS else ()) for w in BY_ONE_REQUEST])
async def test_a_lost_reply_repeats_nothing_and_loses_nothing(behind: Behind, what: str) -> None:
    prompt = "s" * 400
    lost = behind.proxy.drop_reply(*BY_ONE_REQUEST[what])
    handle = await submit(behind.client, prompt, 40)
    assert await text(handle) == expected(prompt.encode(), 40)
    async with asyncio.timeout(10):  # the end may be read before its writer's answer is lost
        await lost.wait()
    assert behind.faults(handle.id) == ()
    assert (behind.requests(), behind.claims()) == (1, 2)  # one job a stage
    with behind.server.client() as direct:
        assert direct.hget(behind.client.keys.request(handle.id), "attempt") == b"2"


async def test_a_lost_reply_to_a_cancel_ends_the_request_once(behind: Behind) -> None:
    handles = await begin(behind.client)
    readers = reading(handles)
    for name, where in (("between", b"cancelled"), ("decoding", b"running")):
        lost = behind.proxy.drop_reply(scripts.cancel.sha.encode(), where)
        assert await handles[name].cancel() is True
        assert lost.is_set()
        with pytest.raises(RequestCancelled):
            await readers.pop(name)
        assert behind.faults(handles[name].id) == ()
    assert await texts(readers) == {name: RIGHT[name] for name in readers}


async def test_a_lost_reply_to_a_requeue_makes_the_kv_again_once(behind: Behind) -> None:
    handles = await begin(behind.client)
    readers = reading(handles)
    lost = behind.proxy.drop_reply(scripts.requeue.sha.encode(), b"ok")
    with behind.server.client() as direct:
        direct.delete(*direct.scan_iter("pdq:kv:*"))
    assert await texts(readers) == RIGHT
    assert lost.is_set()
    with behind.server.client() as direct:
        assert direct.hget(behind.client.keys.request(handles["between"].id), "requeues") == b"1"


async def test_a_lost_reply_to_a_release_gives_the_job_back_once(behind: Behind) -> None:
    leaving = behind.pool.workers["decode"].pop()
    object.__setattr__(leaving.settings, "drain_seconds", 0.0)
    readers = reading(await begin(behind.client))
    lost = behind.proxy.drop_reply(scripts.release.sha.encode(), b"ok")
    await leaving.stop()
    assert lost.is_set()
    behind.pool.add("decode")
    assert await texts(readers) == RIGHT


async def test_a_lost_reply_to_a_failure_charges_one_attempt(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = behind.pool.workers["prefill"][0].engine
    forward = engine.forward
    broken = iter([True])

    def once(segments: list) -> list[int | None]:  # type: ignore[type-arg]
        if next(broken, False):
            raise RuntimeError("boom")
        return forward(segments)

    monkeypatch.setattr(engine, "forward", once)
    lost = behind.proxy.drop_reply(scripts.fail.sha.encode(), b"retry")
    handle = await submit(behind.client, "fails once", 20)
    assert await text(handle) == expected(b"fails once", 20)
    assert lost.is_set()
    assert behind.claims() == 3


async def test_a_submit_that_was_taken_but_never_confirmed_may_be_sent_again(behind: Behind) -> None:
    await behind.client.ping()  # so that it has a connection
    lost = behind.proxy.drop_reply(scripts.submit.sha.encode(), b"created")
    behind.proxy.refuse()
    with pytest.raises(Unavailable):
        await submit(behind.client, "only once", 20, id="mine")
    assert lost.is_set()
    await behind.proxy.listen()
    again = await submit(behind.client, "only once", 20, id="mine")
    assert await text(again) == expected(b"only once", 20)
    assert behind.faults("mine") == ()
    assert behind.requests() == 1


# ---- the client ----


async def test_commands_given_up_in_the_middle_leave_no_reply_for_the_next_one(behind: Behind) -> None:
    behind.proxy.delay = 0.002
    redis, rng = connection.command(behind.proxy.url), random.Random(3)

    async def echo(i: int) -> None:
        assert await redis.echo(f"{i}") == f"{i}".encode()
        pipe = redis.pipeline(transaction=False)
        for k in range(3):
            pipe.echo(f"{i}-{k}")
        assert await pipe.execute() == [f"{i}-{k}".encode() for k in range(3)]

    readers = reading(await begin(behind.client))
    for _ in range(3):
        tasks = [asyncio.create_task(echo(i)) for i in range(200)]
        for _ in range(40):
            await asyncio.sleep(rng.random() * 0.002)
            for task in rng.sample(tasks, 4):
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(e) for e in ends} == {type(None), asyncio.CancelledError}
    await asyncio.gather(*map(echo, range(100)))
    assert not redis.connection_pool._in_use_connections  # nor is a connection lost to the pool
    await redis.aclose()
    behind.proxy.delay = 0.0
    assert await texts(readers) == RIGHT


async def test_a_cancel_in_any_moment_of_a_command_is_heard(server: Server) -> None:
    """A loop that waits for Redis must end with its worker, wherever in a read the cancel finds it."""
    client = connection.blocking(server.url)

    async def listen() -> None:
        while True:
            await client.xread({"nothing": "$"}, block=20)

    for moment in range(40):
        await client.ping()  # so that it has a connection, and the moments are always the same
        task = asyncio.create_task(listen())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled(), f"not after {moment} turns of the loop"
    await client.aclose()


async def test_a_bug_in_the_reader_of_replies_leaves_nobody_waiting(
    behind: Behind, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = behind.client.hub
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_deliver", lambda *_: 1 / 0)
        with pytest.raises(RequestFailed, match="cannot be read"):
            await text(await submit(behind.client, "unread", 20))
    assert "the reply reader failed" in caplog.text


async def test_five_hundred_submits_at_once_are_all_taken(server: Server) -> None:
    async with AsyncClient(RedisSettings(redis_url=server.url)) as client:
        handles = await asyncio.gather(*(submit(client, f"{i}", 5) for i in range(500)))
        with server.client() as direct:
            assert direct.xlen(client.keys.prefill("normal")) == len({h.id for h in handles}) == 500
        assert all(await asyncio.gather(*(h.cancel() for h in handles)))
