"""429, 503 and 504: how quickly a client is refused, how long it is told to wait, and what ends a request in time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdq import connection
from pdq.client import AsyncClient
from pdq.config import GatewaySettings
from pdq.errors import QueueFull
from pdq.gateway import prefill_rate
from pdq.gateway.app import app_of
from pdq.gateway.context import GATEWAY, Gateway, Served
from pdq.gateway.pool import PoolView
from pdq.gateway.prefill_rate import PrefillRate
from pdq.gateway.queue_redis import QueueRedis
from pdq.keys import Keys
from pdq.messages import WorkerInfo, encode
from pdq.text import ByteTokenizer
from tests.pipeline.local import LocalPool

from .fakes import MODEL, both
from .helpers import CHAT, COMPLETIONS, chat, completion, error, frames
from .test_with_a_pool import until_ready

KEYS = Keys("default")
pytestmark = pytest.mark.usefixtures("quick_drain")


def info(stage="prefill", name="w", tokens=0, busy_ms=0, state="ready", model="scripted"):
    counters = (("prefill_ms", busy_ms), ("prompt_tokens", tokens))
    return WorkerInfo(name, stage, model, bytes(32), 8192, state, counters=counters)


# ---- the estimate ----


def test_the_rate_is_what_each_worker_lately_did_while_it_was_busy():
    rate = PrefillRate()
    assert rate.wait(1000) is None
    rate.note([info(name="a", tokens=2000, busy_ms=1000), info(name="b")], at=0)
    assert rate.per_second == 2000  # since it started, as long as nothing else is known; b has done nothing yet
    rate.note([info(name="a", tokens=2500, busy_ms=2000), info(name="b", tokens=100, busy_ms=1000)], at=30)
    assert rate.per_second == 500 + 100
    rate.note([info(name="a", tokens=2500, busy_ms=2000), info(name="b", tokens=100, busy_ms=1000)], at=1000)
    assert rate.per_second == 2500 / 2 + 100  # idle for long: what it did before counts again
    rate.note([info(name="b", tokens=100, busy_ms=1000)], at=1001)
    assert rate.per_second == 100  # a has gone


def test_only_ready_prefill_workers_count_and_one_started_anew_begins_at_zero():
    rate = PrefillRate()
    others = [info("decode", "d", 900, 1000), info("prefill", "p", 900, 1000, state="draining")]
    rate.note([*others, info(name="a", tokens=5000, busy_ms=1000)], at=0)
    assert rate.per_second == 5000
    rate.note([info(name="a", tokens=300, busy_ms=1000)], at=5)
    assert rate.per_second == 300


def test_the_window_moves_and_stays_small(monkeypatch):
    rate = PrefillRate()
    for second in range(500):
        fast = second < 400
        tokens = 1000 * second if fast else 400_000 + 10 * (second - 400)
        rate.note([info(tokens=tokens, busy_ms=1000 * second)], at=float(second))
    assert rate.per_second == 10
    assert len(rate._samples["w"]) <= prefill_rate.WINDOW_SECONDS + 2


@pytest.mark.parametrize(("queued", "seconds"), [(0, 1.0), (100, 1.0), (2500, 2.5), (1_000_000, 60.0)])
def test_a_client_is_told_between_a_second_and_a_minute(queued, seconds):
    rate = PrefillRate()
    rate.note([info(tokens=1000, busy_ms=1000)], at=0)
    assert rate.wait(queued) == seconds


class FakeRedis:
    """A QueueRedis with so many tokens queued; an exception instead is raised."""

    def __init__(self, queued):
        self.queued = queued
        self.safe = True

    async def queued_tokens(self):
        if isinstance(self.queued, Exception):
            raise self.queued
        if isinstance(self.queued, asyncio.Event):
            await self.queued.wait()
        return self.queued


@asynccontextmanager
async def gateway_over(fake, redis):
    served = Served(MODEL, ByteTokenizer(), 512)
    gateway = Gateway(GatewaySettings(), fake, served, 10.0, redis)
    async with TestClient(TestServer(app_of(gateway))) as http:
        yield http


@pytest.mark.parametrize(
    ("queued", "header"),
    [
        (3000, "3"),
        (2001, "3"),  # never less than the estimate
        (10_000_000, "60"),
        (connection.RedisError("away"), "1"),
        (asyncio.Event(), "1"),  # silent
    ],
)
async def test_a_429_says_when_the_queue_will_be_done(fake, queued, header):
    fake.workers_now = [*both(), info(tokens=1000, busy_ms=1000, model=MODEL)]
    fake.refuse = QueueFull("full", retry_after=1.0)
    async with gateway_over(fake, FakeRedis(queued)) as http:
        response = await http.post(CHAT, json=chat())
        assert response.status == 429
        assert response.headers["Retry-After"] == header
        assert (await error(response))["code"] == "queue_full"


async def test_a_429_without_a_known_rate_says_a_second(fake):
    fake.refuse = QueueFull("full", retry_after=1.0)
    async with gateway_over(fake, FakeRedis(10_000)) as http:
        assert (await http.post(CHAT, json=chat())).headers["Retry-After"] == "1"


async def test_before_redis_has_been_looked_at_nothing_is_queued_in_it(fake):
    redis = FakeRedis(0)
    redis.safe = False
    async with gateway_over(fake, redis) as http:
        ready = await http.get("/ready")
        assert (ready.status, (await ready.json())["missing"]) == (503, ["redis"])
        response = await http.post(CHAT, json=chat())
        assert (response.status, (await error(response))["code"]) == (503, "unavailable")
        assert fake.asked == []
        redis.safe = True
        assert (await http.get("/ready")).status == 200
        assert (await http.post(CHAT, json=chat())).status == 200


async def test_the_pool_view_keeps_the_rate_up_to_date(fake):
    view = PoolView(fake)
    fake.workers_now = [info(tokens=500, busy_ms=1000)]
    await view.look("scripted")
    assert view.rate.per_second == 500


# ---- with a real Redis ----


@asynccontextmanager
async def gateway(server, **options):
    settings = GatewaySettings(redis_url=server.url, **options)
    client = AsyncClient(settings, max_queued=settings.max_queued, max_queued_tokens=settings.max_queued_tokens)
    redis = QueueRedis(settings)
    await redis.check()
    made = Gateway(settings, client, Served("scripted", ByteTokenizer(), 8192), 10.0, redis)
    async with TestClient(TestServer(app_of(made))) as http:
        yield http
    await redis.aclose()
    await client.aclose()


async def test_over_the_bound_a_hundred_clients_are_refused_quickly_with_an_estimate(server, monkeypatch):
    monkeypatch.setattr("pdq.worker.BEAT_SECONDS", 0.3)
    slow = {"prefill_engine": "scripted:prefill_us=2000"}  # 500 tokens a second
    async with LocalPool(server, **slow), gateway(server, max_queued_tokens=1500) as http:
        await until_ready(http)
        assert (await http.post(COMPLETIONS, json=completion("a" * 200, model="scripted", max_tokens=1))).status == 200
        async with asyncio.timeout(10):  # until the worker has told of it and the gateway has heard
            while not http.app[GATEWAY].pool.rate.per_second:
                await asyncio.sleep(0.1)
                await http.get("/ready")
        body = completion("b" * 700, model="scripted", max_tokens=1)
        waiting = [asyncio.create_task(http.post(COMPLETIONS, json=body)) for _ in range(2)]
        with server.client() as client:
            while client.hget(KEYS.load, "queued") != b"1400":
                await asyncio.sleep(0.01)
        took, told = [], []
        for _ in range(100):
            started = time.perf_counter()
            response = await http.post(COMPLETIONS, json=completion("c" * 1400, model="scripted", max_tokens=1))
            took.append(time.perf_counter() - started)
            assert response.status == 429
            told.append(int(response.headers["Retry-After"]))
        assert sorted(took)[94] < 0.15
        assert told[0] >= 3  # of 1,400 tokens at 500 a second or, on a busy machine, fewer
        assert max(told) <= 10
        assert [(await w).status for w in waiting] == [200, 200]


async def test_a_redis_that_is_full_is_a_503_and_heals(server):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        with server.client() as client:
            client.config_set("maxmemory", 1)
            try:
                response = await http.post(CHAT, json=chat(model="scripted"))
                assert response.status == 503
                assert response.headers["Retry-After"] == "2"
                assert (await error(response))["code"] == "unavailable"
            finally:
                client.config_set("maxmemory", 0)
        assert (await http.post(CHAT, json=chat(model="scripted", max_tokens=3))).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_past_its_time_is_a_504(server, stream):
    options = {"prefill_engine": "scripted:prefill_us=20000", "prefill_chunk_tokens": 8, "lease_seconds": 1.0}
    async with LocalPool(server, **options), gateway(server, request_timeout=0.5) as http:
        await until_ready(http)
        started = time.monotonic()
        body = completion("a" * 200, model="scripted", stream=stream)
        response = await http.post(COMPLETIONS, json=body)
        assert response.status == 504
        found = await error(response)
        assert (found["type"], found["code"]) == ("timeout", "deadline_exceeded")
        assert response.headers["x-should-retry"] == "false"
        assert time.monotonic() - started < 5


async def test_a_stream_past_its_time_ends_with_one_error_event(server):
    options = {"engine": "scripted:step_ms=20", "lease_seconds": 0.8}
    async with LocalPool(server, **options), gateway(server, request_timeout=1.0) as http:
        await until_ready(http)
        body = completion("a", model="scripted", stream=True, max_tokens=4000)
        response = await http.post(COMPLETIONS, json=body)
        assert response.status == 200
        *chunks, last = frames(await response.text())
        assert len(chunks) > 3
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
        assert last["error"]["code"] == "deadline_exceeded"


# ---- as a process: the settings arrive ----


@contextlib.contextmanager
def program(server, **variables):
    """`python -m pdq.gateway` on `server`; gives its base URL."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
    env = kept | {"PDQ_ENGINE": "scripted", "PDQ_PORT": "0", "PDQ_REDIS_URL": server.url} | variables
    with subprocess.Popen([sys.executable, "-m", "pdq.gateway"], env=env, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"listening on (\S+)", process.stderr.readline())[1]
        finally:
            process.kill()


