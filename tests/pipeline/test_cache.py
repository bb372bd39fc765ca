"""The shared cache through whole pools: write-back, tiers, privacy, limits, forms of KV, and the commands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdq import cache_admin, heartbeats
from pdq.cli import main
from pdq.client import Result
from pdq.config import RedisSettings
from pdq.errors import ConfigError
from tests.faults.pool import until
from tests.pipeline.local import LocalPool, LocalWorker
from tests.pipeline.test_pipeline import expected, until_stage
from tests.servers import Server

TURN = "question one of a chat"  # 22 tokens, one a byte


async def ask(pool: LocalPool, prompt: str, count: int = 12, **options: object) -> Result:
    handle = await pool.client.submit(prompt=prompt, max_tokens=count, temperature=0, **options)  # type: ignore[arg-type]
    result = await handle.result(15)
    assert result.text == expected(prompt.encode(), count)
    return result


def counted(worker: LocalWorker, name: str) -> int:
    return worker.stage.counters()[name]


@pytest.fixture
def store(any_server: Server) -> Iterator[Server]:
    """A second server, for KV alone."""
    second = Server("valkey9")
    yield second
    second.close()


async def test_the_next_turn_finds_the_prompt_and_the_answer_before_it(server: Server) -> None:
    async with LocalPool(server) as pool:
        first = await ask(pool, TURN)
        decode = pool.workers["decode"][0]
        await until(lambda: counted(decode, "write_backs") == 1)
        # KV of the last token is never computed: 22 + 11 tokens are 8 full blocks of 4.
        assert counted(decode, "written_back_blocks") == 3
        second = await ask(pool, TURN + first.text + " and another", 9)
        assert second.usage.cached_tokens == 32
        assert (first.usage.cached_tokens, first.usage.prompt_tokens) == (0, 22)


@pytest.mark.parametrize(("policy", "stored"), [("off", 0), ("chat", 0), ("always", 1)])
async def test_decode_stores_whose_blocks_the_policy_says(server: Server, policy: str, stored: int) -> None:
    async with LocalPool(server, decode_publish_decode=policy) as pool:
        first = await ask(pool, TURN)
        await until(lambda: pool.engines[1].can_open((1 << 20) // 8))
        decode = pool.workers["decode"][0]
        await until(lambda: counted(decode, "write_backs") == stored)
        second = await ask(pool, TURN + first.text + " and another", 9)
        assert second.usage.cached_tokens == (32 if stored else 20)


async def test_chats_are_stored_with_the_policy_for_chats(server: Server) -> None:
    async with LocalPool(server, decode_publish_decode="chat") as pool:
        handle = await pool.client.submit(messages=[{"role": "user", "content": TURN}], max_tokens=12, temperature=0)
        await handle.result(15)
        await until(lambda: counted(pool.workers["decode"][0], "write_backs") == 1)


async def test_a_cancelled_answer_is_not_written_back(server: Server) -> None:
    async with LocalPool(server, decode_engine="scripted:step_ms=5") as pool:
        handle = await pool.client.submit(prompt=TURN, max_tokens=500, temperature=0)
        async for event in handle.stream():
            if event.index > 20:
                await handle.cancel()
                break
        decode = pool.workers["decode"][0]
        await until(lambda: decode.engine.can_open((1 << 20) // 8))
        assert counted(decode, "write_backs") == 0


async def test_a_hot_prompt_is_read_from_the_workers_own_memory(server: Server) -> None:
    async with LocalPool(server) as pool:
        await ask(pool, TURN)
        assert (await ask(pool, TURN)).usage.cached_tokens == 20
        prefill, decode = pool.workers["prefill"][0], pool.workers["decode"][0]
        assert counted(prefill, "hit_tokens_local") == 20
        assert counted(prefill, "hit_tokens_redis") == 0
        assert counted(decode, "hit_tokens_redis") == 20  # the first time
        assert counted(decode, "hit_tokens_local") == 20  # the second


async def test_another_worker_and_a_restarted_one_find_what_the_first_stored(server: Server) -> None:
    async with LocalPool(server) as pool:
        await ask(pool, TURN)
        await pool.workers["prefill"][0].stop()
        second = pool.add("prefill")
        assert (await ask(pool, TURN)).usage.cached_tokens == 20
        assert counted(second, "hit_tokens_redis") == 20
        assert second.engine.computed == 2


async def test_what_redis_lost_comes_back_from_a_workers_own_memory(server: Server) -> None:
    async with LocalPool(server, decode_local_cache_bytes="0") as pool:
        await ask(pool, TURN)
        with server.client() as client:
            client.delete(*client.scan_iter("pdq:kv:*"))
        assert (await ask(pool, TURN)).usage.cached_tokens == 20
        assert counted(pool.workers["prefill"][0], "restored_blocks") == 5
        assert counted(pool.workers["decode"][0], "kv_missing") == 0


async def test_with_its_cache_off_a_request_leaves_nothing_and_finds_nothing(server: Server) -> None:
    async with LocalPool(server) as pool:
        await ask(pool, TURN)
        result = await ask(pool, TURN, cache="off")
        assert result.usage.cached_tokens == 0
        with server.client() as client:
            await until(lambda: len(list(client.scan_iter("pdq:kv:*"))) == 8 + 1)  # of the first, and the index
        await ask(pool, "something else that is private", cache="off")
        assert (await ask(pool, "something else that is private")).usage.cached_tokens == 0


async def test_tenants_do_not_share(server: Server) -> None:
    async with LocalPool(server) as pool:
        await ask(pool, TURN, tenant="a")
        assert (await ask(pool, TURN, tenant="b")).usage.cached_tokens == 0
        assert (await ask(pool, TURN, tenant="a")).usage.cached_tokens == 20


async def test_without_memory_for_kv_requests_go_on(server: Server, store: Server) -> None:
    async with LocalPool(server, kv_url=store.url) as pool:
        await ask(pool, TURN)
        with store.client() as client:
            client.config_set("maxmemory", 1)
            other = "another prompt of several blocks"
            assert (await ask(pool, other)).usage.cached_tokens == 0
            prefill, decode = (pool.workers[stage][0] for stage in ("prefill", "decode"))
            assert counted(prefill, "dropped_blocks") == 8
            assert (counted(decode, "kv_missing"), decode.worker.counters["failed"]) == (0, 0)
            client.config_set("maxmemory", 0)
        await ask(pool, other)
        assert (await ask(pool, other)).usage.cached_tokens == 28


async def test_blocks_that_vanish_at_any_moment_cost_time_and_no_answer(server: Server, store: Server) -> None:
    async def vanish() -> None:
        with store.client() as client:
            while True:
                await asyncio.sleep(0.003)
                if (key := client.randomkey()) is not None:
                    client.delete(key)

    async with LocalPool(server, prefill=2, decode=2, kv_url=store.url, local_cache_bytes="200") as pool:
        thief = asyncio.create_task(vanish())
        await asyncio.gather(*(ask(pool, f"{i % 5} prompts with shared prefixes {i}", 20) for i in range(40)))
        thief.cancel()


async def test_the_budget_holds_while_requests_run(server: Server, store: Server) -> None:
    value = 128 + 4 * 8
    budget = 40 * value
    async with LocalPool(server, kv_url=store.url, kv_budget=str(budget), decode_max_batch=2) as pool:
        for i in range(30):
            await ask(pool, f"{i} is a prompt of its own, quite long")
        with store.client() as client:
            await until(lambda: len(list(client.scan_iter("pdq:kv:*"))) <= 40 + 1)
        evicted = sum(counted(w, "evicted_blocks") for group in pool.workers.values() for w in group)
        assert evicted >= 30 * 9 - 40
        assert sum(counted(w, "kv_missing") for w in pool.workers["decode"]) == 0


async def test_a_worker_of_other_kv_is_refused_with_both_fingerprints(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "TTL_MS", 300)
    monkeypatch.setattr("pdq.worker.BEAT_SECONDS", 0.1)
    async with LocalPool(server, decode=0) as pool:
        await until(lambda: pool.workers["prefill"][0].worker._joined)
        stranger = pool.add("decode", block_size=8)
        with pytest.raises(ConfigError) as refused:
            await stranger.task
        await stranger.close()
        for worker in (pool.workers["prefill"][0], stranger):
            assert worker.engine.spec.fingerprint.hex()[:16] in str(refused.value)
        decode = pool.add("decode")
        await ask(pool, TURN)
        assert decode.worker._joined


async def test_a_worker_of_another_model_joins_once_the_old_ones_are_gone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, decode=0) as pool:
        old = pool.workers["prefill"][0]
        await until(lambda: old.worker._joined)
        new = pool.add("decode", block_size=8)
        await asyncio.sleep(0.3)
        assert not new.worker._joined
        await old.stop()
        await until(lambda: new.worker._joined)


async def test_stats_and_clear(server: Server) -> None:
    settings = RedisSettings(redis_url=server.url)
    async with LocalPool(server) as pool:
        await ask(pool, TURN)
        await ask(pool, TURN)
        await until(lambda: counted(pool.workers["decode"][0], "write_backs") >= 1)
        found = await asyncio.to_thread(cache_admin.stats, settings)
        (model,) = found.models
        assert (model.blocks, model.indexed, model.bytes) == (8, 8, 8 * (128 + 4 * 8))
        assert model.model == pool.engines[0].spec.fingerprint.hex()[:16]
        while (await asyncio.to_thread(cache_admin.stats, settings)).models[0].pinned:
            await asyncio.sleep(0.01)
        assert await asyncio.to_thread(cache_admin.clear, settings) == 8
        assert (await asyncio.to_thread(cache_admin.stats, settings)).models == []
        # The workers' own memory is forgotten, too.
        assert (await ask(pool, TURN)).usage.cached_tokens == 0
        assert (await ask(pool, TURN)).usage.cached_tokens == 20


async def test_clear_leaves_what_running_requests_need(server: Server) -> None:
    settings = RedisSettings(redis_url=server.url)
    async with LocalPool(server, decode=0) as pool:
        handle = await pool.client.submit(prompt=TURN, max_tokens=12, temperature=0)
        await until_stage(handle, "decode")
        assert await asyncio.to_thread(cache_admin.clear, settings) == 0
        assert (await asyncio.to_thread(cache_admin.stats, settings)).models[0].pinned == 5
        assert await asyncio.to_thread(cache_admin.clear, settings, pinned=True) == 5
        pool.add("decode")
        assert (await handle.result(15)).text == expected(TURN.encode(), 12)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_the_cache_commands_speak_json_and_plain_text(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "cache", "stats", "--redis-url", server.url, "--json")
    answer: dict[str, Any] = json.loads(out)
    assert (code, answer["models"], answer["hit_ratio"]) == (0, [], None)
    code, out, _ = run(capsys, "cache", "stats", "--redis-url", server.url)
    assert code == 0
    assert out.startswith("Redis uses ")
    code, out, _ = run(capsys, "cache", "clear", "--redis-url", server.url, "--json")
    assert (code, json.loads(out)) == (0, {"deleted_blocks": 0})
    code, _, err = run(capsys, "cache", "clear", "--redis-url", server.url, "--model", "xyz")
    assert code == 2
    assert "16 hex digits" in err


async def test_a_trace_of_conversations_hits_more_in_the_shared_cache_than_in_a_cache_per_worker(
    server: Server,
) -> None:
    from tests.pipeline.trace import conversations, replay

    found = await replay(server, conversations(30, seed=3), seed=3)
    assert found.shared > 1.1 * found.per_worker
    assert found.shared > 0.6 * found.prompt
