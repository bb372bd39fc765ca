"""SIGTERM: a rolling restart under load costs no request anything, not even an attempt."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import aiohttp
import pytest

from pdq.client import AsyncClient
from tests.faults.audit import expected
from tests.faults.http_client import stream
from tests.faults.pool import Pool, read, submit, text_of, until
from tests.pipeline.local import LocalPool
from tests.servers import Server

COUNT = 30


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
            try:
                url = self.pool.current["gateway"].url
                return (await stream(session, url, prompt, prompt=prompt, max_tokens=COUNT))[1]
            except aiohttp.ClientConnectorError:  # it went between the choice and the connection
                continue
            except aiohttp.ClientError:
                self.broken += 1

    async def more(self) -> None:
        """Wait until every client has been served again."""
        goal = self.served + 6
        await until(lambda: self.served >= goal)


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool(
        "gateway", "prefill", "decode",
        prefill_engine="scripted:step_ms=20", prefill_chunk_tokens=8, decode_engine="scripted:step_ms=10",
    )  # fmt: skip
    try:
        yield pool
    finally:
        pool.close()


async def roll(pool: Pool, load: Load, **settings: object) -> list[float]:
    """Replace every process in turn, the new one first; the seconds each took to end, with exit code 0."""
    took = []
    for kind in ("gateway", "prefill", "decode"):
        old = pool.current[kind]
        new = pool.start(kind, **settings)
        await asyncio.to_thread(pool.programs.wait, new)
        pool.current[kind] = new
        await load.more()
        started = time.monotonic()
        assert await asyncio.to_thread(old.end) == 0
        took.append(time.monotonic() - started)
        await load.more()
    return took


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


async def test_jobs_given_back_are_taken_at_once_and_in_the_stage_they_were_in(server: Server) -> None:
    async with LocalPool(server, drain_seconds=0.0, lease_seconds=60.0, engine="scripted:step_ms=50") as pool:
        handles = [await submit(pool.client, f"hello {i}", 40) for i in range(3)]
        await until(lambda: pool.workers["decode"][0].engine.forwards > 5)
        places = [await h.status() for h in handles]
        assert {p.stage for p in places} == {"decode"}
        await pool.workers["decode"][0].stop()
        assert [(p.stage, p.state) for p in [await h.status() for h in handles]] == [("decode", "queued")] * 3
        other = pool.add("decode")
        await until(lambda: other.engine.forwards > 0, 10)  # the lease of the old worker has far to go
        texts = [(await h.result(20)).text for h in handles]
        assert texts == [expected(f"hello {i}".encode(), 40) for i in range(3)]
        assert other.engine.computed < 3 * 40


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