def heartbeats(server):
    """Of a prefill and a decode worker that do nothing."""
    with server.client() as client:
        for stage in ("prefill", "decode"):
            client.set(KEYS.worker(stage), encode(info(stage, stage)), px=60_000)
            client.zadd(KEYS.workers, {stage: client.time()[0] * 1000})


@pytest.mark.parametrize("variables", [{"PDQ_MAX_QUEUED_TOKENS": "100"}, {"PDQ_MAX_QUEUED": "1"}])
async def test_the_programs_settings_bound_the_queue_and_the_time_in_it(server, variables):
    heartbeats(server)
    more = {"PDQ_QUEUE_TIMEOUT": "20.5", "PDQ_REQUEST_TIMEOUT": "40.25"}
    with program(server, **variables, **more) as url, server.client() as client:
        async with aiohttp.ClientSession(url) as http:
            async with asyncio.timeout(15):
                while (await http.get("/ready")).status != 200:
                    await asyncio.sleep(0.05)
            first = asyncio.create_task(http.post(COMPLETIONS, json=completion("a" * 90, model="scripted")))
            async with asyncio.timeout(5):
                while client.hget(KEYS.load, "queued") != b"90":
                    await asyncio.sleep(0.01)
            assert (await http.post(COMPLETIONS, json=completion("b" * 20, model="scripted"))).status == 429
            (request,) = client.scan_iter(KEYS.request("*"))
            begun, queue, whole = map(int, client.hmget(request, ["t_submit", "queue_deadline", "deadline"]))
            assert (queue - begun, whole - begun) == (20_500, 40_250)
            first.cancel()
            async with asyncio.timeout(5):
                while client.hget(request, "state") != b"done":
                    await asyncio.sleep(0.01)
