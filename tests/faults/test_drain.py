"""SIGTERM: a rolling restart under load costs no request anything, not even an attempt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import suppress

import aiohttp
import pytest

from pdq.client import AsyncClient
from pdq.config import RedisSettings
from tests.faults.audit import expected
from tests.faults.http_client import stream
from tests.faults.pool import Pool, read, submit, text_of, until
from tests.pipeline.local import LocalPool
from tests.servers import Server

COUNT = 30


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain waits for the read that is under way."""
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)


class Load:
    """Clients that ask all the time, half of them over HTTP. broken: streams that were cut off."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.over = False
        self.served = self.broken = 0
        self._numbers = itertools.count()

    async def sdk(self, client: AsyncClient) -> None:
        while not self.over:
            prompt = f"request {next(self._numbers)} over redis"
            assert text_of(await read(await submit(client, prompt, COUNT))) == expected(prompt.encode(), COUNT)
            self.served += 1

    async def http(self, session: aiohttp.ClientSession) -> None:
        while not self.over:
            prompt = f"request {next(self._numbers)} over http"
            assert await self._ask(session, prompt) == expected(prompt.encode(), COUNT)
            self.served += 1

    async def _ask(self, session: aiohttp.ClientSession, prompt: str) -> str:
        while True:
            url = self.pool.current["gateway"].url
            try:
                return (await stream(session, url, prompt, prompt=prompt, max_tokens=COUNT))[1]
            except aiohttp.ClientPayloadError:
                self.broken += 1
            except aiohttp.ClientError:  # refused: only by one that went between the choice and the answer
                if url == self.pool.current["gateway"].url:
                    raise

    async def more(self) -> None:
        """Wait until every client has been served again."""
        goal = self.served + 6
        await until(lambda: self.served >= goal)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(
        "gateway", "prefill", "decode",
        prefill_engine="scripted:step_ms=20", prefill_chunk_tokens=8, decode_engine="scripted:step_ms=10",
        lease_seconds=60.0,  # nothing here ends for a lease, neither waiting for one nor on a machine that stands still
    )  # fmt: skip
    try:
        yield pool
    finally:
        pool.close()


async def roll(pool: Pool, load: Load, **settings: object) -> None:
    """Replace every process in turn, the new one first."""
    for kind in ("gateway", "prefill", "decode"):
        old = pool.current[kind]
        new = pool.start(kind, **settings)
        await asyncio.to_thread(pool.programs.wait, new)
        pool.current[kind] = new
        assert await asyncio.to_thread(old.end) == 0
        await load.more()


async def test_a_rolling_restart_under_load_loses_nothing_and_charges_no_attempt(pool: Pool) -> None:
    async with pool.client() as client, aiohttp.ClientSession() as session:
        load = Load(pool)
        asking = [asyncio.create_task(load.sdk(client)) for _ in range(3)]
        asking += [asyncio.create_task(load.http(session)) for _ in range(3)]
        await roll(pool, load, drain_seconds=0)
        assert load.broken == 0
        # Those that run now have no time to finish what they have: it goes back to the queue, and streams are cut.
        await roll(pool, load)
        load.over = True
        await asyncio.gather(*asking)
        await pool.at_rest()
        assert pool.redis.xlen(pool.keys.dead) == 0
        found = [pool.redis.hmget(name, "reason", "tries") for name in pool.redis.scan_iter(pool.keys.request("*"))]
        assert found == [[b"length", b"1"]] * load.served


async def deaf(*_: object) -> None:
    """As a task in Python 3.11's wait_for, when what it waits for is done in the moment of the cancel."""
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    await asyncio.Event().wait()


async def test_a_cancel_that_gets_lost_does_not_keep_a_client_from_closing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.tasks.CANCEL_SECONDS", 0.05)
    client = AsyncClient(RedisSettings(redis_url=server.url))
    monkeypatch.setattr(client.hub, "_pump", deaf)
    await client.hub.subscribe("any")
    await asyncio.sleep(0)  # it listens
    closing = asyncio.create_task(client.aclose())
    ended, _ = await asyncio.wait({closing}, timeout=10)
    closing.cancel()
    assert ended == {closing}


async def test_a_cancel_that_gets_lost_does_not_keep_a_worker_from_ending(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.tasks.CANCEL_SECONDS", 0.05)
    async with LocalPool(server, decode=0) as pool:
        worker = pool.workers["prefill"][0]
        monkeypatch.setattr(worker.worker, "_cancels", deaf)
        with server.client() as client:
            await until(lambda: client.exists(pool.client.keys.prefill("normal")) == 1)
        await asyncio.wait_for(worker.stop(), 20)


class Exited(BaseException):
    pass


async def test_a_worker_whose_forward_never_returns_still_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr("pdq.worker.os._exit", leave)
    monkeypatch.setattr("pdq.worker.UNWIND_SECONDS", 0.2)
    options = {"drain_seconds": 0.0, "lease_seconds": 60.0}
    async with LocalPool(server, decode_engine="scripted:hang_on=33,hang_ms=3000", **options) as pool:
        handle = await submit(pool.client, "hang!", 9)
        hung = pool.workers["decode"][0]
        await until(lambda: hung.engine.forwards == 1)
        hung.worker.drain()
        with pytest.raises(Exited):
            await hung.task
        assert codes == [1]
        for client in (hung.worker._redis, hung.worker._waiting, hung.worker._hints):
            await client.aclose()
        pool.add("decode", engine="scripted")
        assert (await handle.result(20)).text == expected(b"hang!", 9)
        with server.client() as client:
            assert client.hget(pool.client.keys.request(handle.id), "tries") == b"1"
