"""A cancelled request gives back what it holds, wherever it is, and never looks like a finished one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from pdq import kv_transfer
from pdq.client import Handle
from pdq.errors import RequestCancelled
from pdq.kv_transfer import KVTransfer
from tests.faults.audit import reply
from tests.faults.pool import Pool, submit, until
from tests.hygiene import leaks
from tests.pipeline.local import LocalPool
from tests.servers import Server

MEMORY = 2**13  # of the decode worker's KV: 1024 tokens
STEP = 0.1


@pytest.fixture(autouse=True)
def short_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain waits for the read that is under way."""
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)


@asynccontextmanager
async def pool_of(server: Server, **options: object) -> AsyncIterator[LocalPool]:
    """Slow enough to be caught in every state; the lease is long, so that only a hint can be quick."""
    slow = f"scripted:step_ms={STEP * 1e3}"
    settings = {"prefill_engine": slow, "decode_engine": slow + ",load_ms=150", "prefill_chunk_tokens": 8}
    async with LocalPool(server, lease_seconds=60.0, decode_kv_memory=str(MEMORY), **settings | options) as pool:
        yield pool


class Watch:
    """A request, and what Redis says of it."""

    def __init__(self, pool: LocalPool, handle: Handle) -> None:
        self.pool = pool
        self.handle = handle
        self.keys = pool.client.keys

    async def at(self, stage: str, state: str, tokens: int = 0) -> None:
        async with asyncio.timeout(20):
            while True:
                now = await self.handle.status()
                if (now.stage, now.state) == (stage, state) and now.tokens >= tokens:
                    return
                assert now.stage != "done"
                await asyncio.sleep(0.005)

    async def cancelled(self) -> None:
        """Cancel it: its reader is told so, and the reply stream holds this one end."""
        assert await self.handle.cancel() is True
        with pytest.raises(RequestCancelled):
            await self.handle.result(20)
        with self.pool.server.client() as client:
            found = reply(client, self.keys, self.handle.id)
        assert found.faults == ()
        assert found.end is not None
        assert found.end.finish_reason == "cancelled"
        assert found.end.error is not None
        assert found.end.error.code == "cancelled"
        assert (await self.handle.status()).reason == "cancelled"


