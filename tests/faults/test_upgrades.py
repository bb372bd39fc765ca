"""Workers of two versions on one Redis: each leaves alone what is newer than itself, and nothing is lost or refused.

A newer pdq is the same one with a higher version number; what it would have written is made by raising the number in
Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from pdq import connection, kv_transfer, messages, queue, scripts
from pdq.client import AsyncClient, Handle
from pdq.config import RedisSettings
from pdq.errors import DeadlineExceeded, RequestFailed
from pdq.keys import GROUP, Keys
from pdq.messages import VERSION, Event, Handoff, Request, SamplingParams, WorkerInfo, encode
from tests.faults.owners import Owners
from tests.faults.programs import Programs
from tests.hygiene import end_all
from tests.pipeline.local import LocalPool
from tests.pipeline.test_pipeline import ask, expected
from tests.servers import Server

pytestmark = pytest.mark.usefixtures("quick_drain")

NEWER = VERSION + 1
KEYS = Keys("default")
WATCHED = 1.5  # seconds that workers are watched while they have only a newer job


def newer(message: bytes) -> bytes:
    """`message` as a newer pdq would mark it."""
    assert message[1] == VERSION
    return message[:1] + bytes([NEWER]) + message[2:]


def make_values_newer(client: redis.Redis, part: str) -> None:
    """Raise the version in the header of every KV block or tail (part: "kv" or "tail")."""
    names = [k for k in client.scan_iter(f"pdq:{part}:*") if not k.endswith(b":index")]
    assert names
    for name in names:
        client.setrange(name, 4, (999).to_bytes(2, "little"))


@contextmanager
def upgraded() -> Iterator[None]:
    """Inside, this process is a newer pdq, workers included."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (messages, queue):
            patch.setattr(module, "VERSION", NEWER)
        yield


def make_newer(server: Server, handle: Handle, part: str) -> None:
    key = KEYS.request(handle.id)
    with server.client() as client:
        if part == "v":
            client.hset(key, "v", NEWER)
        else:
            client.hset(key, part, newer(client.hget(key, part)))


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the claims of each worker."""
    count: Counter[str] = Counter()
    run = scripts.Call.run

    async def counted(self: scripts.Call, redis: connection.AsyncRedis) -> Any:
        answer = await run(self, redis)
        if self.script is scripts.claim:
            count[str(self.args[2])] += len(answer)
        return answer

    monkeypatch.setattr(scripts.Call, "run", counted)
    return count


async def until_decode(handle: Handle) -> None:
    async with asyncio.timeout(20):
        while (await handle.status()).stage != "decode":
            await asyncio.sleep(0.01)


async def test_newer_jobs_are_left_alone_without_a_hot_loop_until_a_newer_worker_takes_them(
    server: Server, claims: Counter[str]
) -> None:
    """Newer in the hash's version, in the request's or in the handoff's."""
    async with LocalPool(server, decode=0) as pool:
        handles = {"handoff": await pool.client.submit(prompt="handoff", max_tokens=9, temperature=0)}
        await until_decode(handles["handoff"])
        await pool.workers["prefill"][0].stop()
        for part in ("v", "msg"):
            handles[part] = await pool.client.submit(prompt=part, max_tokens=9, temperature=0)
        for part, handle in handles.items():
            make_newer(server, handle, part)
        workers = [pool.add(stage).worker.name for stage in ("prefill", "decode") for _ in range(2)]
        started = time.monotonic()
        results = [await ask(pool, f"of today {i}", 5) for i in range(5)]  # others go on as ever
        assert [r.text for r in results] == [expected(f"of today {i}".encode(), 5) for i in range(5)]
        while time.monotonic() - started < WATCHED:
            await asyncio.sleep(0.1)
        for name in workers:
            # Each looks at one about once a second, and once at each that is new; then there are today's jobs.
            assert claims[name] <= 5 + len(handles) + 2 * (time.monotonic() - started + 1)
        states = {part: await handle.status() for part, handle in handles.items()}
        assert {part: (s.stage, s.state) for part, s in states.items()} == {
            "handoff": ("decode", "queued"), "v": ("prefill", "queued"), "msg": ("prefill", "queued"),
        }  # fmt: skip
        with upgraded():
            for part, handle in handles.items():
                assert (await handle.result(15)).text == expected(part.encode(), 9)
        with server.client() as client:
            for handle in handles.values():
                assert client.hget(KEYS.request(handle.id), "tries") == b"1"  # looking at it was no attempt
            assert client.xlen(KEYS.dead) == 0


