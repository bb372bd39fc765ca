"""Tenants on a real pool: prefixes and idempotency keys are shared within one, and nothing in Redis names anybody."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdq.client import AsyncClient
from pdq.config import GatewaySettings
from pdq.errors import InvalidRequest
from pdq.gateway.app import create_app
from pdq.keys import Keys
from pdq.messages import Request, decode
from pdq.text import ByteTokenizer
from tests.pipeline.local import LocalPool

from .helpers import COMPLETIONS, error

PROMPT = "a quiet prompt"  # 14 tokens: 3 full blocks of 4
ACME, ACME_TOO, BOLT, LONE = "sk-acme-1", "sk-acme-2", "sk-bolt-1", "sk-lone-1"


@pytest.fixture
def keys_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"acme {ACME}\nacme {ACME_TOO}\nbolt {BOLT}\n{LONE}\n")
    return file


@asynccontextmanager
async def gateway(server, keys_file):
    settings = GatewaySettings(redis_url=server.url, api_keys_file=str(keys_file))
    async with AsyncClient(settings) as client:
        app = create_app(settings, client=client, tokenizer=ByteTokenizer(), model_name="scripted", max_model_len=8192)
        async with TestClient(TestServer(app)) as http:
            async with asyncio.timeout(10):
                while (await http.get("/ready")).status != 200:
                    await asyncio.sleep(0.05)
            yield http


async def post(http, key, headers=None, **more):
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "seed": 7} | more
    return await http.post(COMPLETIONS, json=body, headers={"Authorization": f"Bearer {key}"} | (headers or {}))


async def cached(http, key, **more):
    response = await post(http, key, **more)
    assert response.status == 200
    return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_prefix_is_shared_within_a_tenant_only(server, keys_file):
    async with LocalPool(server), gateway(server, keys_file) as http:
        assert await cached(http, ACME) == 0
        assert await cached(http, BOLT) == 0
        assert await cached(http, LONE) == 0
        assert [await cached(http, key) for key in (ACME, ACME_TOO, BOLT, LONE)] == [12, 12, 12, 12]


async def test_a_salt_of_the_body_narrows_the_tenant_and_never_replaces_it(server, keys_file):
    async with LocalPool(server), gateway(server, keys_file) as http:
        assert await cached(http, ACME) == 0
        assert await cached(http, BOLT, cache_salt="acme") == 0
        assert await cached(http, ACME, cache_salt="s") == 0
        assert await cached(http, BOLT, cache_salt="s") == 0
        assert await cached(http, ACME_TOO, cache_salt="s") == 12
        assert await cached(http, ACME, prompt_cache_key="x", user="y") == 12  # hints, which ask for no wall


async def test_the_sdk_names_a_tenant_as_the_keys_file_does(server, keys_file):
    async with LocalPool(server) as pool, gateway(server, keys_file) as http:
        assert await cached(http, ACME, cache_salt="s") == 0
        for tenant, salt, hit in [("acme", "s", 12), ("acme", "", 0), ("bolt", "s", 0), ("", "", 0)]:
            handle = await pool.client.submit(prompt=PROMPT, max_tokens=3, tenant=tenant, cache_salt=salt)
            assert (await handle.result(10)).usage.cached_tokens == hit


async def test_an_idempotency_key_of_another_tenant_finds_nothing_of_it(server, keys_file):
    async with LocalPool(server) as pool, gateway(server, keys_file) as http:
        retry = {"Idempotency-Key": "order-1"}
        first, again, other = [await (await post(http, k, retry)).json() for k in (ACME, ACME_TOO, BOLT)]
        assert again["id"] == first["id"]
        assert other["id"] != first["id"]
        assert other["choices"] == first["choices"]  # the same prompt, answered once more
        assert sum(w.worker.counters["claimed"] for w in pool.workers["prefill"]) == 2
        # a different request of another tenant is no conflict, and tells of none
        assert (await post(http, LONE, retry, prompt="other")).status == 200
        refused = await post(http, ACME, retry, prompt="other")
        assert (refused.status, (await error(refused))["code"]) == (409, "conflict")


@pytest.mark.parametrize("change", [{"cache": "off"}, {"cache_salt": "s"}])
async def test_how_a_request_is_cached_is_a_part_of_what_an_idempotency_key_stands_for(server, keys_file, change):
    async with LocalPool(server), gateway(server, keys_file) as http:
        assert (await post(http, ACME, {"Idempotency-Key": "order-1"})).status == 200
        assert (await post(http, ACME, {"Idempotency-Key": "order-1"}, **change)).status == 409


async def test_the_wish_not_to_be_cached_reaches_the_workers(server):
    async with AsyncClient(GatewaySettings(redis_url=server.url)) as client:
        for cache in ("off", "on"):
            handle = await client.submit(prompt=PROMPT, cache=cache)
            with server.client() as redis:
                request = decode(Request, redis.hget(Keys("default").request(handle.id), "msg"))
            assert request.cache == cache
            await handle.cancel()


@pytest.mark.parametrize("cache", ["OFF", "", None, False, []])
async def test_the_sdk_takes_no_other_word_about_the_cache(server, cache):
    async with AsyncClient(GatewaySettings(redis_url=server.url)) as client:
        with pytest.raises(InvalidRequest, match=r"^cache: one of on, off is wanted, got ") as caught:
            await client.submit(prompt=PROMPT, cache=cache)
        assert caught.value.param == "cache"


async def test_keys_in_redis_name_no_tenant_no_api_key_and_no_prompt(server, keys_file):
    async with LocalPool(server), gateway(server, keys_file) as http:
        for key in (ACME, BOLT, LONE):
            assert await cached(http, key, cache_salt="pepper") == 0
        with server.client() as redis:
            names = list(redis.scan_iter())
            infos = [redis.get(n) for n in names if b":worker:" in n]
            requests = [value for n in names if b":req:" in n for value in redis.hvals(n)]
        blocks = [n for n in names if n.startswith(b"pdq:kv:") and not n.endswith(b"index")]
        assert len(blocks) >= 3 * 3  # and what decode completes
        for word in (b"acme", b"bolt", b"sk-", b"pepper", b"quiet"):
            assert not [n for n in names if word in n]
            assert not [v for v in infos if word in v]
        for word in (b"acme", b"bolt", b"sk-", b"pepper"):
            assert not [v for v in requests if word in v]


async def test_no_log_line_of_gateway_or_workers_holds_text_or_keys(server, keys_file, caplog, monkeypatch):
    caplog.set_level("DEBUG")
    async with LocalPool(server, max_attempts=1) as pool, gateway(server, keys_file) as http:
        assert (await post(http, ACME, cache_salt="pepper")).status == 200
        assert (await post(http, ACME, max_tokens=9000)).status == 400
        assert (await post(http, ACME, prompt=[*b"quiet", 70_000])).status == 400  # found by the worker
        assert (await post(http, f"{ACME}-wrong")).status == 401
        engine = pool.workers["prefill"][0].engine
        monkeypatch.setattr(engine, "forward", lambda _: 1 / 0)
        assert (await post(http, BOLT, prompt="another quiet prompt")).status == 500
    ours = [r for r in caplog.records if r.name.startswith("pdq")]
    lines = caplog.handler.format
    assert [r for r in ours if "ZeroDivisionError" in lines(r)]
    for word in ("quiet", "pepper", "sk-", "acme", "bolt"):
        assert not [lines(r) for r in ours if word in lines(r)]
