"""An outage of Redis that ends within a lease costs no attempt, however often it happens."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdq.queue import Job, Queue
from tests.faults.audit import expected
from tests.faults.pool import submit, until
from tests.faults.proxy import Proxy
from tests.pipeline.local import LocalPool
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("quick_drain")

LEASE = 60.0  # nothing here may wait for the end of a lease
DELAY = 0.1


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.worker.OUTAGE_DELAY", DELAY)


def hash_of(server: Server, pool: LocalPool, request_id: str, *fields: str) -> list[bytes | None]:
    with server.client() as client:
        assert client.xlen(pool.client.keys.dead) == 0
        return client.hmget(pool.client.keys.request(request_id), fields)  # type: ignore[return-value]


async def test_a_job_that_meets_an_outage_is_given_back_when_redis_answers(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted, away = Queue.emitted, asyncio.Event()

    async with Proxy(server.port) as proxy:

        async def cut_off(self: Queue, job: Job) -> list[int]:
            if self.stage == "decode" and not away.is_set():
                away.set()
                proxy.refuse()
                proxy.cut()
            return await emitted(self, job)

        monkeypatch.setattr(Queue, "emitted", cut_off)
        async with LocalPool(proxy, lease_seconds=LEASE) as pool:  # type: ignore[arg-type]
            handle = await submit(pool.client, "met by an outage", 9)
            await away.wait()
            await asyncio.sleep(5 * DELAY)  # the first tries to give it back fail
            await proxy.listen()
            assert (await handle.result(20)).text == expected(b"met by an outage", 9)
            # prefill's attempt and two of decode, the first of which does not count
            assert hash_of(server, pool, handle.id, "attempt", "tries") == [b"3", b"1"]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_an_outage_of_the_blocks_redis_is_waited_out_without_haste_or_charge(server: Server, stage: str) -> None:
    """The queue's Redis answers, so that the job is claimed again and again, more often than a job may be tried."""
    async with (
        Proxy(server.port) as proxy,
        LocalPool(server, lease_seconds=LEASE, **{f"{stage}_kv_url": proxy.url}) as pool,
    ):
        proxy.refuse()
        proxy.cut()
        started = time.monotonic()
        handle = await submit(pool.client, "blocks out of reach", 9)
        (worker,) = pool.workers[stage]
        most = worker.settings.max_attempts
        await until(lambda: worker.worker.counters["claimed"] > most)
        assert time.monotonic() - started > most * DELAY
        await proxy.listen()
        assert (await handle.result(20)).text == expected(b"blocks out of reach", 9)
        assert hash_of(server, pool, handle.id, "tries") == [b"1"]
