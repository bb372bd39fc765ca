"""Every kind of process dies or freezes while requests are in every state. Nobody notices more than a delay.

Each cell asserts: one end a request, the text of an undisturbed run, ended within a lease + 5 s of the fault, and a
pool at rest afterwards. The processes are shared by all cells; only the victim is replaced.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

import aiohttp
import pytest

from pdq.client import AsyncClient, Handle
from tests.faults import audit
from tests.faults.http_client import request_id, stream
from tests.faults.pool import LEASE, Pool, read, submit, text_of, until
from tests.faults.programs import Program

COUNT = 40  # tokens of an answer
REQUESTS = 6
BOUND = LEASE + 5.0  # seconds from the fault to the end of every request
NOMINAL = 2.0  # seconds of an undisturbed cell on a fast machine
STATES = ("queued", "prefilling", "between", "loading", "decoding", "finishing")
FAULTS = ("kill", "freeze")
VICTIMS = ("gateway", "prefill", "decode", "redis")
QUICK = {
    ("gateway", "kill", "decoding"),
    ("prefill", "freeze", "prefilling"),
    ("decode", "kill", "loading"),
    ("redis", "kill", "between"),
}
_numbers = itertools.count()


class Patient:
    """The pool, and how much slower than a fast machine this one is."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.slowness = 1.0
        self.second_gateway = pool.start("gateway")
        pool.programs.wait(self.second_gateway)


@pytest.fixture(scope="module")
def patient() -> Iterator[Patient]:
    # Prefill: 5 chunks, 100 ms. Decode: 2 loads, 200 ms, then 40 steps, 400 ms, two at a time; the rest wait between.
    pool = Pool(
        "gateway", "prefill", "decode",
        prefill_engine="scripted:step_ms=20", prefill_chunk_tokens=8,
        decode_engine="scripted:step_ms=10,load_ms=100", decode_max_batch=2, decode_flush_ms=5,
    )  # fmt: skip
    try:
        yield Patient(pool)
    finally:
        pool.close()


def prompts() -> list[str]:
    """New ones for each cell, so that no prefix is cached: the five chunks are computed."""
    return [f"cell {next(_numbers)} ".ljust(37, "abcdefg"[i % 7]) for i in range(REQUESTS)]


def in_state(pool: Pool, request_id: str, state: str) -> bool:
    names = ("stage", "state", "pos", "attempt")
    stage, running, pos, attempt = pool.redis.hmget(pool.keys.request(request_id), names)
    if stage is None or running == b"done":
        return False
    decoding, tokens = (stage, running) == (b"decode", b"running"), int(pos)
    return {
        "queued": (stage, running) == (b"prefill", b"queued"),
        "prefilling": (stage, running, attempt) == (b"prefill", b"running", b"1"),
        "between": (stage, running) == (b"decode", b"queued"),
        "loading": decoding and tokens == 1,
        "decoding": decoding and 3 <= tokens < COUNT - 8,
        "finishing": decoding and tokens >= COUNT - 4,
    }[state]


async def strike(patient: Patient, victim: str, fault: str) -> float:
    """Let the fault happen and be repaired; when the repair was under way (`time.time()`)."""
    pool, server = patient.pool, patient.pool.server
    if victim == "redis":
        if fault == "kill":
            server.kill()
            await asyncio.to_thread(server.start)
        else:
            server.freeze()
            await asyncio.sleep(1.5 * LEASE)
            server.freeze(False)
        return time.time()
    struck = time.time()
    old = pool.current[victim]
    if fault == "kill":
        old.kill()
        old.wait()
    else:
        old.freeze()
    pool.current[victim] = pool.start(victim)
    await asyncio.to_thread(pool.programs.wait, pool.current[victim])
    if fault == "freeze":
        await until(lambda: time.time() > struck + 1.5 * LEASE)
    return struck


async def thawed(patient: Patient, victim: str, frozen: Program) -> None:
    """Wake the frozen process and let it alone serve from now on."""
    replacement = patient.pool.current[victim]
    frozen.thaw()
    patient.pool.current[victim] = frozen
    assert await asyncio.to_thread(replacement.end) == 0


