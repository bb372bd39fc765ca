"""A worker whose engine hangs: its jobs go to others, it takes no more, and it serves on when it moves again."""

from __future__ import annotations

import asyncio

import pytest

from pdq.client import Handle
from pdq.errors import RequestFailed
from pdq.messages import WorkerInfo, decode
from tests.faults.audit import expected, reply
from tests.faults.pool import read, submit, text_of, until
from tests.pipeline.local import LocalPool, LocalWorker
from tests.servers import Server

OPTIONS = {"lease_seconds": 0.6, "stall_seconds": 1.0}
HANG = "scripted:hang_on=33,hang_ms="  # "!"


@pytest.fixture(autouse=True)
def quick_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.worker.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)


def state(server: Server, worker: LocalWorker) -> str:
    """What the worker's heartbeat says."""
    with server.client() as client:
        data = client.get(worker.worker.keys.worker(worker.worker.name))
    return decode(WorkerInfo, data).state if data else ""


async def test_a_hung_decode_worker_loses_its_jobs_takes_no_more_and_serves_on_later(server: Server) -> None:
    async with LocalPool(server, decode_engine=HANG + "4000", **OPTIONS) as pool:
        hung = pool.workers["decode"][0]
        prompts = ["hang!"]
        handles = [await submit(pool.client, prompts[0], 9)]
        await until(lambda: hung.engine.forwards == 1)
        while state(server, hung) != "stalled":  # new jobs do not hide that nothing moves
            prompts.append(f"number {len(prompts)}")
            handles.append(await submit(pool.client, prompts[-1], 9))
            await asyncio.sleep(0.2)
        await asyncio.sleep(0.5)  # a read that had begun before may still bring something
        claimed = hung.worker.counters["claimed"]
        late = await submit(pool.client, "after the stall", 9)
        await in_decode(late)
        other = pool.add("decode", engine="scripted")
        assert [text_of(await read(h)) for h in handles] == [expected(p.encode(), 9) for p in prompts]
        assert text_of(await read(late)) == expected(b"after the stall", 9)
        assert hung.engine.forwards == 1  # all this while it hung
        assert hung.worker.counters["claimed"] == claimed > 1
        assert (await late.status()).attempt == 2
        await until(lambda: state(server, hung) == "ready")
        await until(lambda: hung.worker.counters["fenced"] == claimed)
        await other.stop()
        assert (await (await submit(pool.client, "again", 9)).result(20)).text == expected(b"again", 9)
        with server.client() as client:
            assert all(reply(client, pool.client.keys, h.id).faults == () for h in handles)


async def in_decode(handle: Handle) -> None:
    async with asyncio.timeout(20):
        while (await handle.status()).stage != "decode":
            await asyncio.sleep(0.005)


@pytest.mark.slow
async def test_a_request_that_hangs_every_worker_is_a_dead_letter_in_the_end(server: Server) -> None:
    async with LocalPool(server, prefill=2, prefill_engine=HANG + "2500", max_attempts=2, **OPTIONS) as pool:
        bad = await submit(pool.client, "hang!", 9)
        with pytest.raises(RequestFailed, match="prefill was tried 2 times"):
            await bad.result(30)
        with server.client() as client:
            ((_, letter),) = client.xrange(pool.client.keys.dead)
        assert (letter[b"id"].decode(), letter[b"tries"]) == (bad.id, b"2")
        good = await submit(pool.client, "good", 9)
        assert (await good.result(30)).text == expected(b"good", 9)
