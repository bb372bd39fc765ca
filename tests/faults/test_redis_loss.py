"""Redis restarts, forgets, refuses, pauses or fills up under running workers. No process of pdq is ever restarted.

One pool of real worker processes serves all these tests, behind a proxy that counts connections. When a fault comes,
one request decodes, one waits between the stages, one is in prefill and one is queued.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio
import redis

from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import Unavailable
from tests.faults.pool import LEASE, submit, until
from tests.faults.programs import Program, Programs
from tests.faults.proxy import Proxy
from tests.faults.work import RIGHT, begin, healed, reading, texts
from tests.servers import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = {
    "engine": "scripted:step_ms=5,prefill_us=1000",
    "lease_seconds": LEASE, "block_size": 16, "chunk_tokens": 64, "max_batch": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Pool:
    server: Server
    proxy: Proxy
    client: AsyncClient
    workers: list[Program]

    def restart(self, number: signal.Signals, *, keep: bool) -> None:
        process = self.server._process
        assert process is not None
        process.send_signal(number)
        process.wait()
        if not keep:
            shutil.rmtree(self.server.folder / "appendonlydir")
        self.server.start()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Pool]:
    server = Server("valkey9", "--appendfsync", "always", save=True)
    async with Proxy(server.port) as proxy, AsyncClient(RedisSettings(redis_url=proxy.url)) as client:
        programs = Programs(server, **SETTINGS, redis_url=proxy.url)
        try:
            workers = [programs.start(stage) for stage in ("prefill", "decode")]
            await asyncio.to_thread(programs.wait, *workers)
            yield Pool(server, proxy, client, workers)
            print(programs.report())
        finally:
            await asyncio.to_thread(programs.close)
    server.close()


@pytest_asyncio.fixture(loop_scope="module")
async def pool(shared: Pool, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.3)
    yield shared
    await healed(shared.server, shared.client)
    assert [worker.poll() for worker in shared.workers] == [None, None]


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
async def test_a_restart_with_its_log_costs_no_accepted_request(pool: Pool, how: signal.Signals) -> None:
    readers = reading(await begin(pool.client))
    await asyncio.to_thread(pool.restart, how, keep=True)
    assert await texts(readers) == RIGHT


@pytest.mark.parametrize("how", ["restarted empty", pytest.param("flushed", marks=pytest.mark.slow)])
async def test_a_redis_that_forgot_everything_is_told_to_every_reader_soon(pool: Pool, how: str) -> None:
    readers = reading(await begin(pool.client))
    if how == "flushed":
        with pool.server.client() as direct:
            direct.flushall()
    else:
        await asyncio.to_thread(pool.restart, signal.SIGKILL, keep=False)
    fault = time.monotonic()
    for reader in readers.values():
        with pytest.raises(Unavailable, match="lost the request"):
            await reader
    assert time.monotonic() - fault < LEASE + 5
    await healed(pool.server, pool.client)
    with pool.server.client() as direct:  # and nobody asks in vain and in haste for what is not there
        before = direct.info("stats")["total_commands_processed"]
        await asyncio.sleep(1)
        assert direct.info("stats")["total_commands_processed"] - before < 200


async def test_twenty_killed_connections_in_a_row_stop_nobody_from_consuming(pool: Pool) -> None:
    readers = reading(await begin(pool.client))
    with pool.server.client() as direct:
        killed = 0
        for _ in range(20):
            killed += direct.execute_command("CLIENT KILL TYPE normal")
            await asyncio.sleep(0.05)
        assert killed > 40
    assert await texts(readers) == RIGHT


async def test_a_read_only_redis_refuses_submits_and_costs_no_accepted_request(pool: Pool) -> None:
    readers = reading(await begin(pool.client))
    with pool.server.client() as direct:
        direct.replicaof("127.0.0.1", 1)  # no server is there, so it keeps its data
        with pytest.raises(Unavailable, match="read only replica"):
            await submit(pool.client, "refused", 5)
        await asyncio.sleep(LEASE)
        direct.replicaof("NO", "ONE")
    assert await texts(readers) == RIGHT


@pytest.mark.slow
async def test_a_failover_behind_one_address_is_followed_by_everybody(pool: Pool) -> None:
    """The old master stays up as a replica, so that connections to it stay too, and are of no use for writing."""
    first, second = pool.server, Server("valkey9")
    try:
        with first.client() as one, second.client() as two:
            for old, new, now in ((one, two, second), (two, one, first)):
                old.config_set("repl-diskless-sync-delay", 0)
                new.replicaof("127.0.0.1", old.connection_pool.connection_kwargs["port"])
                await until(lambda new=new: new.info("replication")["master_link_status"] == "up")
                readers = reading(await begin(pool.client))
                old.execute_command("FAILOVER", "TO", "127.0.0.1", now.port)
                await until(lambda old=old: old.info("replication")["role"] == "slave")
                pool.proxy.target = now.port
                assert await texts(readers) == RIGHT
    finally:
        second.close()
        with first.client() as one:
            one.replicaof("NO", "ONE")


async def test_a_pause_longer_than_the_lease_costs_no_accepted_request(pool: Pool) -> None:
    readers = reading(await begin(pool.client))
    with pool.server.client() as direct:
        direct.client_pause(int(2000 * LEASE))
    assert await texts(readers) == RIGHT


@pytest.mark.slow  # measures haste, which needs a quiet machine
async def test_an_absent_redis_is_waited_for_without_haste_and_told_to_readers_in_the_end(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.replies.OUTAGE_SECONDS", 1.0)
    readers = reading(await begin(pool.client))
    down, before = time.monotonic(), pool.proxy.accepted
    pool.server.kill()
    for reader in readers.values():
        with pytest.raises(Unavailable, match="been away for 1 s"):
            await reader
    assert pool.proxy.accepted - before < 100 * (time.monotonic() - down)
    await asyncio.to_thread(pool.server.start)
    await healed(pool.server, pool.client)
    readers = reading(await begin(pool.client))
    await asyncio.to_thread(pool.restart, signal.SIGKILL, keep=True)  # the long outage does not count any more
    assert await texts(readers) == RIGHT


@contextmanager
def full(server: Server) -> Iterator[None]:
    """A Redis far over its memory limit, which may evict nothing."""
    with server.client() as direct:
        direct.config_set("maxmemory", 1)
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            direct.set("junk", "x")
        try:
            yield
        finally:
            direct.config_set("maxmemory", 0)


async def test_a_full_redis_refuses_submits_while_decode_goes_on(pool: Pool) -> None:
    readers = reading(await begin(pool.client))
    with full(pool.server):
        with pytest.raises(Unavailable, match="maxmemory"):
            await submit(pool.client, "refused", 5)
        assert await readers.pop("decoding") == RIGHT["decoding"]
        assert await readers.pop("between") == RIGHT["between"]
    assert await texts(readers) == {name: RIGHT[name] for name in readers}
