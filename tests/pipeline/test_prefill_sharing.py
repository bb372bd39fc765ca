"""Prompts that share a prefill worker: who is first, what they share, and that nobody pays for another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pdq.client import Handle
from pdq.engine.base import Segment
from pdq.engine.scripted import ScriptedSlot
from pdq.errors import DeadlineExceeded, RequestCancelled, RequestFailed
from pdq.kv_transfer import Blocks, KVTransfer
from pdq.prefill_schedule import LONG, PATIENCE
from tests.pipeline.local import LocalPool, LocalWorker
from tests.pipeline.test_pipeline import ask, expected
from tests.servers import Server

CHUNK = 64
CHUNK_SECONDS = 0.128
OPTIONS = {"prefill_engine": "scripted:prefill_us=2000", "prefill_chunk_tokens": CHUNK, "kv_memory": "4MiB"}


async def submit(pool: LocalPool, prompt: str, count: int = 2, **options: object) -> Handle:
    return await pool.client.submit(prompt=prompt, max_tokens=count, temperature=0, **options)  # type: ignore[arg-type]


async def first_token(handle: Handle) -> float:
    """When it is there, by time.monotonic()."""
    async for _ in handle.stream():
        break
    return time.monotonic()


async def until(condition: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            found = condition()
            if found if isinstance(found, bool) else await found:
                return
            await asyncio.sleep(0.005)


async def computing(pool: LocalPool, *handles: Handle) -> None:
    """Until the prefill worker has these and a forward under way."""
    for handle in handles:
        await until(lambda handle=handle: _running(handle))  # type: ignore[misc]
    engine = pool.workers["prefill"][0].engine
    await until(lambda: engine.forwards > 0)


async def _running(handle: Handle) -> bool:
    return (await handle.status()).state == "running"


def recorded(worker: LocalWorker, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """What its forwards compute from now on: tokens by the prompt's first letter."""
    done: list[dict[str, int]] = []
    forward = worker.engine.forward

    def record(segments: list[Segment]) -> list[int | None]:
        done.append({chr(s.history[0]): len(s.token_ids) for s in segments if s.history})
        return forward(segments)

    monkeypatch.setattr(worker.engine, "forward", record)
    return done


@pytest.mark.parametrize("longs", [1, LONG - 1])
async def test_a_short_prompt_behind_long_ones_waits_for_one_chunk(server: Server, longs: int) -> None:
    async with LocalPool(server, decode=0, **OPTIONS) as pool:
        waiting = [await submit(pool, letter * 40 * CHUNK) for letter in "abc"[:longs]]
        await computing(pool, *waiting)
        begun = time.monotonic()
        short = await submit(pool, "short", 1)
        assert await first_token(short) - begun < 3 * CHUNK_SECONDS
        assert (await short.result(1)).text == expected(b"short", 1)
        for handle in waiting:
            assert (await handle.status()).tokens == 0
            await handle.cancel()


async def test_short_prompts_share_forwards_and_get_what_each_would_get_alone(server: Server) -> None:
    async with LocalPool(server, **OPTIONS) as pool:
        prompts = [f"{i:02} is a short prompt" for i in range(40)]  # of 20 tokens: three in a forward
        results = await asyncio.gather(*(ask(pool, p, 5) for p in prompts))
        assert [r.text for r in results] == [expected(p.encode(), 5) for p in prompts]
        worker = pool.workers["prefill"][0]
        assert worker.engine.computed == 40 * 20
        assert worker.engine.forwards <= 20
        counters = worker.stage.counters()
        assert (counters["forwards"], counters["computed_tokens"]) == (worker.engine.forwards, 800)
        assert counters["prompt_tokens"] == 800
        assert counters["prefill_ms"] >= 800 * 2 - 40 * 2


