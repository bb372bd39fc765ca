"""A worker whose engine hangs: its jobs go to others, it takes no more, and it serves on when it moves again."""

from __future__ import annotations

import asyncio

import pytest

from pdq.errors import RequestFailed
from pdq.messages import WorkerInfo, decode
from tests.faults.audit import expected, reply
from tests.faults.pool import read, submit, text_of, until
from tests.pipeline.local import LocalPool, LocalWorker
from tests.servers import Server

OPTIONS = {"lease_seconds": 0.6, "stall_seconds": 1.0}
HANG = "scripted:hang_on=33,hang_ms="  # "!"


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.worker.BEAT_SECONDS", 0.05)


def state(server: Server, worker: LocalWorker) -> str:
    """What the worker's heartbeat says."""
    with server.client() as client:
        data = client.get(worker.worker.keys.worker(worker.worker.name))
    return decode(WorkerInfo, data).state if data else ""


async def test_a_hung_decode_worker_loses_its_jobs_takes_no_more_and_serves_on_later(server: Server) -> None:
    async with LocalPool(server, decode_engine=HANG + "4000", **OPTIONS) as pool:
        hung = pool.workers["decode"][0]
        handles = [await submit(pool.client, prompt, 9) for prompt in ("hang!", "its neighbour")]
        await until(lambda: hung.engine.forwards == 1)
        await until(lambda: state(server, hung) == "stalled")
        late = await submit(pool.client, "after the stall", 9)
        await until(lambda: pool.workers["prefill"][0].worker.counters["claimed"] == 3)
        claimed = hung.worker.counters["claimed"]
        other = pool.add("decode", engine="scripted")
        texts = [text_of(await read(h)) for h in (*handles, late)]
        assert texts == [expected(p, 9) for p in (b"hang!", b"its neighbour", b"after the stall")]
        assert hung.engine.forwards == 1  # all this while it hung
        assert hung.worker.counters["claimed"] == claimed <= 2
        assert (await late.status()).attempt == 2
        await until(lambda: state(server, hung) == "ready")
        await until(lambda: hung.worker.counters["fenced"] == claimed)
        await other.stop()
        assert (await (await submit(pool.client, "again", 9)).result(20)).text == expected(b"again", 9)
        with server.client() as client:
            assert [reply(client, pool.client.keys, h.id).faults for h in handles] == [(), ()]


async def test_new_jobs_do_not_hide_that_nothing_moves(server: Server) -> None:
    async with LocalPool(server, decode_engine=HANG + "4000", **OPTIONS) as pool:
        hung = pool.workers["decode"][0]
        handles = [await submit(pool.client, "hang!", 9)]
        await until(lambda: hung.engine.forwards == 1)

        async def keep_coming() -> None:
            while state(server, hung) != "stalled":
                handles.append(await submit(pool.client, f"number {len(handles)}", 9))
                await asyncio.sleep(0.3)

        await asyncio.wait_for(keep_coming(), 3.5)
        pool.add("decode", engine="scripted")
        for handle in handles:
            await read(handle)


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