async def check(patient: Patient, ids: list[str], asked: list[str], struck: float) -> None:
    """The raw replies, the time of the ends, and the pool at rest."""
    pool = patient.pool
    for name, prompt in zip(ids, asked, strict=True):
        found = audit.reply(pool.redis, pool.keys, name)
        assert found.faults == ()
        assert found.text == audit.expected(prompt.encode(), COUNT)
        assert found.end is not None
        assert found.end.finish_reason == "length"
        took = int(pool.field(name, "t_end")) / 1000 - struck
        assert took < BOUND * patient.slowness
    await pool.at_rest()
    assert pool.redis.xlen(pool.keys.dead) == 0


async def run_undisturbed(patient: Patient, client: AsyncClient) -> None:
    """Once: the answers are right, and how long they take here."""
    started, asked = time.time(), prompts()
    handles = [await submit(client, p, COUNT) for p in asked]
    texts = [text_of(events) for events in await asyncio.gather(*map(read, handles))]
    assert texts == [audit.expected(p.encode(), COUNT) for p in asked]
    patient.slowness = max(1.0, (time.time() - started) / NOMINAL)


def cell(*where: str) -> object:
    return pytest.param(*where, marks=() if where in QUICK else pytest.mark.slow, id="-".join(where))


@pytest.mark.parametrize(("victim", "fault", "state"), [cell(*w) for w in itertools.product(VICTIMS, FAULTS, STATES)])
async def test_a_fault_costs_no_request_more_than_a_delay(
    patient: Patient, victim: str, fault: str, state: str
) -> None:
    pool = patient.pool
    async with pool.client() as client:
        if patient.slowness == 1.0:
            await run_undisturbed(patient, client)
        run = over_http if victim == "gateway" else over_redis
        await run(patient, client, victim, fault, state)


async def over_redis(patient: Patient, client: AsyncClient, victim: str, fault: str, state: str) -> None:
    pool, asked = patient.pool, prompts()
    handles: list[Handle] = [await submit(client, p, COUNT) for p in asked]
    readers = [asyncio.create_task(read(h)) for h in handles]
    await until(lambda: any(in_state(pool, h.id, state) for h in handles))
    old = pool.current.get(victim)
    owned = [h.id for h in handles if old is not None and pool.field(h.id, "owner") == old.name]
    struck = await strike(patient, victim, fault)
    texts = [text_of(events) for events in await asyncio.gather(*readers)]
    assert texts == [audit.expected(p.encode(), COUNT) for p in asked]
    if old is not None and fault == "freeze":
        await thawed(patient, victim, old)
        if owned:
            await until(lambda: pool.counter(old, "fenced") >= 1)
    await check(patient, [h.id for h in handles], asked, struck)


async def ask(http: aiohttp.ClientSession, url: str, prompt: str) -> tuple[str, str]:
    """The prompt is its own idempotency key."""
    return await stream(http, url, prompt, prompt=prompt, max_tokens=COUNT)


async def over_http(patient: Patient, client: AsyncClient, victim: str, fault: str, state: str) -> None:
    """A client whose gateway goes away asks another one under the same key, and gets the one answer from its start."""
    pool, asked = patient.pool, prompts()
    ids = [request_id(p) for p in asked]
    old = pool.current[victim]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        first = [asyncio.create_task(ask(http, old.url, p)) for p in asked]
        await until(lambda: all(pool.field(i, "stage") for i in ids))
        await until(lambda: any(in_state(pool, i, state) for i in ids))
        struck = await strike(patient, victim, fault)
        again = await asyncio.gather(*(ask(http, patient.second_gateway.url, p) for p in asked))
        assert again == [(f"cmpl-{i}", audit.expected(p.encode(), COUNT)) for i, p in zip(ids, asked, strict=True)]
        if fault == "freeze":
            await thawed(patient, victim, old)
        seen = await asyncio.gather(*first, return_exceptions=True)
    if fault == "freeze":
        assert seen == again
    else:
        assert all(isinstance(s, aiohttp.ClientError) or s in again for s in seen)
        assert any(isinstance(s, aiohttp.ClientError) for s in seen)
    await check(patient, ids, asked, struck)
