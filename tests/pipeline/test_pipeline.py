"""The whole pipeline on a real server with a scripted engine, whose next token depends on all KV before it."""

from __future__ import annotations

import asyncio
import time
import zlib
from struct import pack

import pytest

from pdq import keys, kv_transfer
from pdq.blocks import HEADER_BYTES
from pdq.client import Handle, Result
from pdq.errors import (
    ContextTooLong,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    RequestCancelled,
    RequestFailed,
)
from pdq.messages import SamplingParams
from tests.faults.pool import until
from tests.pipeline.local import LocalPool
from tests.servers import Server


def expected(prompt: bytes, count: int, seed: int = 0) -> str:
    """What an undisturbed single process would answer."""
    checksum, out = 0, ""
    for token in prompt:
        checksum = zlib.crc32(pack("<I", token), checksum)
    for position in range(count):
        token = 97 + zlib.crc32(pack("<Qq", position, seed), checksum) % 26
        checksum = zlib.crc32(pack("<I", token), checksum)
        out += chr(token)
    return out


async def ask(pool: LocalPool, prompt: str, count: int = 12, **options: object) -> Result:
    handle = await pool.client.submit(prompt=prompt, max_tokens=count, temperature=0, **options)  # type: ignore[arg-type]
    return await handle.result(15)


async def leftovers(server: Server) -> set[str]:
    """Keys that a finished workload leaves behind, results and blocks aside."""
    with server.client() as client:
        found = {k.decode() for k in client.scan_iter("*")}
    kept = (":out:", ":req:", "pdq:kv:", ":prefill:", "}:decode", "}:load", ":took:")
    return {k for k in found if not any(part in k for part in kept)}


@pytest.mark.parametrize("token_bytes", [8, 2 * kv_transfer.SMALL])
async def test_small_and_large_tails_reach_decode_and_are_gone_after_the_end(server: Server, token_bytes: int) -> None:
    small = token_bytes < kv_transfer.SMALL
    async with LocalPool(server, engine=f"scripted:token_bytes={token_bytes}", kv_memory="16MiB") as pool:
        for prompt in ("abc", "ABCDEFG"):  # a tail alone, and one after a block that decode cannot have stored
            assert (await ask(pool, prompt)).text == expected(prompt.encode(), 12)
        decode, prefill = pool.workers["decode"][0], pool.workers["prefill"][0]
        assert decode.stage.counters()["kv_missing"] == 0
        block, tail = (HEADER_BYTES + n * token_bytes for n in (4, 3))
        assert prefill.store.counters["bytes_out"] == block + (0 if small else 2 * tail)  # small: in the handoff
        with server.client() as direct:
            await until(lambda: not list(direct.scan_iter("pdq:tail:*")))


async def test_the_answer_is_that_of_a_single_process_for_every_prompt_length(server: Server) -> None:
    async with LocalPool(server, prefill_chunk_tokens=3) as pool:
        for length in range(1, 14):
            prompt = "abcdefghijklmnop"[:length]
            result = await ask(pool, prompt)
            assert result.text == expected(prompt.encode(), 12)
            assert (result.finish_reason, result.usage.completion_tokens) == ("length", 12)
            assert result.usage.prompt_tokens == length


