"""A request that ends the process that computes it is a dead letter in the end, and the only one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pdq.errors import RequestFailed
from tests.faults.audit import expected
from tests.faults.pool import Pool, read, submit, text_of, until
from tests.faults.programs import Program

COUNT = 20
INNOCENT = [f"innocent {i}" for i in range(4)]


pytestmark = pytest.mark.slow


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
