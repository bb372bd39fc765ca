"""A request that ends the process that computes it is a dead letter in the end, and the only one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdq.errors import RequestFailed
from tests.faults.audit import expected
from tests.faults.pool import Pool, read, submit, text_of, until
from tests.faults.programs import Program
from tests.pipeline.local import LocalPool
from tests.servers import Server

COUNT = 20
INNOCENT = [f"innocent {i}" for i in range(4)]


@pytest.fixture
def pool() -> Iterator[Pool]:
    crash = f"crash_on={ord('#')}"
    pool = Pool("prefill", decode_engine=f"scripted:step_ms=20,{crash}", lease_seconds=0.5)
    try:
        yield pool
    finally:
        pool.close()


async def keep_two_running(pool: Pool, group: list[Program]) -> None:
    while True:
        alive = [p for p in group if p.poll() is None]
        group += [pool.start("decode") for _ in range(2 - len(alive))]
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_poisoned_request_does_not_take_its_neighbours_along(pool: Pool) -> None:
    async with pool.client() as client:
        good = [await submit(client, prompt, COUNT) for prompt in INNOCENT]
        bad = await submit(client, "poison #", COUNT)
        await until(lambda: pool.redis.xlen(pool.keys.decode) == 5)  # one worker will take them all
        group: list[Program] = []
        keeper = asyncio.create_task(keep_two_running(pool, group))
        try:
            with pytest.raises(RequestFailed, match="decode was tried 3 times; the worker died each time"):
                await read(bad)
            assert [text_of(await read(h)) for h in good] == [expected(p.encode(), COUNT) for p in INNOCENT]
        finally:
            keeper.cancel()
        assert sum(p.poll() == 137 for p in group) == 3
        assert pool.redis.xlen(pool.keys.dead) == 1
        assert max([(await h.status()).attempt for h in good]) > 2  # it did take them along at first
        await pool.at_rest()


async def test_of_the_jobs_that_failed_twice_a_worker_takes_one_at_a_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)
    options = {"decode_engine": "scripted:step_ms=10", "lease_seconds": 0.5}
    async with LocalPool(server, **options) as pool:
        handles = [await submit(pool.client, prompt, 40) for prompt in INNOCENT]
        old = pool.workers["decode"][0]
        await until(lambda: len(old.worker._jobs) == 4 and old.engine.forwards > 3)
        await old.die()
        with server.client() as client:
            for handle in handles[1:]:
                client.hset(pool.client.keys.request(handle.id), "tries", 2)
        new = pool.add("decode")
        reading = asyncio.gather(*map(read, handles))
        together: set[frozenset[int]] = set()
        while not reading.done():
            running = {r.job.id for r in new.worker._jobs.values()}
            together.add(frozenset(i for i, h in enumerate(handles) if h.id in running))
            await asyncio.sleep(0.002)
        assert [text_of(e) for e in await reading] == [expected(p.encode(), 40) for p in INNOCENT]
        assert all(len(numbers - {0}) <= 1 for numbers in together)
        assert any(len(numbers) == 2 for numbers in together)
