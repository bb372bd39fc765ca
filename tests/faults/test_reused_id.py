"""An id is submitted again after Redis has evicted one of the two keys of its ended request, and kept the other.

`volatile-lru` evicts each key by itself: a reply stream that was read late outlives its request, and a request that was
looked at late outlives its reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import redis

from pdq.client import AsyncClient, Handle
from pdq.config import RedisSettings
from pdq.errors import IdConflict, Unavailable
from pdq.keys import Keys
from pdq.messages import Event, Handoff, Usage
from tests.faults.audit import expected, reply
from tests.faults.owners import Owners
from tests.faults.pool import read, submit, text_of, until
from tests.faults.test_redis_loss import full
from tests.hygiene import end_all
from tests.pipeline.local import LocalPool
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("quick_drain")

KEYS = Keys("default")
COUNT = 200  # ended requests, of which the server evicts a few
REAL = pytest.mark.parametrize("any_server", ["valkey9", "redis7", "redis6"], indirect=True)
KeyOf = Callable[[str], str]


async def half_evicted(direct: redis.Redis, ids: list[str], evicted: KeyOf, kept: KeyOf) -> str:
    """Let the server evict until one of the ended requests has lost the one key and has the other; its id."""
    await until(lambda: min(direct.object("idletime", evicted(i)) for i in ids) >= 1)
    assert direct.touch(*map(kept, ids)) == len(ids)
    limit = direct.info("memory")["used_memory"]
    direct.config_set("maxmemory-policy", "volatile-lru")
    try:
        while True:
            limit -= 4096
            direct.config_set("maxmemory", limit)
            pipe = direct.pipeline(transaction=False)
            for i in ids:
                pipe.exists(evicted(i)).exists(kept(i))
            found = pipe.execute()
            if half := [
                i for i, pair in zip(ids, zip(found[::2], found[1::2], strict=True), strict=True) if pair == (0, 1)
            ]:
                return half[0]
    finally:
        direct.config_set("maxmemory", 0)
        direct.config_set("maxmemory-policy", "noeviction")


async def ended(client: AsyncClient, **options: object) -> dict[str, str]:
    """Ids and answers of many requests that have ended."""
    handles = [await client.submit(prompt=f"old {i}", max_tokens=6, id=f"id-{i}", **options) for i in range(COUNT)]
    results = await asyncio.gather(*(handle.result(60) for handle in handles))
    return {result.id: result.text for result in results}


async def test_an_id_whose_request_was_evicted_is_answered_anew_and_not_with_the_old_reply(server: Server) -> None:
    async with LocalPool(server) as pool:
        old = await ended(pool.client)
        with server.client() as direct:
            name = await half_evicted(direct, [*old], KEYS.request, KEYS.out)
            handle = await submit(pool.client, "the new prompt", 9, id=name)
            assert text_of(await read(handle)) == expected(b"the new prompt", 9)
            found = reply(direct, KEYS, name)
            assert (found.text, found.faults) == (expected(b"the new prompt", 9), ())
            assert direct.hmget(KEYS.request(name), "attempt", "tries", "reason") == [b"2", b"1", b"length"]
            assert 0 < direct.pttl(KEYS.out(name)) <= 600_000


@REAL
async def test_the_reply_stream_of_a_reused_id_is_empty_and_lives_as_long_as_its_request(any_server: Server) -> None:
    async with Owners(any_server) as owners:
        prefill = owners.queue("prefill", "p")
        for i in range(COUNT):
            await owners.client.submit(prompt="old", id=f"id-{i}")
            assert await prefill.write([(await owners.take(prefill), Event(0, (7,), "a", "stop", Usage(1, 1)))]) == [
                "ok"
            ]
        with any_server.client() as direct:
            name = await half_evicted(direct, [f"id-{i}" for i in range(COUNT)], KEYS.request, KEYS.out)
            await owners.client.submit(prompt="new", id=name)
            assert direct.exists(KEYS.out(name)) == 0
            job = await owners.take(prefill)
            assert await prefill.hand_off(job, Handoff((1,), 1, bytes(32), 4), Event(0, (8,), "b")) == 1
            assert reply(direct, KEYS, name).tokens == (8,)
            assert direct.pttl(KEYS.out(name)) == direct.pttl(KEYS.request(name)) == -1
            assert await owners.load() == {"queued": 0, "held": 1}
            end_all(direct)


async def test_an_evicted_answer_is_computed_again_for_a_client_that_submits_again(server: Server) -> None:
    """The same text again: a reader that has had a part of the first answer may go on reading."""
    async with LocalPool(server) as pool:
        old = await ended(pool.client, temperature=1.0)
        assert len(set(old.values())) == COUNT  # each has a seed of its own
        with server.client() as direct:
            name = await half_evicted(direct, [*old], KEYS.out, KEYS.request)
            with pytest.raises(Unavailable, match="lost the reply"):  # nobody asks for it to run again
                await pool.client.attach(name).result(10)
            with pytest.raises(IdConflict):
                await pool.client.submit(prompt="another", max_tokens=6, id=name)
            number = name.removeprefix("id-")
            again = await pool.client.submit(prompt=f"old {number}", max_tokens=6, id=name, temperature=1.0)
            assert (await again.result(10)).text == old[name]
            assert reply(direct, KEYS, name).faults == ()
            rest = text_of([e async for e in pool.client.attach(name).stream(3)])
            assert old[name].endswith(rest)
            assert len(rest) >= 3


async def test_a_request_that_runs_again_keeps_nothing_of_its_first_run(server: Server) -> None:
    async with Owners(server) as owners:
        prefill = owners.queue("prefill", "p")
        await owners.client.submit(prompt="hi", id="a")
        assert await prefill.write([(await owners.take(prefill), Event(0, (7,), "a", "stop", Usage(1, 1)))]) == ["ok"]
        await owners.client.submit(prompt="hi", id="a")  # its answer is there: nothing runs
        assert await owners.load() == {"queued": 0}
        with server.client() as direct:
            direct.delete(KEYS.out("a"))
            await owners.client.submit(prompt="hi", id="a")
            left = direct.hgetall(KEYS.request("a"))
            assert (left[b"state"], left[b"attempt"], left[b"pos"]) == (b"queued", b"0", b"0")
            assert not left.keys() & {b"reason", b"t_end", b"claim"}
            assert direct.pttl(KEYS.request("a")) == -1
            await owners.client.submit(prompt="hi", id="a")  # it is queued, and has no reply yet
            assert direct.xlen(KEYS.prefill("normal")) == 1
            await owners.take(prefill)
            await owners.client.submit(prompt="hi", id="a")  # or runs
            assert direct.xlen(KEYS.prefill("normal")) == 1
            end_all(direct)


@REAL
async def test_a_submit_that_a_full_redis_refuses_removes_nothing(any_server: Server) -> None:
    async with Owners(any_server) as owners:
        with any_server.client() as direct:
            direct.xadd(KEYS.out("a"), {"e": "old"}, id="1-0")
            direct.pexpire(KEYS.out("a"), 60_000)
            with full(any_server), pytest.raises(Unavailable, match="maxmemory"):
                await owners.client.submit(prompt="hi", id="a")
            assert direct.keys("*:req:*") == []
            assert direct.xlen(KEYS.out("a")) == 1
            assert direct.exists(KEYS.prefill("normal"), KEYS.load) == 0


async def test_a_reply_whose_request_was_evicted_is_read_until_the_id_is_used_again(server: Server) -> None:
    async with AsyncClient(RedisSettings(redis_url=server.url)) as client, LocalPool(server):
        handle: Handle = await submit(client, "read late", 9)
        assert text_of(await read(handle)) == expected(b"read late", 9)
        with server.client() as direct:
            direct.delete(KEYS.request(handle.id))
        assert text_of(await read(client.attach(handle.id))) == expected(b"read late", 9)