async def freed(pool: LocalPool, server: Server) -> None:
    """All engines are empty, and Redis holds nothing of the request but its reply."""
    with server.client() as client:
        await until(lambda: all(e.can_open(MEMORY // 8) for e in pool.engines))
        await until(lambda: not leaks(client), 10, lambda: leaks(client))
        await until(lambda: not client.keys("pdq:tail:*"))


async def test_cancelled_while_queued(server: Server) -> None:
    async with pool_of(server, prefill=0) as pool:
        watch = Watch(pool, await submit(pool.client, "hello", 20))
        await watch.cancelled()
        worker = pool.add("prefill")
        await freed(pool, server)
        assert worker.engine.forwards == 0


async def test_cancelled_while_prefilling_stops_after_a_chunk(server: Server) -> None:
    async with pool_of(server) as pool:
        watch = Watch(pool, await submit(pool.client, "x" * 400, 20))
        engine = pool.workers["prefill"][0].engine
        await until(lambda: engine.forwards == 2)
        await watch.cancelled()
        await freed(pool, server)
        assert engine.forwards <= 4


async def test_cancelled_while_it_is_handed_over(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with pool_of(server) as pool:
        transfer = KVTransfer.publish_tail

        async def publish(self: KVTransfer, key: str, *rest: Any) -> None:
            await transfer(self, key, *rest)
            with server.client() as client:
                assert client.exists(key)
            await handle.cancel()

        monkeypatch.setattr(kv_transfer, "SMALL", 0)  # else there is no tail in the store
        monkeypatch.setattr(KVTransfer, "publish_tail", publish)
        handle = await submit(pool.client, "hello", 20)
        with pytest.raises(RequestCancelled):
            await handle.result(20)
        await freed(pool, server)
        assert pool.workers["decode"][0].engine.forwards == 0


async def test_cancelled_between_the_stages(server: Server) -> None:
    async with pool_of(server, decode=0) as pool:
        watch = Watch(pool, await submit(pool.client, "hello", 20))
        await watch.at("decode", "queued")
        await watch.cancelled()
        worker = pool.add("decode")
        await freed(pool, server)
        assert worker.engine.forwards == 0


async def test_cancelled_while_loading(server: Server) -> None:
    async with pool_of(server) as pool:
        watch = Watch(pool, await submit(pool.client, "hello you", 20))
        await watch.at("decode", "running")
        engine = pool.workers["decode"][0].engine
        assert engine.forwards == 0
        await watch.cancelled()
        await freed(pool, server)
        assert engine.forwards <= 1


async def test_cancelled_while_waiting_for_a_slot(server: Server) -> None:
    async with pool_of(server) as pool:
        first = Watch(pool, await submit(pool.client, "a", 1000))
        await first.at("decode", "running", 3)
        second = Watch(pool, await submit(pool.client, "b", 1000))
        await second.at("decode", "running")
        await second.cancelled()
        assert (await first.handle.status()).state == "running"
        third = await submit(pool.client, "c", 4)  # fits beside the first, and nobody stands in its way
        assert len((await third.result(20)).token_ids) == 4
        await first.cancelled()
        await freed(pool, server)


@pytest.mark.parametrize("tokens", [1, 4])
async def test_cancelled_while_decoding_stops_after_a_step(server: Server, tokens: int) -> None:
    async with pool_of(server) as pool:
        watch = Watch(pool, await submit(pool.client, "hello", 500))
        await watch.at("decode", "running", 1 + tokens)
        engine = pool.workers["decode"][0].engine
        steps = engine.forwards
        await watch.cancelled()
        await freed(pool, server)
        assert engine.forwards <= steps + 2


async def test_a_cancel_that_comes_too_late_changes_nothing(server: Server) -> None:
    async with LocalPool(server) as pool:
        handle = await submit(pool.client, "hello", 5)
        result = await handle.result(20)
        assert await handle.cancel() is False
        assert await handle.result(20) == result
        assert (await handle.status()).reason == "length"


@pytest.mark.slow  # measures haste, which needs a quiet machine
async def test_fifty_long_prompts_whose_clients_leave_do_not_delay_the_next(server: Server) -> None:
    """Clients of the gateway close their connections; what counts is the first token of a request right after."""
    pool = Pool(
        "gateway", "prefill", "decode",
        prefill_engine="scripted:prefill_us=700", prefill_chunk_tokens=512, decode_engine="scripted:step_ms=20",
        kv_memory="64MiB", lease_seconds=20.0,
    )  # fmt: skip
    try:
        async with pool.client() as client:
            url = pool.current["gateway"].url
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                prompts = [f"{i:4} ".ljust(1500, "x") for i in range(50)]
                posts = [asyncio.create_task(leaving(http, url, p)) for p in prompts]
                await until(lambda: pool.redis.xlen(pool.keys.prefill("normal")) > 40)
                await until(lambda: pool.redis.xlen(pool.keys.decode) > 0)
                for post in posts:
                    post.cancel()
                left = time.monotonic()
                await asyncio.gather(*posts, return_exceptions=True)
            handle = await submit(client, "short", 3)
            async for _ in handle.stream():
                break
            assert time.monotonic() - left < 2.0
            await handle.result(20)
            await pool.at_rest()
            ended = [reply(pool.redis, pool.keys, key.decode().rpartition(":")[2]) for key in requests(pool)]
            reasons = {r.end.finish_reason for r in ended if r.end is not None}
            assert len(ended) == 51
            assert "cancelled" in reasons <= {"cancelled", "length"}
    finally:
        pool.close()


async def leaving(http: aiohttp.ClientSession, url: str, prompt: str) -> None:
    body = {"model": "scripted", "prompt": prompt, "max_tokens": 200, "stream": True}
    async with http.post(f"{url}/v1/completions", json=body) as response:
        await response.read()


def requests(pool: Pool) -> list[bytes]:
    return list(pool.redis.scan_iter(pool.keys.request("*"), count=1000))
