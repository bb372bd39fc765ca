"""`cached_tokens` is the whole blocks that were there when the first token was computed: everywhere, whatever dies."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from tests.pipeline.local import LocalPool

from .helpers import COMPLETIONS, frames
from .test_with_a_pool import gateway, until_ready

BLOCK = 4
ANSWER = {"max_tokens": 30, "temperature": 0}


def details(body):
    usage = body["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def whole(http, pool, prompt, **more):
    response = await http.post(COMPLETIONS, json=ANSWER | {"prompt": prompt} | more)
    return details(await response.json())


async def stream(http, pool, prompt, **more):
    body = ANSWER | {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | more
    *_, usage, done = frames(await (await http.post(COMPLETIONS, json=body)).text())
    assert done == "[DONE]"
    return details(usage)


async def sdk(http, pool, prompt, **more):
    usage = (await (await pool.client.submit(prompt=prompt, **ANSWER | more)).result(20)).usage
    return usage.prompt_tokens, usage.cached_tokens


WAYS = pytest.mark.parametrize("ask", [whole, stream, sdk])


@asynccontextmanager
async def running(server, **options):
    async with LocalPool(server, **options) as pool, gateway(server) as http:
        await until_ready(http)
        yield http, pool


@WAYS
async def test_only_whole_blocks_count_and_never_the_last_token(server, ask):
    async with running(server) as (http, pool):
        assert await ask(http, pool, "0123456789abcdef") == (16, 0)
        found = {n: await ask(http, pool, "0123456789abcdef"[:n], max_tokens=2) for n in (1, 3, 4, 5, 8, 9, 15, 16)}
        assert found == {n: (n, (n - 1) // BLOCK * BLOCK) for n in found}
        assert await ask(http, pool, "0123456789abcdefg") == (17, 16)
        assert await ask(http, pool, "01234567_________") == (17, 8)
        assert await ask(http, pool, "_123456789abcdef") == (16, 0)


@WAYS
async def test_an_answer_of_one_token_tells_the_same(server, ask):
    async with running(server) as (http, pool):
        await ask(http, pool, "0123456789abcdef")
        assert await ask(http, pool, "0123456789abcdef", max_tokens=1) == (16, 12)


async def test_several_prompts_give_the_sum(server):
    async with running(server) as (http, pool):
        await whole(http, pool, "0123456789abcdef")
        assert await whole(http, pool, ["0123456789abcdef", "01234567____", "_"]) == (29, 20)


@WAYS
async def test_with_the_cache_off_nothing_is_found_and_nothing_is_left(server, ask):
    async with running(server) as (http, pool):
        prompt = "0123456789abcdef"
        assert await ask(http, pool, prompt, cache="off") == (16, 0)
        assert await ask(http, pool, prompt, cache="off") == (16, 0)
        assert await ask(http, pool, prompt) == (16, 0)
        assert await ask(http, pool, prompt) == (16, 12)
        assert await ask(http, pool, prompt, cache="off") == (16, 0)
        assert await ask(http, pool, prompt, cache="on") == (16, 12)


async def warm(http, pool):
    """Two blocks are in the cache, those of "01234567"."""
    assert await whole(http, pool, "01234567", max_tokens=1) == (8, 0)


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@WAYS
async def test_a_request_that_went_back_to_prefill_does_not_count_its_own_blocks(server, ask):
    async with running(server, decode_kv_miss="requeue", decode_recompute_tokens=0, prefill_chunk_tokens=4) as parts:
        http, pool = parts
        await warm(http, pool)
        stage = pool.workers["decode"][0].stage
        load, lost = stage._parts.transfer.load, []

        async def losing(slot, chain, *rest):
            if not lost:
                lost.append(chain.hashes[-1])
                await asyncio.to_thread(stage._parts.transfer.store.drop, lost)
            return await load(slot, chain, *rest)

        stage._parts.transfer.load = losing
        assert await ask(http, pool, "0123456789abcdefgh") == (18, 8)
        assert stage.counters()["kv_requeued"] == 1


@WAYS
async def test_a_decode_worker_that_dies_changes_no_count(server, ask):
    async with running(server, engine="scripted:step_ms=10", lease_seconds=0.6, decode_flush_ms=5.0) as (http, pool):
        await warm(http, pool)
        asking = asyncio.create_task(ask(http, pool, "0123456789abcdefgh"))
        victim = pool.workers["decode"][0]
        await until(lambda: victim.stage.counters()["tokens"] > 5)
        await victim.die()
        pool.add("decode")
        assert await asking == (18, 8)


@WAYS
async def test_a_prefill_worker_that_dies_after_the_first_token_changes_no_count(server, ask, monkeypatch):
    async with running(server, lease_seconds=0.6) as (http, pool):
        await warm(http, pool)
        victim, reached = pool.workers["prefill"][0], asyncio.Event()

        async def never(*_):
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(victim.stage, "_hand_off", never)
        asking = asyncio.create_task(ask(http, pool, "0123456789abcdefgh"))
        await asyncio.wait_for(reached.wait(), 20)
        await victim.die()
        second = pool.add("prefill")
        assert await asking == (18, 8)
        assert second.stage.counters()["cached_tokens"] == 16  # what it found is another matter: of its speed