async def test_many_requests_at_once_do_not_mix(server: Server) -> None:
    async with LocalPool(server, prefill=2, decode=2, decode_max_batch=5, decode_flush_ms=5.0) as pool:
        prompts = [f"prompt number {i} " * (1 + i % 5) for i in range(40)]
        results = await asyncio.gather(*(ask(pool, p, 5 + i % 20) for i, p in enumerate(prompts)))
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            assert result.text == expected(prompt.encode(), 5 + i % 20)
        await until(lambda: all(engine.can_open(2**20 // 8) for engine in pool.engines))  # soon after the last end
    assert await leftovers(server) <= {"{pdq:default}:workers", "{pdq:default}:dead", "{pdq:default}:cancels"}
    with server.client() as client:
        assert not list(client.scan_iter("pdq:tail:*"))
        assert client.hgetall("{pdq:default}:load") == {b"queued": b"0", b"held": b"0"}


async def test_a_prefix_hit_skips_its_prefill_on_every_worker(server: Server) -> None:
    async with LocalPool(server) as pool:
        prompt = "x" * 18
        cold = await ask(pool, prompt)
        assert (cold.usage.cached_tokens, pool.workers["prefill"][0].engine.computed) == (0, 18)
        other = pool.add("prefill")
        await pool.workers["prefill"][0].stop()
        warm = await ask(pool, prompt)
        assert (warm.usage.cached_tokens, other.engine.computed) == (16, 2)
        assert warm.text == cold.text
        longer = await ask(pool, prompt + "yz")
        assert longer.usage.cached_tokens == 16
        assert longer.text == expected(b"x" * 18 + b"yz", 12)


async def test_a_full_hit_still_computes_the_last_token(server: Server) -> None:
    async with LocalPool(server) as pool:
        first, again = await ask(pool, "a" * 16), await ask(pool, "a" * 16)
        assert again.usage.cached_tokens == 12
        assert again.text == first.text


async def test_tenants_do_not_share_a_prefix(server: Server) -> None:
    async with LocalPool(server) as pool:
        await ask(pool, "b" * 16, tenant="one")
        assert (await ask(pool, "b" * 16, tenant="two")).usage.cached_tokens == 0
        assert (await ask(pool, "b" * 16, tenant="one")).usage.cached_tokens == 12


async def test_one_token_is_one_token_and_never_sees_decode(server: Server) -> None:
    async with LocalPool(server, decode=0) as pool:
        result = await ask(pool, "hello", 1)
        assert (result.text, result.usage.completion_tokens) == (expected(b"hello", 1), 1)
        assert result.finish_reason == "length"


async def test_a_stop_string_on_the_first_token_ends_in_prefill(server: Server) -> None:
    async with LocalPool(server, decode=0, engine="scripted:text=Paris") as pool:
        result = await ask(pool, "hello", 9, stop="P")
        assert (result.text, result.finish_reason, result.token_ids) == ("", "stop", (80,))


async def test_stop_strings_across_events_are_cut_exactly(server: Server) -> None:
    async with LocalPool(server, engine="scripted:text=Paris is big. ", decode_flush_ms=0.0) as pool:
        for stop, text in (("ari", "P"), ("s b", "Paris i"), ("g. Pa", "Paris is bi"), (["zz", "is b"], "Paris ")):
            result = await ask(pool, "hello", 40, stop=stop)
            assert (result.text, result.finish_reason) == (text, "stop")
        nearly = await ask(pool, "hello", 14, stop=["Paris is bag", "big! "])
        assert (nearly.text, nearly.finish_reason) == ("Paris is big. ", "length")


async def test_tokens_after_the_first_are_told_once_a_flush_and_with_the_end(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=1", decode_flush_ms=1000.0) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=30, temperature=0)
        began = time.monotonic()
        assert [len(event.token_ids) async for event in handle.stream()] == [1, 29]
        assert time.monotonic() - began < 1  # the end waits for no flush
        handle = await pool.client.submit(prompt="hello", max_tokens=3000, temperature=0)
        stream, times = handle.stream(), []
        for _ in range(3):
            await anext(stream)
            times.append(time.monotonic())
        assert 0.9 < times[2] - times[1] < 1.9
        await handle.cancel()


async def test_the_second_token_waits_for_no_flush_if_it_was_long_in_coming(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=1", decode=0, decode_flush_ms=400.0) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=3000, temperature=0)
        stream = handle.stream()
        await anext(stream)
        await asyncio.sleep(0.5)
        pool.add("decode")
        counts = [len((await anext(stream)).token_ids) for _ in range(2)]
        assert counts[0] < 100 < counts[1]
        await handle.cancel()


async def test_end_of_text_ends_the_answer_unless_ignored(server: Server) -> None:
    async with LocalPool(server, engine="scripted:eos_every=6") as pool:
        result = await ask(pool, "some prompt", 400)
        assert result.finish_reason == "stop"
        assert result.token_ids[-1] == 256
        assert len(result.text) == result.usage.completion_tokens - 1
        ignored = await ask(pool, "some prompt", 60, ignore_eos=True)
        assert (ignored.finish_reason, ignored.usage.completion_tokens) == ("length", 60)


async def test_a_character_of_several_tokens_is_never_split(server: Server) -> None:
    async with LocalPool(server, engine="scripted:text=h\u00e9 \U0001f600 \u6c49.", decode_flush_ms=0.0) as pool:
        handle = await pool.client.submit(prompt="x", max_tokens=24)  # ends within the second \u6c49
        texts = [event.text async for event in handle.stream()]
        assert "".join(texts) == "h\u00e9 \U0001f600 \u6c49.h\u00e9 \U0001f600 "


async def test_the_first_token_does_not_wait_for_decode(server: Server) -> None:
    async with LocalPool(server, decode=0) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=5, temperature=0)
        async for event in handle.stream():
            assert (event.index, event.text) == (0, expected(b"hello", 1))
            break
        pool.add("decode")
        assert (await handle.result(10)).text == expected(b"hello", 5)


async def test_a_seed_gives_the_same_text_alone_and_in_company(server: Server) -> None:
    async with LocalPool(server, decode=2) as pool:

        async def sample(seed: int) -> str:
            handle = await pool.client.submit(prompt="hello", max_tokens=20, temperature=1.0, seed=seed)
            return (await handle.result(10)).text

        alone = await sample(7)
        company = await asyncio.gather(*(sample(s) for s in (1, 7, 2, 7, 3)))
        assert company[1] == company[3] == alone
        assert len(set(company)) == 4


async def test_wrong_requests_that_only_a_worker_can_see_are_named(server: Server) -> None:
    async with LocalPool(server, max_model_len=32) as pool:
        with pytest.raises(ContextTooLong, match="30 prompt tokens and 3 new ones"):
            await ask(pool, "x" * 30, 3)
        with pytest.raises(ModelNotFound):
            await ask(pool, "x", 3, model="other")
        handle = await pool.client.submit(token_ids=[5, 257], max_tokens=3)
        with pytest.raises(InvalidRequest, match="below 257"):
            await handle.result(5)
        assert (await ask(pool, "x" * 30, 2)).usage.completion_tokens == 2
        handle = await pool.client.submit(prompt="x" * 30)
        assert (await handle.result(5)).usage.completion_tokens == 2


async def test_cancel_while_decoding_frees_the_slot_soon(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=5", decode_max_batch=1) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=4000)
        async for event in handle.stream():
            if event.index > 5:
                break
        started = time.monotonic()
        assert await handle.cancel() is True
        with pytest.raises(RequestCancelled):
            await handle.result(5)
        await ask(pool, "next", 3)
        assert time.monotonic() - started < 1
        assert (await handle.status()).reason == "cancelled"


async def test_cancel_while_prefilling_stops_within_a_chunk(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=100", prefill_chunk_tokens=4) as pool:
        handle = await pool.client.submit(prompt="x" * 400)
        while (await handle.status()).state != "running":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.15)
        started = time.monotonic()
        await handle.cancel()
        with pytest.raises(RequestCancelled):
            await handle.result(5)
        assert time.monotonic() - started < 0.5


async def test_the_deadline_ends_a_running_request(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=20", lease_seconds=1.0) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=4000, timeout=0.5)
        with pytest.raises(DeadlineExceeded):
            await handle.result(5)


@pytest.mark.parametrize("part", ["block", "tail"])
@pytest.mark.parametrize("how", ["deleted", "damaged"])
async def test_lost_kv_is_computed_again_and_the_text_is_right(
    server: Server, part: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "SMALL", 0)  # so that the tail is in the store
    async with LocalPool(server, decode=0) as pool:
        handle = await pool.client.submit(prompt="0123456789", max_tokens=9, temperature=0)
        while (await handle.status()).stage != "decode":
            await asyncio.sleep(0.01)
        pattern = "pdq:tail:*" if part == "tail" else "pdq:kv:*"
        with server.client() as client:
            names = [k for k in client.scan_iter(pattern) if not k.endswith(b"index")]
            assert len(names) == (1 if part == "tail" else 2)
            if how == "deleted":
                client.delete(names[0])
            else:
                client.setrange(names[0], 140, b"!")
        decode = pool.add("decode")
        assert (await handle.result(10)).text == expected(b"0123456789", 9)
        assert decode.worker.counters["claimed"] == 2
        assert decode.stage.counters()["kv_requeued"] == 1


LOST = "0123456789"  # a prompt of two blocks and a tail


async def lose_kv(pool: LocalPool, server: Server, **options: object) -> Handle:
    """A request that waits for decode, with its blocks gone."""
    handle = await pool.client.submit(prompt=LOST, max_tokens=9, temperature=0, **options)  # type: ignore[arg-type]
    await until_stage(handle, "decode")
    with server.client() as client:
        client.delete(*client.scan_iter("pdq:kv:*"))
    return handle


async def until_stage(handle: Handle, stage: str) -> None:
    while (await handle.status()).stage != stage:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ({"kv_miss": "requeue"}, {"kv_missing": 1, "kv_requeued": 1}),
        ({"kv_miss": "recompute"}, {"kv_missing": 1, "kv_recomputed": 1}),
        ({"kv_miss": "recompute", "recompute_tokens": 9}, {"kv_missing": 1, "kv_requeued": 1}),
    ],
)
async def test_lost_kv_is_made_again_as_the_policy_says(
    server: Server, options: dict[str, object], counted: dict[str, int]
) -> None:
    async with LocalPool(server, decode=0) as pool:
        handle = await lose_kv(pool, server)
        decode = pool.add("decode", **options)
        assert (await handle.result(10)).text == expected(LOST.encode(), 9)
        counters = decode.stage.counters()
        assert {name: n for name, n in counters.items() if name.startswith("kv_")} == counted


async def test_kv_lost_again_after_a_requeue_is_computed_in_decode(server: Server) -> None:
    async with LocalPool(server, decode=0) as pool:
        handle = await lose_kv(pool, server)
        await pool.workers["prefill"][0].stop()
        decode = pool.add("decode")
        await until_stage(handle, "prefill")
        await decode.stop()
        pool.add("prefill")
        await until_stage(handle, "decode")
        with server.client() as client:
            client.delete(*client.scan_iter("pdq:kv:*"))
        last = pool.add("decode")
        assert (await handle.result(10)).text == expected(LOST.encode(), 9)
        assert last.stage.counters()["kv_recomputed"] == 1


async def test_kv_lost_with_no_way_left_fails_the_request(server: Server) -> None:
    async with LocalPool(server, decode_kv_miss="fail", decode=0) as pool:
        handle = await lose_kv(pool, server)
        pool.add("decode")
        with pytest.raises(RequestFailed, match="the KV of 10 tokens is gone"):
            await handle.result(10)


async def test_a_decode_worker_that_dies_is_replaced_and_no_token_is_repeated(server: Server) -> None:
    options = {"engine": "scripted:step_ms=10", "lease_seconds": 0.6, "decode_flush_ms": 5.0}
    async with LocalPool(server, **options) as pool:
        handles = [
            await pool.client.submit(prompt=f"victim {i}", max_tokens=60, temperature=1.0, seed=i, stop=["never"])
            for i in range(4)
        ]
        for handle in handles:
            while (await handle.status()).tokens < 10:
                await asyncio.sleep(0.01)
        await pool.workers["decode"][0].die()
        pool.add("decode")
        for i, handle in enumerate(handles):
            events = [e async for e in handle.stream()]
            assert "".join(e.text for e in events) == expected(f"victim {i}".encode(), 60, seed=i)
            assert [e.index for e in events] == [sum(len(x.token_ids) for x in events[:n]) for n in range(len(events))]
            assert (await handle.status()).attempt == 3


async def test_a_prefill_worker_that_dies_is_replaced_and_its_blocks_are_used(server: Server) -> None:
    options = {"engine": "scripted:step_ms=50", "lease_seconds": 0.6, "prefill_chunk_tokens": 4}
    async with LocalPool(server, **options) as pool:
        handle = await pool.client.submit(prompt="p" * 80, max_tokens=5, temperature=0)
        dying = pool.workers["prefill"][0]
        while dying.engine.computed < 40:
            await asyncio.sleep(0.01)
        await dying.die()
        second = pool.add("prefill")
        assert (await handle.result(10)).text == expected(b"p" * 80, 5)
        assert 0 < second.engine.computed <= 48


async def test_a_drained_worker_gives_its_jobs_back_uncharged(server: Server) -> None:
    options = {"engine": "scripted:step_ms=20", "drain_seconds": 0.1}
    async with LocalPool(server, **options) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=80, temperature=0)
        while (await handle.status()).tokens < 5:
            await asyncio.sleep(0.01)
        await pool.workers["decode"][0].stop()
        assert (await handle.status()).state == "queued"
        pool.add("decode")
        assert (await handle.result(10)).text == expected(b"hello", 80)
        with server.client() as client:
            assert client.hget(keys.Keys("default").request(handle.id), "tries") == b"1"


async def test_a_request_that_breaks_its_worker_is_dead_lettered_and_others_go_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, lease_seconds=0.5) as pool:
        engine = pool.workers["prefill"][0].engine
        forward = engine.forward

        def poisoned(segments: list) -> list[int | None]:  # type: ignore[type-arg]
            if any(66 in s.token_ids for s in segments):
                raise RuntimeError("boom")
            return forward(segments)

        monkeypatch.setattr(engine, "forward", poisoned)
        bad = await pool.client.submit(prompt="B", max_tokens=3)
        good = [ask(pool, f"good {i}", 5) for i in range(5)]
        assert [len(r.text) for r in await asyncio.gather(*good)] == [5] * 5
        with pytest.raises(RequestFailed, match="prefill failed 3 times"):
            await bad.result(10)


async def test_decode_waits_for_kv_memory_and_starves_nobody(server: Server) -> None:
    async with LocalPool(server, decode_kv_memory="2KiB", max_model_len=128, engine="scripted") as pool:
        results = await asyncio.gather(*(ask(pool, f"request {i}", 60) for i in range(8)))
        assert [r.text for r in results] == [expected(f"request {i}".encode(), 60) for i in range(8)]


async def test_the_sync_client_does_the_same(server: Server) -> None:
    from pdq import Client

    def use() -> tuple[str, str, list[str]]:
        with Client(redis_url=server.url) as client:
            handle = client.submit(prompt="hello", max_tokens=6, temperature=0)
            text = "".join(e.text for e in handle.stream())
            again = client.attach(handle.id)
            return text, again.result(5).text, [w.stage for w in client.workers()]

    async with LocalPool(server):
        await asyncio.sleep(0.1)
        text, again, stages = await asyncio.to_thread(use)
        assert text == again == expected(b"hello", 6)
        assert sorted(stages) == ["decode", "prefill"]


async def test_chat_messages_are_rendered_by_the_worker(server: Server) -> None:
    async with LocalPool(server) as pool:
        handle = await pool.client.submit(messages=[{"role": "user", "content": "hi"}], max_tokens=4, temperature=0)
        result = await handle.result(5)
        assert result.text == expected(b"user: hi\nassistant:", 4)
        assert result.timings.prefill_ms > 0


def test_sampling_defaults_are_the_documented_ones() -> None:
    assert SamplingParams() == SamplingParams(1.0, 1.0, 0, 0.0, 0, None, (), False)