async def test_a_long_prompt_ends_among_a_steady_flow_of_short_ones(server: Server) -> None:
    async with LocalPool(server, decode=0, **OPTIONS) as pool:
        engine = pool.workers["prefill"][0].engine
        long = await submit(pool, "x" * 8 * CHUNK, 1)
        await computing(pool, long)
        number, ended = 0, asyncio.Event()

        async def asking() -> None:
            nonlocal number
            while not ended.is_set():
                number += 1
                await ask(pool, f"{number:04}".ljust(CHUNK, "y"), 1)

        flow = [asyncio.create_task(asking()) for _ in range(3)]
        await long.result(30)
        computed = engine.computed
        ended.set()
        await asyncio.gather(*flow)
        assert number > PATIENCE
        assert computed <= (PATIENCE + 1) * (8 * CHUNK + CHUNK) + 2 * CHUNK


async def test_a_high_prompt_overtakes_what_the_batch_lane_has_begun(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, decode=0, **OPTIONS) as pool:
        done = recorded(pool.workers["prefill"][0], monkeypatch)
        batch = await submit(pool, "b" * 20 * CHUNK, 1, lane="batch")
        await computing(pool, batch)
        high = await submit(pool, "h" * 3 * CHUNK, 1, lane="high")
        await high.result(10)
        first = next(i for i, chunks in enumerate(done) if "h" in chunks)
        assert first <= 2
        assert done[first : first + 3] == [{"h": CHUNK}] * 3
        await batch.cancel()


@pytest.mark.parametrize("long", [False, True])
async def test_a_prompt_that_breaks_its_forward_costs_its_neighbours_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    async with LocalPool(server, lease_seconds=0.5, max_attempts=2, **OPTIONS) as pool:
        worker = pool.workers["prefill"][0]
        forward, broken = worker.engine.forward, []

        def poisoned(segments: list[Segment]) -> list[int | None]:
            if any(ord("#") in s.token_ids for s in segments):
                broken.append(len(segments))
                raise RuntimeError("boom")
            return forward(segments)

        monkeypatch.setattr(worker.engine, "forward", poisoned)
        first = await submit(pool, "a" * 4 * CHUNK)
        await computing(pool, first)
        bad = await submit(pool, "# is poison" if not long else "x" * 20 + "#" * 2 * CHUNK)
        good = [await submit(pool, f"good {i}", 5) for i in range(2)]
        assert [(await h.result(10)).text for h in good] == [expected(f"good {i}".encode(), 5) for i in range(2)]
        with pytest.raises(RequestFailed, match="prefill failed 2 times"):
            await bad.result(10)
        assert (await first.result(10)).text == expected(b"a" * 4 * CHUNK, 2)
        assert max(broken) > 1
        assert 1 in broken
        assert worker.worker.counters["failed"] == 2
        assert worker.worker.counters["claimed"] == 5  # the poison twice, nobody else


async def test_a_prompt_whose_logits_are_no_numbers_fails_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, max_attempts=1, **OPTIONS) as pool:
        worker = pool.workers["prefill"][0]
        forward, beside = worker.engine.forward, []

        def some(segments: list[Segment]) -> list[int | None]:
            bad = [s.history is not None and s.history[0] == ord("#") for s in segments]
            beside.append(any(bad) and len(bad) > 1)
            return [None if b else token for b, token in zip(bad, forward(segments), strict=True)]

        monkeypatch.setattr(worker.engine, "forward", some)
        first = await submit(pool, "a" * 3 * CHUNK)
        await computing(pool, first)
        bad, good = await submit(pool, "# is bad"), await submit(pool, "good", 5)
        with pytest.raises(RequestFailed, match="prefill failed 1 times"):
            await bad.result(10)
        assert (await good.result(10)).text == expected(b"good", 5)
        assert (await first.result(10)).text == expected(b"a" * 3 * CHUNK, 2)
        assert any(beside)


