"""Queue timeout and total timeout by the clock of Redis, in each state, with and without workers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pdq.client import AsyncClient, Handle
from pdq.config import RedisSettings
from pdq.errors import DeadlineExceeded
from pdq.messages import LANES, Event, Usage
from tests.faults.owners import Owners
from tests.faults.programs import Programs
from tests.pipeline.local import LocalPool
from tests.pipeline.test_pipeline import ask, expected
from tests.servers import Server

NO_WORKER = "no worker took the request within its queue timeout"
DEADLINE = "the request's deadline has passed"
pytestmark = pytest.mark.usefixtures("quick_drain")

SLACK = 3.0  # seconds: a machine that is busy with other tests, besides what the product itself takes


@pytest.fixture(autouse=True)
def _quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader looks after a silent request every 0.1 s, and leaves 0.2 s to the workers to end it."""
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("pdq.client.OVERDUE_GRACE_MS", 200)


async def ends(handle: Handle, text: str, after: float) -> None:
    """The request ends with this sentence, `after` seconds from now and not before."""
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded) as late:
        await handle.result(after + 10)
    assert late.value.message == text
    assert after - 0.3 < time.monotonic() - started < after + SLACK
    status = await handle.status()
    assert (status.stage, status.state) == ("done", "done")


async def until(handle: Handle, stage: str, state: str, tokens: int = 0) -> None:
    async with asyncio.timeout(15):
        while (s := await handle.status()).stage != stage or s.state != state or s.tokens < tokens:
            await asyncio.sleep(0.01)


async def test_without_any_worker_its_reader_ends_a_request(any_server: Server) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"timeout": 0.4}, DEADLINE),
        ({"queue_timeout": 0.4}, NO_WORKER),
        ({"timeout": 0.4, "queue_timeout": 30.0}, DEADLINE),
        ({"timeout": 30.0, "queue_timeout": 0.4}, NO_WORKER),
    ]
    async with AsyncClient(RedisSettings(redis_url=any_server.url)) as client:
        submitted = [(await client.submit(prompt="hi", **options), text) for options, text in cases]
        await asyncio.gather(*(ends(handle, text, 0.4) for handle, text in submitted))


async def test_requests_behind_others_end_in_time_and_cost_no_work(server: Server) -> None:
    async with LocalPool(server, engine="scripted:prefill_us=50000", prefill_chunk_tokens=8) as pool:
        # Each takes a second and a half of prefill; a worker claims no more of this kind.
        first = [await pool.client.submit(prompt=letter * 30, max_tokens=2) for letter in "xyz"]
        for handle in first:
            await until(handle, "prefill", "running")
        behind = []
        for lane in LANES:
            for options, text in (({"timeout": 0.5}, DEADLINE), ({"queue_timeout": 0.5}, NO_WORKER)):
                behind.append((await pool.client.submit(prompt="late", lane=lane, **options), text))  # type: ignore[arg-type]
        await asyncio.gather(*(ends(handle, text, 0.5) for handle, text in behind))
        await asyncio.gather(*(handle.result(15) for handle in first))
        assert pool.workers["prefill"][0].worker.counters["claimed"] == len(first)


async def test_the_batch_lane_waits_for_the_others_for_as_long_as_its_timeout_allows(server: Server) -> None:
    async with LocalPool(server, engine="scripted:prefill_us=20000") as pool:
        patient = await pool.client.submit(prompt="patient", max_tokens=3, temperature=0, lane="batch", timeout=60.0)
        hasty = await pool.client.submit(prompt="hasty", lane="batch", timeout=0.5)
        busy = [asyncio.create_task(ask(pool, f"number {i} first", 2, lane="normal")) for i in range(8)]
        await ends(hasty, DEADLINE, 0.5)
        assert (await patient.result(20)).text == expected(b"patient", 3)
        await asyncio.gather(*busy)


async def test_the_queue_timeout_is_over_once_a_worker_has_taken_the_request(server: Server) -> None:
    async with LocalPool(server, engine="scripted:prefill_us=20000", decode=0) as pool:
        handle = await pool.client.submit(prompt="x" * 50, max_tokens=3, temperature=0, queue_timeout=0.5)
        await until(handle, "decode", "queued")  # a second of prefill later
        await asyncio.sleep(0.3)
        pool.add("decode")
        assert (await handle.result(10)).text == expected(b"x" * 50, 3)


async def test_the_queue_timeout_is_over_for_a_request_that_a_draining_worker_gave_back(server: Server) -> None:
    async with LocalPool(server, engine="scripted:prefill_us=30000", prefill_chunk_tokens=4, drain_seconds=0.0) as pool:
        handle = await pool.client.submit(prompt="x" * 20, max_tokens=3, temperature=0, queue_timeout=0.4)
        await until(handle, "prefill", "running")
        await pool.workers["prefill"][0].stop()
        assert (await handle.status()).state == "queued"
        await asyncio.sleep(0.5)
        pool.add("prefill")
        assert (await handle.result(10)).text == expected(b"x" * 20, 3)


