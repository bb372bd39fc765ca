"""One stream, hash or group after another vanishes under a working pool: what can be told from the rest goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import redis

from pdq import connection
from pdq.errors import ConfigError, Unavailable
from pdq.keys import GROUP, Keys
from tests.faults.audit import expected
from tests.faults.pool import submit, until
from tests.faults.work import RIGHT, begin, healed, reading, text, texts
from tests.pipeline.local import LocalPool
from tests.servers import Server

SLOW = pytest.mark.slow
LEASE = 0.5
KEYS = Keys("default")
OPTIONS = {
    "engine": "scripted:step_ms=3,prefill_us=500",
    "lease_seconds": LEASE, "decode_max_batch": 1, "prefill_chunk_tokens": 32,
}  # fmt: skip


@pytest.fixture
async def pool(server: Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalPool]:
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.2)
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)  # the workers end sooner
    async with LocalPool(server, **OPTIONS) as started:
        yield started
        await healed(server, started.client)
        assert not any(w.task.done() for group in started.workers.values() for w in group)


def destroy(direct: redis.Redis, stream: str) -> None:
    assert direct.xgroup_destroy(stream, GROUP) == 1


def delete(direct: redis.Redis, key: str) -> None:
    assert direct.delete(key) == 1


LANE, DECODE, INDEX = KEYS.prefill("normal"), KEYS.decode, "index"
HARMLESS = [
    pytest.param(delete, LANE, id="prefill stream"),
    pytest.param(delete, DECODE, id="decode stream", marks=SLOW),
    pytest.param(destroy, LANE, id="prefill group", marks=SLOW),
    pytest.param(destroy, DECODE, id="decode group", marks=SLOW),
    pytest.param(delete, KEYS.load, id="load"),
    pytest.param(delete, KEYS.cancels, id="cancels", marks=SLOW),
    pytest.param(delete, INDEX, id="index of blocks", marks=SLOW),
]


@pytest.mark.parametrize(("loss", "key"), HARMLESS)
async def test_a_lost_stream_group_or_sum_costs_no_request(pool: LocalPool, server: Server, loss, key: str) -> None:
    handles = await begin(pool.client)
    readers = reading(handles)
    with server.client() as direct:
        if key == KEYS.cancels:
            direct.xadd(key, {"id": "none"})
        if key == INDEX:
            (key,) = direct.scan_iter("pdq:kv:*:index")
        loss(direct, key)
    assert await texts(readers) == RIGHT


@pytest.mark.parametrize(
    "victim", ["decoding", *(pytest.param(w, marks=SLOW) for w in ("between", "prefilling", "queued"))]
)
async def test_a_lost_request_is_told_to_its_reader_and_harms_no_other(
    pool: LocalPool, server: Server, victim: str
) -> None:
    handles = await begin(pool.client)
    readers = reading(handles)
    with server.client() as direct:
        delete(direct, KEYS.request(handles[victim].id))
    fault = time.monotonic()
    with pytest.raises(Unavailable, match="lost the request"):
        await readers.pop(victim)
    assert time.monotonic() - fault < LEASE + 5
    assert await texts(readers) | {victim: RIGHT[victim]} == RIGHT


async def test_a_lost_reply_stream_never_shows_as_a_text_with_a_hole(pool: LocalPool, server: Server) -> None:
    handles = await begin(pool.client)
    readers = reading(handles)
    with server.client() as direct:
        delete(direct, KEYS.out(handles["decoding"].id))
    late = asyncio.create_task(text(handles["decoding"]))
    early = readers.pop("decoding")
    assert await texts(readers) | {"decoding": RIGHT["decoding"]} == RIGHT
    with pytest.raises(Unavailable, match="lost a part of the reply"):
        await late
    ended = await asyncio.gather(early, return_exceptions=True)
    assert ended == [RIGHT["decoding"]] or isinstance(ended[0], Unavailable)  # it may have read all that was lost


async def test_a_reply_stream_lost_after_the_end_is_told(pool: LocalPool, server: Server) -> None:
    handle = await submit(pool.client, "answered", 5)
    await text(handle)
    with server.client() as direct:
        delete(direct, KEYS.out(handle.id))
    with pytest.raises(Unavailable, match="lost the reply"):
        await text(handle)


async def test_blocks_evicted_from_a_full_redis_are_made_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.1)
    prompt = "evicted between the stages"
    with server.client() as direct:
        async with LocalPool(server, decode=0) as pool:
            handle = await submit(pool.client, prompt, 10)
            await until(lambda: direct.hget(KEYS.request(handle.id), "stage") == b"decode")
            evict(direct, "pdq:kv:*")
            decode = pool.add("decode")
            assert await text(handle) == expected(prompt.encode(), 10)
            assert decode.stage.counters()["kv_requeued"] == 1


def evict(direct: redis.Redis, pattern: str) -> None:
    """Fill Redis until its volatile-lru policy has removed all keys of `pattern`."""
    direct.config_set("maxmemory-policy", "volatile-lru")
    direct.config_set("maxmemory", direct.info("memory")["used_memory"] + 100_000)
    try:
        junk = 0
        while list(direct.scan_iter(pattern)):
            junk += 1
            direct.set(f"junk:{junk}", b"x" * 1000, px=60_000)
    finally:
        direct.config_set("maxmemory", 0)
        direct.config_set("maxmemory-policy", "noeviction")
        direct.delete(*direct.scan_iter("junk:*"))


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "volatile-ttl", "volatile-lru", "noeviction"])
async def test_a_server_that_would_evict_the_wrong_keys_is_refused(server: Server, policy: str) -> None:
    """volatile-ttl takes what expires first: heartbeats, then results, and blocks last."""
    client = connection.command(server.url)
    await client.config_set("maxmemory-policy", policy)
    if policy in ("volatile-lru", "noeviction"):
        await connection.check_server(client, "queue")
    else:
        with pytest.raises(ConfigError, match=f"{policy} .*'CONFIG SET maxmemory-policy volatile-lru'"):
            await connection.check_server(client, "queue")
        await connection.check_server(client, "kv")
    await client.config_set("maxmemory-policy", "noeviction")
    await client.aclose()
