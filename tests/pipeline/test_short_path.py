"""Short prompts that decode computes itself: the same text, counted, and only when it has little to do."""

from __future__ import annotations

import asyncio

import pytest

from pdq.messages import WorkerInfo
from pdq.short_path import ShortPath
from tests.faults.pool import until
from tests.pipeline.local import LocalPool
from tests.pipeline.test_cache import ask, counted
from tests.servers import Server


async def look_is_ready(pool: LocalPool) -> None:
    """Wait until decode's heartbeat can be read: without one nobody knows that it has little to do."""
    while not any(w.stage == "decode" for w in await pool.client.workers()):
        await asyncio.sleep(0.01)


async def test_a_short_prompt_is_computed_by_decode_with_the_same_text_and_usage(server: Server) -> None:
    async with LocalPool(server, prefill_local_prefill_tokens=12) as pool:
        await look_is_ready(pool)
        prefill, decode = pool.workers["prefill"][0], pool.workers["decode"][0]
        for length in (1, 3, 4, 5, 11, 12):
            result = await ask(pool, "abcdefghijklmnop"[-length:], 9)
            assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (length, 9)
            assert result.usage.cached_tokens == 0
        assert counted(prefill, "short_paths") == 6
        assert prefill.engine.computed == 0
        assert counted(decode, "kv_missing") == 0


async def test_only_what_the_cache_lacks_counts_and_decode_stores_what_it_computed(server: Server) -> None:
    async with LocalPool(server, prefill_local_prefill_tokens=8) as pool:
        await look_is_ready(pool)
        prefill, decode = pool.workers["prefill"][0], pool.workers["decode"][0]
        await ask(pool, "a prompt that is too long")
        assert (counted(prefill, "short_paths"), prefill.engine.computed) == (0, 25)
        result = await ask(pool, "a prompt that is too long by far")
        assert result.usage.cached_tokens == 24
        assert counted(prefill, "short_paths") == 1
        await until(lambda: counted(decode, "write_backs") == 2)
        assert (await ask(pool, "a prompt that is too long by far off")).usage.cached_tokens == 32


async def test_a_request_that_ends_with_its_first_token_ends_in_decode(server: Server) -> None:
    async with LocalPool(server, prefill_local_prefill_tokens=12) as pool:
        await look_is_ready(pool)
        assert (await ask(pool, "abc", 1)).finish_reason == "length"
        assert counted(pool.workers["decode"][0], "tokens") == 1


async def test_token_0_is_told_at_once_by_decode_too(server: Server) -> None:
    slow = {"decode_engine": "scripted:step_ms=20", "decode_flush_ms": 1000.0}
    async with LocalPool(server, prefill_local_prefill_tokens=12, **slow) as pool:
        await look_is_ready(pool)
        handle = await pool.client.submit(prompt="abc", max_tokens=9, temperature=0)
        assert [len(event.token_ids) async for event in handle.stream()] == [1, 8]
        assert counted(pool.workers["prefill"][0], "short_paths") == 1


async def test_with_its_cache_off_a_short_prompt_is_computed_by_decode_too(server: Server) -> None:
    async with LocalPool(server, prefill_local_prefill_tokens=12) as pool:
        await look_is_ready(pool)
        await ask(pool, "abcdefgh", 9, cache="off")
        assert counted(pool.workers["prefill"][0], "short_paths") == 1
        with server.client() as client:
            assert not list(client.scan_iter("pdq:kv:*"))


async def test_a_decode_worker_that_dies_before_token_0_is_replaced(server: Server) -> None:
    slow = {"decode_engine": "scripted:step_ms=400"}
    async with LocalPool(server, prefill_local_prefill_tokens=12, lease_seconds=0.6, **slow) as pool:
        await look_is_ready(pool)
        asking = asyncio.create_task(ask(pool, "abcdefgh", 3))
        first = pool.workers["decode"][0]
        await until(lambda: first.engine.forwards > 0)
        await first.die()
        pool.add("decode")
        assert (await asking).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("state", "running", "light"), [("ready", 4, True), ("ready", 5, False), ("draining", 0, False)]
)
async def test_decode_has_little_to_do_with_a_quarter_of_its_places_taken(
    state: str, running: int, light: bool
) -> None:
    async def look() -> list[WorkerInfo]:
        return [
            WorkerInfo("d", "decode", "m", bytes(32), 100, state, running, 16),
            WorkerInfo("p", "prefill", "m", bytes(32), 100, "ready", 0, 16),
        ]

    path = ShortPath(10, look)
    assert await path.takes(10) is light
    assert await path.takes(11) is False
    assert await ShortPath(0, look).takes(1) is False