async def test_the_deadline_ends_a_request_while_it_is_prefilled(server: Server) -> None:
    options = {"engine": "scripted:prefill_us=20000", "prefill_chunk_tokens": 4, "lease_seconds": 0.8}
    async with LocalPool(server, **options) as pool:
        handle = await pool.client.submit(prompt="x" * 500, timeout=0.7)
        await until(handle, "prefill", "running")
        await ends(handle, DEADLINE, 0.6)
        stopped = pool.workers["prefill"][0].engine.computed
        assert stopped < 200
        assert (await ask(pool, "next", 2)).text == expected(b"next", 2)
        assert pool.workers["prefill"][0].engine.computed <= stopped + 8


async def test_the_deadline_ends_a_request_between_the_stages(server: Server) -> None:
    async with LocalPool(server, decode=0) as pool:
        handle = await pool.client.submit(prompt="hello", timeout=0.8)
        await until(handle, "decode", "queued")
        await ends(handle, DEADLINE, 0.7)


async def test_the_deadline_ends_a_request_that_waits_for_kv_memory(server: Server) -> None:
    """Claimed, but not in the batch: another one fills the decode worker's memory."""
    options = {"decode_kv_memory": "1KiB", "max_model_len": 128, "lease_seconds": 0.8}
    async with LocalPool(server, engine="scripted:step_ms=15", **options) as pool:
        full = await pool.client.submit(prompt="x", max_tokens=100, temperature=0)
        await until(full, "decode", "running", 2)
        handle = await pool.client.submit(prompt="y", max_tokens=100, timeout=0.8)
        await until(handle, "decode", "running")
        await ends(handle, DEADLINE, 0.6)
        assert (await full.result(20)).text == expected(b"x", 100)


async def test_the_deadline_ends_a_request_while_it_is_decoded(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=20", lease_seconds=0.8) as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=4000, timeout=0.9)
        await until(handle, "decode", "running", 5)
        await ends(handle, DEADLINE, 0.6)
        assert (await ask(pool, "next", 2)).text == expected(b"next", 2)


async def test_the_deadline_ends_a_request_whose_worker_died(server: Server) -> None:
    async with LocalPool(server, engine="scripted:step_ms=20") as pool:
        handle = await pool.client.submit(prompt="hello", max_tokens=4000, timeout=1.0)
        await until(handle, "decode", "running", 5)
        await pool.workers["decode"][0].die()
        await ends(handle, DEADLINE, 0.7)


async def test_clocks_an_hour_off_matter_nowhere(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill an hour ahead, decode and client an hour behind of Redis."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "true, skew = time.time, float(os.environ['CLOCK_SKEW'])\n"
        "time.time = lambda: true() + skew\n"
        "time.time_ns = lambda: int((true() + skew) * 1e9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Programs(server, engine="scripted:step_ms=10", lease_seconds=1.0, block_size=4) as programs:
        for stage, skew in (("prefill", "3600"), ("decode", "-3600")):
            monkeypatch.setenv("CLOCK_SKEW", skew)
            programs.start(stage)
        true = time.time
        monkeypatch.setattr(time, "time", lambda: true() - 3600)
        async with AsyncClient(RedisSettings(redis_url=server.url)) as client:
            options = {"max_tokens": 20, "temperature": 0, "timeout": 30.0, "queue_timeout": 20.0}
            handle = await client.submit(prompt="a prompt of two blocks", **options)  # type: ignore[arg-type]
            result = await handle.result(20)
            assert result.text == expected(b"a prompt of two blocks", 20)
            again = await (await client.submit(prompt="a prompt of two blocks", **options)).result(20)  # type: ignore[arg-type]
            assert (again.text, again.usage.cached_tokens) == (result.text, 20)
            assert 0 <= again.timings.queue_ms < 10_000
            assert 0 <= again.timings.handoff_ms < 10_000
            assert {w.stage for w in await client.workers()} == {"prefill", "decode"}
            handle = await client.submit(prompt="hello", max_tokens=4000, timeout=1.0)
            await until(handle, "decode", "running", 5)
            await ends(handle, DEADLINE, 0.8)


async def test_no_token_shows_after_the_deadline_but_a_complete_answer_still_counts(
    any_server: Server,
) -> None:
    async with Owners(any_server) as owners:
        prefill = owners.queue("prefill", "p")
        await prefill.make_groups()
        for complete in (False, True):
            handle = await owners.client.submit(prompt="hi")
            job = await owners.take(prefill)
            assert await prefill.write([(job, Event(0, (7,), "a"))]) == ["ok"]
            await owners.redis.hset(owners.keys.request(job.id), "deadline", 1)
            assert await prefill.write([(job, Event(1, (8,), "b"))]) == ["expired"]
            if complete:
                assert await prefill.write([(job, Event(1, (8,), "b", "stop", Usage(1, 2)))]) == ["ok"]
                assert (await handle.result(5)).text == "ab"
            else:
                await prefill.end(job, DeadlineExceeded(DEADLINE))
                with pytest.raises(DeadlineExceeded):
                    await handle.result(5)
                assert (await handle.status()).tokens == 1