async def test_what_old_workers_have_left_in_their_lists_is_taken_as_fast_as_anything_else(server: Server) -> None:
    async with Owners(server) as owners:
        old = owners.queue("prefill", "old")
        await old.make_groups()
        handles = [await owners.client.submit(prompt=f"no {i}", max_tokens=3, temperature=0) for i in range(30)]
        for handle in handles:
            make_newer(server, handle, "v")
        for _ in handles:
            assert await old.claim(*await old.read(1, 1)) is None
        with upgraded():
            async with LocalPool(server, lease_seconds=0.5):
                started = time.monotonic()
                texts = [(await h.result(30)).text for h in handles]
                assert texts == [expected(f"no {i}".encode(), 3) for i in range(30)]
                assert time.monotonic() - started < 3  # and not at one look of an eighth of a second each


async def test_a_newer_job_whose_client_leaves_or_whose_time_is_up_ends_without_a_newer_worker(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.client.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("pdq.client.OVERDUE_GRACE_MS", 100)
    async with LocalPool(server, prefill=0) as pool:
        left = await pool.client.submit(prompt="left")
        make_newer(server, left, "v")
        late = await pool.client.submit(prompt="late", timeout=0.5)
        make_newer(server, late, "v")
        pool.add("prefill")
        assert await left.cancel() is True
        assert (await left.status()).reason == "cancelled"
        with pytest.raises(DeadlineExceeded):
            await late.result(20)


@pytest.fixture
async def owners(any_server: Server) -> AsyncIterator[Owners]:
    async with Owners(any_server) as made:
        yield made
    with any_server.client() as client:
        end_all(client)


@pytest.fixture
def client(owners: Owners) -> AsyncClient:
    return owners.client


async def test_a_job_whose_dead_worker_wrote_newer_events_is_left_to_newer_workers(
    owners: Owners, client: AsyncClient
) -> None:
    dead, old = owners.queue("prefill", "dead"), owners.queue("prefill", "old")
    await dead.make_groups()
    handle = await client.submit(prompt="hi")
    (entry,) = await dead.read(1, 1)
    with upgraded():
        job = await dead.claim(entry)
        assert job is not None
        assert await dead.write([(job, Event(0, (7,), "a"))]) == ["ok"]
    (entry,) = await old.reclaim(5)
    assert await old.claim(entry) is None
    assert (await handle.status()).attempt == 1
    assert await owners.redis.hget(KEYS.request(handle.id), "v") == str(NEWER).encode()
    with upgraded():
        (entry,) = await old.reclaim(5)
        job = await old.claim(entry)
        assert job is not None
        assert (job.attempt, await old.emitted(job)) == (2, [7])


async def test_a_newer_worker_that_only_looked_at_a_job_does_not_take_it_from_the_old_ones(
    owners: Owners, client: AsyncClient
) -> None:
    dead, old = owners.queue("prefill", "dead"), owners.queue("prefill", "old")
    await dead.make_groups()
    await client.submit(prompt="hi")
    (entry,) = await dead.read(1, 1)
    with upgraded():
        assert await dead.claim(entry) is not None
    (entry,) = await old.reclaim(5)
    job = await old.claim(entry)
    assert job is not None
    assert job.attempt == 2


async def test_a_handoff_of_a_newer_prefill_is_for_newer_decode_workers(owners: Owners, client: AsyncClient) -> None:
    prefill, decode = owners.queue("prefill", "p"), owners.queue("decode", "d")
    for stage in (prefill, decode):
        await stage.make_groups()
    await client.submit(prompt="hi")
    with upgraded():
        job = await prefill.claim(*await prefill.read(1, 1))
        assert job is not None
        await prefill.hand_off(job, Handoff((1, 2), 2, bytes(32), 4))
    assert await decode.claim(*await decode.read(1, 1)) is None
    with upgraded():
        job = await decode.claim(*await decode.reclaim(1))
        assert job is not None
        assert job.handoff == Handoff((1, 2), 2, bytes(32), 4)


async def test_a_reader_says_clearly_that_it_is_too_old_for_an_event(owners: Owners, client: AsyncClient) -> None:
    handle = await client.submit(prompt="hi")
    await owners.redis.xadd(KEYS.out(handle.id), {"e": newer(encode(Event(0, (7,), "a")))}, id="0-1")
    with pytest.raises(RequestFailed, match=f"version {NEWER}, expected {messages.OLDEST_VERSION} to {VERSION}"):
        await handle.result(5)


async def test_newer_workers_are_not_counted_by_an_older_client(owners: Owners, client: AsyncClient) -> None:
    for name, change in (("old", bytes), ("new", newer)):
        info = encode(WorkerInfo(name, "decode", "m", bytes(32), 100))
        await owners.redis.set(KEYS.worker(name), change(info), px=10_000)
        await owners.redis.zadd(KEYS.workers, {name: 1})
    assert [w.name for w in await client.workers()] == ["old"]


async def test_newer_kv_is_a_miss_for_prefill(server: Server) -> None:
    async with LocalPool(server, local_cache_bytes="0") as pool:
        prompt = "0123456789abc"
        first = await ask(pool, prompt)
        with server.client() as client:
            make_values_newer(client, "kv")
        again = await ask(pool, prompt)
        assert (again.text, again.usage.cached_tokens) == (first.text, 0)
        assert pool.workers["prefill"][0].store.counters["miss_version"] == 1
        assert (await ask(pool, prompt)).usage.cached_tokens == 12  # and was replaced by what we can read


@pytest.mark.parametrize("part", ["kv", "tail"])
async def test_newer_kv_sends_a_decode_job_back_to_prefill(
    server: Server, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_transfer, "SMALL", 0)  # so that the tail is in the store
    async with LocalPool(server, decode=0) as pool:
        handle = await pool.client.submit(prompt="0123456789", max_tokens=9, temperature=0)
        await until_decode(handle)
        with server.client() as client:
            make_values_newer(client, part)
        decode = pool.add("decode")
        assert (await handle.result(15)).text == expected(b"0123456789", 9)
        assert decode.stage.counters()["kv_requeued"] == 1


def shorter(message: Request | Handoff | Event) -> bytes:
    """`message` as a pdq wrote it that knew nothing of the fields with a default."""
    array = msgpack.unpackb(encode(message))
    required = [f.name for f in fields(message)]
    while getattr(message, required[-1]) == fields(message)[len(required) - 1].default:
        required.pop()
    assert len(required) < len(fields(message))
    return msgpack.packb(array[: 2 + len(required)])


async def test_messages_of_an_older_pdq_are_understood(server: Server) -> None:
    async with LocalPool(server, prefill=0, decode=0) as pool:
        handle = await pool.client.submit(prompt="abcdefgh", max_tokens=6, temperature=0)
        request = Request(handle.id, SamplingParams(temperature=0.0, max_tokens=6), prompt="abcdefgh")
        with server.client() as client:
            client.hset(KEYS.request(handle.id), "msg", shorter(request))
            pool.add("prefill")
            await until_decode(handle)
            written = messages.decode(Handoff, client.hget(KEYS.request(handle.id), "handoff"))
            assert written.tail_key == ""
            old = Handoff(written.prompt, written.kv_length, written.fingerprint, written.block_size)
            client.hset(KEYS.request(handle.id), "handoff", shorter(old))
        pool.add("decode")
        assert (await handle.result(10)).text == expected(b"abcdefgh", 6)


async def test_scripts_of_two_versions_run_side_by_side_since_their_name_is_their_text(
    owners: Owners, client: AsyncClient
) -> None:
    handle = await client.submit(prompt="hi")
    changed = scripts.Script("renew")
    changed.text += "-- the next version\n"
    changed.sha = await owners.redis.script_load(changed.text)
    assert changed.sha != scripts.renew.sha
    arguments = ([KEYS.request(handle.id), KEYS.prefill("normal")], 0, "nobody", GROUP, "0-0")
    for script in (scripts.renew, changed, scripts.renew):
        assert await script(*arguments).run(owners.redis) == b"lost"
    assert await owners.redis.script_exists(scripts.renew.sha, changed.sha) == [True, True]


def test_every_script_goes_by_the_sha_of_its_whole_text(server: Server) -> None:
    with server.client() as client:
        for name, script in vars(scripts).items():
            if isinstance(script, scripts.Script):
                assert client.script_load(script.text) == script.sha, name


async def test_old_and_new_processes_side_by_side(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of both kinds while old workers run; the new ones are answered once there are new workers.

    Whoever reads the answers is upgraded before the workers: an old reader cannot read what a new worker writes.
    """
    change = f"from pdq import client, messages, queue\nclient.VERSION = messages.VERSION = queue.VERSION = {NEWER}\n"
    (tmp_path / "sitecustomize.py").write_text(change)
    options = {"engine": "scripted", "lease_seconds": 1.0, "block_size": 4, "kv_memory": "1MiB"}
    with Programs(server, **options) as old:
        for stage in ("prefill", "decode"):
            old.start(stage)
        async with AsyncClient(RedisSettings(redis_url=server.url)) as client:
            handles = [await client.submit(prompt=f"p{i}", max_tokens=8, temperature=0) for i in range(5)]
            for handle in handles[3:]:
                make_newer(server, handle, "v")
            texts = [(await h.result(20)).text for h in handles[:3]]
            assert texts == [expected(f"p{i}".encode(), 8) for i in range(3)]
            assert {(await h.status()).state for h in handles[3:]} == {"queued"}
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
            with Programs(server, **options) as new, upgraded():
                for stage in ("prefill", "decode"):
                    new.start(stage)
                texts = [(await h.result(30)).text for h in handles[3:]]
                assert texts == [expected(f"p{i}".encode(), 8) for i in range(3, 5)]
