"""Connections that are cut, half closed, slow or silent, and answers that get lost after the deed was done.

A pool of workers in the test's own process, all of whose connections go through a proxy.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest

from pdq import connection, queue, replies, scripts
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import RequestCancelled, Unavailable
from pdq.keys import GROUP
from tests.faults.audit import expected, reply
from tests.faults.pool import submit, until
from tests.faults.proxy import Proxy
from tests.faults.work import RIGHT, begin, healed, reading, text, texts
from tests.pipeline.local import LocalPool
from tests.servers import Server

LEASE = 0.5
OPTIONS = {
    "engine": "scripted:step_ms=5,prefill_us=1000",
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


@pytest.fixture
async def behind(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Behind]:
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.2)
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)  # the workers end sooner
    with server.client() as direct:
        for script in vars(scripts).values():
            if isinstance(script, scripts.Script):  # else the lost reply is one that asks for the script's text
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


@pytest.mark.parametrize("fault", [cut, half_close, refuse, delay])
async def test_bad_connections_cost_no_request(behind: Behind, fault: Callable[[Proxy], Awaitable[None]]) -> None:
    readers = reading(await begin(behind.client))
    await fault(behind.proxy)
    assert await texts(readers) == RIGHT


# ---- black holes: with all timeouts a tenth of the real ones ----


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (connection, queue, replies):
        monkeypatch.setattr(module, "BLOCK_SECONDS", connection.BLOCK_SECONDS if module is not connection else 0.5)
    for module, names in ((connection, ("BLOCK_MARGIN", "COMMAND_TIMEOUT", "LEASE_TIMEOUT", "BULK_TIMEOUT", "POOL_WAIT")), (replies, ("OUTAGE_SECONDS", "SHORT_SECONDS"))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name) / 10)


async def test_a_black_hole_of_twelve_seconds_costs_no_request(impatient: None, behind: Behind) -> None:
    readers = reading(await begin(behind.client))
    behind.proxy.hole()
    await asyncio.sleep(1.2)
    behind.proxy.hole(False)
    assert await texts(readers) == RIGHT


async def test_a_black_hole_for_good_is_told_to_readers_and_submitters_in_time(impatient: None, behind: Behind) -> None:
    readers = reading(await begin(behind.client))
    late = await submit(behind.client, "z" * 100, 5, timeout=0.5)
    behind.proxy.hole()
    fault, accepted = time.monotonic(), behind.proxy.accepted
    with pytest.raises(Unavailable):
        await submit(behind.client, "refused", 5)
    for reader in readers.values():
        with pytest.raises(Unavailable, match="been away"):
            await reader
    assert time.monotonic() - fault < LEASE + 5
    assert behind.proxy.accepted - accepted < 200
    behind.proxy.hole(False)


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


@pytest.mark.parametrize("what", BY_ONE_REQUEST)
async def test_a_lost_reply_repeats_nothing_and_loses_nothing(behind: Behind, what: str) -> None:
    prompt = "s" * 400
    lost = behind.proxy.drop_reply(*BY_ONE_REQUEST[what])
    handle = await submit(behind.client, prompt, 40)
    assert await text(handle) == expected(prompt.encode(), 40)
    assert lost.is_set()
    assert behind.faults(handle.id) == ()
    assert behind.claims() == 2  # one job a stage


async def test_a_lost_reply_to_a_cancel_ends_the_request_once(behind: Behind) -> None:
    handles = await begin(behind.client)
    readers = reading(handles)
    for name, where in (("decoding", b"running"), ("queued", b"cancelled")):
        lost = behind.proxy.drop_reply(scripts.cancel.sha.encode(), where)
        await handles[name].cancel()
        assert lost.is_set()
        with pytest.raises(RequestCancelled):
            await readers.pop(name)
        assert behind.faults(handles[name].id) == ()
    assert await texts(readers) == {name: RIGHT[name] for name in readers}


async def test_a_lost_reply_to_a_requeue_makes_the_kv_again_once(behind: Behind) -> None:
    readers = reading(handles := await begin(behind.client))
    lost = behind.proxy.drop_reply(scripts.requeue.sha.encode(), b"ok")
    with behind.server.client() as direct:
        direct.delete(*direct.scan_iter("pdq:kv:*"))
    assert await texts(readers) == RIGHT
    assert lost.is_set()
    with behind.server.client() as direct:
        assert direct.hget(behind.client.keys.request(handles["between"].id), "requeues") == b"1"


async def test_a_lost_reply_to_a_release_gives_the_job_back_once(behind: Behind) -> None:
    readers = reading(await begin(behind.client))
    lost = behind.proxy.drop_reply(scripts.release.sha.encode(), b"ok")
    leaving = behind.pool.workers["decode"].pop()
    object.__setattr__(leaving.settings, "drain_seconds", 0.0)
    await leaving.stop()
    assert lost.is_set()
    behind.pool.add("decode")
    assert await texts(readers) == RIGHT


async def test_a_lost_reply_to_a_failure_charges_one_attempt(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = behind.pool.workers["decode"][0].engine
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


async def test_a_submit_that_was_taken_but_not_confirmed_is_the_same_request_when_it_is_sent_again(behind: Behind) -> None:
    await behind.client.ping()
    lost = behind.proxy.drop_reply(scripts.submit.sha.encode(), b"created")
    behind.proxy.refuse()
    trying = asyncio.create_task(submit(behind.client, "only once", 20, id="mine"))
    with pytest.raises(Unavailable):
        await trying
    assert lost.is_set()
    await behind.proxy.listen()
    again = await submit(behind.client, "only once", 20, id="mine")
    assert await text(again) == expected(b"only once", 20)
    assert behind.faults("mine") == ()
    with behind.server.client() as direct:
        assert len(direct.keys(behind.client.keys.request("*"))) == 1


# ---- the client ----


async def test_commands_given_up_in_the_middle_leave_no_reply_for_the_next_one(behind: Behind) -> None:
    behind.proxy.delay = 0.002
    redis, rng = behind.client._redis, random.Random(3)

    async def echo(i: int) -> None:
        assert await redis.echo(f"{i}") == f"{i}".encode()
        pipe = redis.pipeline(transaction=False)
        for k in range(3):
            pipe.echo(f"{i}-{k}")
        assert await pipe.execute() == [f"{i}-{k}".encode() for k in range(3)]

    readers = reading(await begin(behind.client))
    for _ in range(5):
        tasks = [asyncio.create_task(echo(i)) for i in range(200)]
        for _ in range(40):
            await asyncio.sleep(rng.random() * 0.002)
            for task in rng.sample(tasks, 4):
                task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(e) for e in ends} == {type(None), asyncio.CancelledError}
    await asyncio.gather(*map(echo, range(100)))
    behind.proxy.delay = 0.0
    assert await texts(readers) == RIGHT


async def test_five_hundred_submits_at_once_are_all_taken(server: Server) -> None:
    async with AsyncClient(RedisSettings(redis_url=server.url)) as client:
        handles = await asyncio.gather(*(submit(client, f"{i}", 5) for i in range(500)))
        with server.client() as direct:
            assert direct.xlen(client.keys.prefill("normal")) == len({h.id for h in handles}) == 500
        assert all(await asyncio.gather(*(h.cancel() for h in handles)))
