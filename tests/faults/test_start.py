"""A Redis that may evict requests is refused, with the sentence how to set it: exit code 2, by real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdq import connection
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import ConfigError
from pdq.keys import Keys
from tests.faults.programs import Program, Programs
from tests.servers import Server, free_port

KINDS = ("prefill", "decode", "gateway")
SENTENCE = (
    "redis_url: maxmemory-policy {} may evict queued requests; set it with "
    "'CONFIG SET maxmemory-policy volatile-lru' (or noeviction), or give the queue a Redis of its own"
)
OPTIONS = {"engine": "scripted", "lease_seconds": 1.0}


@pytest.fixture
def unsafe() -> Iterator[Server]:
    server = Server("valkey9", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.close()


def ends_with_the_sentence(program: Program, policy: str) -> None:
    assert program.wait(30) == 2
    lines = program.log.read_text().splitlines()
    assert lines[-1].endswith(SENTENCE.format(policy))
    assert not any("Traceback" in line or "exception" in line for line in lines)


def test_workers_and_gateway_refuse_a_redis_that_may_evict_requests_and_leave_nothing(unsafe: Server) -> None:
    with Programs(unsafe, **OPTIONS) as programs:
        for program in [programs.start(kind) for kind in KINDS]:
            ends_with_the_sentence(program, "allkeys-lru")
    with unsafe.client() as client:
        assert not list(client.scan_iter(Keys("default").worker("*")))


@pytest.mark.leaves_keys("the request that nobody may take")
async def test_a_worker_that_refuses_has_not_touched_a_request(unsafe: Server) -> None:
    async with AsyncClient(RedisSettings(redis_url=unsafe.url)) as client:
        handles = [await client.submit(prompt="hi") for _ in range(5)]
        with Programs(unsafe, **OPTIONS) as programs:
            for program in [programs.start("prefill") for _ in range(2)]:
                assert await asyncio.to_thread(program.wait, 30) == 2
        assert [(s.state, s.attempt) for s in [await h.status() for h in handles]] == [("queued", 0)] * 5


def test_a_redis_that_is_away_at_the_start_is_looked_at_as_soon_as_it_answers(unsafe: Server) -> None:
    unsafe.kill()
    with Programs(unsafe, **OPTIONS) as programs:
        running = [programs.start(kind) for kind in KINDS]
        with pytest.raises(subprocess.TimeoutExpired):
            running[0].wait(1.0)
        assert [program.poll() for program in running] == [None] * 3
        unsafe.start()
        for program in running:
            ends_with_the_sentence(program, "allkeys-lru")


def test_where_info_is_not_permitted_there_is_a_warning_and_work_goes_on(server: Server) -> None:
    with server.client() as client:
        client.acl_setuser(
            "limited", enabled=True, passwords=["+secret"], keys=["*"], channels=["*"], commands=["+@all", "-info"]
        )
    url = server.url.replace("//", "//limited:secret@")
    try:
        with Programs(server, **OPTIONS, redis_url=url) as programs:
            running = [programs.start(kind) for kind in KINDS]
            programs.wait(*running)
            for program in running:
                assert " W the eviction policy of Redis cannot be seen" in program.log.read_text()
    finally:
        with server.client() as client:
            client.acl_deluser("limited")


def test_pdq_serve_passes_the_sentence_on(unsafe: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pdq", "serve", "--engine", "scripted", "--port", str(free_port())]
    done = subprocess.run(
        [*command, "--redis-url", unsafe.url], capture_output=True, text=True, timeout=40, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: {SENTENCE.format('allkeys-lru')}"


async def test_which_policies_are_refused(unsafe: Server) -> None:
    client = connection.command(unsafe.url, 1)
    for policy in ("noeviction", "volatile-lru", "volatile-lfu"):
        await client.config_set("maxmemory-policy", policy)
        await connection.check_server(client, "queue")
    for policy in ("allkeys-lru", "allkeys-lfu", "allkeys-random"):
        await client.config_set("maxmemory-policy", policy)
        with pytest.raises(ConfigError, match=f"maxmemory-policy {policy} may evict queued requests"):
            await connection.check_server(client, "queue")
        await connection.check_server(client, "kv")  # blocks are there to be evicted
    await client.aclose()