async def test_cancel_and_deadline_of_one_prompt_do_not_disturb_the_others(server: Server) -> None:
    async with LocalPool(server, lease_seconds=1.0, **OPTIONS) as pool:
        cancelled, late = await submit(pool, "c" * 30 * CHUNK), await submit(pool, "d" * 31 * CHUNK, timeout=1.0)
        await computing(pool, cancelled, late)
        kept = await submit(pool, "k" * 6 * CHUNK, 5)
        await until(lambda: _running(kept))
        await cancelled.cancel()
        with pytest.raises(RequestCancelled):
            await cancelled.result(2 * CHUNK_SECONDS + 1)
        with pytest.raises(DeadlineExceeded):
            await late.result(5)
        assert (await kept.result(10)).text == expected(b"k" * 6 * CHUNK, 5)
        worker = pool.workers["prefill"][0]
        assert worker.worker.counters["failed"] == 0
        await until(lambda: worker.engine.can_open(4 * 2**20 // 8))


async def test_a_lost_lease_of_one_prompt_does_not_disturb_the_others(server: Server) -> None:
    async with LocalPool(server, decode=0, lease_seconds=1.0, **OPTIONS) as pool:
        lost, kept = await submit(pool, "l" * 20 * CHUNK), await submit(pool, "k" * 4 * CHUNK, 1)
        await computing(pool, lost, kept)
        worker = pool.workers["prefill"][0]
        next(r for r in worker.worker._jobs.values() if r.job.id == lost.id).note("lost")
        assert (await kept.result(10)).text == expected(b"k" * 4 * CHUNK, 1)
        assert worker.worker.counters["fenced"] == 1
        assert worker.engine.computed < 10 * CHUNK
        await lost.cancel()
        await until(lambda: _ended(lost))


async def _ended(handle: Handle) -> bool:
    return (await handle.status()).state == "done"


async def test_a_drained_worker_gives_all_of_them_back_and_another_ends_them(server: Server) -> None:
    async with LocalPool(server, drain_seconds=0.2, **OPTIONS) as pool:
        handles = [await submit(pool, letter * 12 * CHUNK, 5) for letter in "abc"]
        await computing(pool, *handles)
        await pool.workers["prefill"][0].stop()
        assert [(await h.status()).state for h in handles] == ["queued"] * 3
        pool.add("prefill")
        for letter, handle in zip(b"abc", handles, strict=True):
            assert (await handle.result(20)).text == expected(bytes([letter]) * 12 * CHUNK, 5)


async def test_the_first_token_goes_out_before_the_blocks_of_its_forward_are_stored(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, decode=0, **OPTIONS) as pool:
        may_store = asyncio.Event()
        publish = KVTransfer.publish

        async def slow(self: KVTransfer, *args: object) -> None:
            await may_store.wait()
            await publish(self, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(KVTransfer, "publish", slow)
        long = await submit(pool, "a" * (2 * CHUNK - 5))  # its first chunk is not stored when its last is computed
        other = await submit(pool, "other")
        async with asyncio.timeout(10):
            for handle in (long, other):
                await first_token(handle)
        assert {(await h.status()).stage for h in (long, other)} == {"prefill"}
        may_store.set()
        await until(lambda: _in_decode(long))
        pool.add("decode")
        assert (await long.result(10)).text == expected(b"a" * (2 * CHUNK - 5), 2)


async def test_the_first_token_does_not_wait_for_its_blocks_to_be_made_but_its_slot_does(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, drain_seconds=0.1, **OPTIONS) as pool:
        may_export, export = threading.Event(), KVTransfer.export

        def slow(self: KVTransfer, *args: Any) -> Blocks:
            may_export.wait(10)
            return export(self, *args)

        monkeypatch.setattr(KVTransfer, "export", slow)
        worker = pool.workers["prefill"][0]
        handle = await submit(pool, "a" * 20, 5)
        async with asyncio.timeout(5):
            await first_token(handle)
        stopped = asyncio.create_task(worker.stop())
        async with asyncio.timeout(10):
            while (await handle.status()).state != "queued":  # given back
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert worker.engine._open  # memory that is being read is not given to others
        may_export.set()
        await stopped
        assert not worker.engine._open
        pool.add("prefill")
        assert (await handle.result(10)).text == expected(b"a" * 20, 5)


async def test_blocks_that_cannot_be_made_cost_an_attempt_of_their_own_prompt(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, **OPTIONS) as pool:
        export, failed = KVTransfer.export, []

        def broken(self: KVTransfer, slot: ScriptedSlot, *args: Any) -> Blocks:
            if slot.tokens[0] == ord("#") and not failed:
                failed.append(slot)
                raise RuntimeError("boom")
            return export(self, slot, *args)

        monkeypatch.setattr(KVTransfer, "export", broken)
        handles = [await submit(pool, text * 20, 5) for text in "a#b"]
        texts = [(await h.result(10)).text for h in handles]
        assert texts == [expected(text * 20, 5) for text in (b"a", b"#", b"b")]
        assert len(failed) == pool.workers["prefill"][0].worker.counters["failed"] == 1


async def _in_decode(handle: Handle) -> bool:
    return (await handle.status()).stage == "decode"


async def test_a_prompt_that_waited_takes_what_another_has_computed_meanwhile(server: Server) -> None:
    async with LocalPool(server, **OPTIONS) as pool:
        common = "system prompt ".ljust(4 * CHUNK, "s")
        one, two = await submit(pool, common + "one", 5), await submit(pool, common + "and two", 5)
        await computing(pool, one, two)
        results = [await one.result(10), await two.result(10)]
        assert [r.text for r in results] == [expected((common + own).encode(), 5) for own in ("one", "and two")]
        assert results[0].usage.cached_tokens == 0
        assert results[1].usage.cached_tokens >= CHUNK
        total = sum(r.usage.prompt_tokens - r.usage.cached_tokens for r in results)
        assert pool.workers["prefill"][0].engine.computed == total


async def test_timings_begin_with_a_prompts_own_first_chunk(server: Server) -> None:
    async with LocalPool(server, prefill=0, **OPTIONS) as pool:
        first, second = await submit(pool, "a" * 4 * CHUNK, 1), await submit(pool, "b" * 6 * CHUNK)
        pool.add("prefill")
        timings = [(await h.result(10)).timings for h in (first, second)]
        assert 3.5 * CHUNK_SECONDS <= timings[0].prefill_ms / 1000 < 8 * CHUNK_SECONDS
        assert timings[1].queue_ms / 1000 >= CHUNK_SECONDS
        assert timings[1].prefill_ms / 1000 >= 5.5 * CHUNK_SECONDS


async def test_two_workers_share_a_burst(server: Server) -> None:
    async with LocalPool(server, prefill=2, decode=0, **OPTIONS) as pool:
        await until(lambda: all(w.worker._joined for w in pool.workers["prefill"]))
        begun = time.monotonic()
        handles = [await submit(pool, letter * 4 * CHUNK, 1) for letter in "abcdefgh"]
        for letter, handle in zip(b"abcdefgh", handles, strict=True):
            assert (await handle.result(20)).text == expected(bytes([letter]) * 4 * CHUNK, 1)
        shares = sorted(w.engine.computed for w in pool.workers["prefill"])
        assert shares[0] >= 3 * 4 * CHUNK
        assert time.monotonic() - begun < 0.85 * 8 * 4 * CHUNK_SECONDS


async def test_an_idle_worker_gets_the_next_prompt_before_a_busy_one(server: Server) -> None:
    async with LocalPool(server, decode=0, **OPTIONS) as pool:
        long = await submit(pool, "a" * 40 * CHUNK, 1)
        await computing(pool, long)
        idle = pool.add("prefill")
        await until(lambda: idle.worker._joined)
        for i in range(6):
            await ask(pool, f"number {i}", 1)
            await asyncio.sleep(0.01)
        assert idle.worker.counters["claimed"] >= 5
        await long.cancel()
