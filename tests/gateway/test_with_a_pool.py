"""The gateway on the real SDK client, a real Redis and scripted workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pdq.client import AsyncClient
from pdq.config import GatewaySettings
from pdq.gateway.app import create_app
from pdq.text import ByteTokenizer
from tests.pipeline.local import LocalPool

from .helpers import CHAT, COMPLETIONS, chat_text, error, frames


@asynccontextmanager
async def gateway(server, max_queued=1024):
    settings = GatewaySettings(redis_url=server.url)
    client = AsyncClient(settings, max_queued=max_queued)
    app = create_app(settings, client=client, tokenizer=ByteTokenizer(), model_name="scripted", max_model_len=8192)
    async with TestClient(TestServer(app)) as http:
        yield http
    await client.aclose()


async def until_ready(http):
    async with asyncio.timeout(10):
        while (await http.get("/ready")).status != 200:
            await asyncio.sleep(0.05)


def chat(**more):
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 7} | more


async def test_stream_and_whole_answer_agree(server):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        whole = await (await http.post(CHAT, json=chat())).json()
        stream = await http.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True}))
        *chunks, usage, done = frames(await stream.text())
        assert done == "[DONE]"
        assert chat_text(chunks) == whole["choices"][0]["message"]["content"]
        assert len(chat_text(chunks)) == 20
        assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 20
        assert whole["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert "prefill;dur=" in stream.headers["Server-Timing"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_token_id_out_of_the_vocabulary_is_a_400_from_the_worker(server, stream):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        response = await http.post(COMPLETIONS, json={"prompt": [97, 70_000], "stream": stream})
        assert response.status == 400
        found = await error(response)
        assert (found["type"], found["param"]) == ("invalid_request_error", "prompt")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", {"257": 1}), ("stop_token_ids", [257]), ("allowed_token_ids", [9, 257])]
)
async def test_a_sampling_option_out_of_the_vocabulary_is_a_400_from_the_worker(server, name, value, stream):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        response = await http.post(CHAT, json=chat(stream=stream, **{name: value}))
        assert response.status == 400
        found = await error(response)
        assert (found["type"], found["param"]) == ("invalid_request_error", name)
        assert "below 257" in found["message"]


async def test_stream_and_whole_answer_have_the_same_logprobs(server):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        wanted = chat(logprobs=True, top_logprobs=2, presence_penalty=1.0)
        whole = (await (await http.post(CHAT, json=wanted)).json())["choices"][0]
        *chunks, _ = frames(await (await http.post(CHAT, json=wanted | {"stream": True})).text())
        told = [c["choices"][0]["logprobs"] for c in chunks]
        assert [t for found in told if found for t in found["content"]] == whole["logprobs"]["content"]
        assert "".join(t["token"] for t in whole["logprobs"]["content"]) == whole["message"]["content"]
        assert [len(t["top_logprobs"]) for t in whole["logprobs"]["content"]] == [2] * 20


async def test_a_prompt_that_leaves_room_for_one_token_gets_it(server):
    async with LocalPool(server, block_size=256), gateway(server) as http:
        await until_ready(http)
        response = await http.post(COMPLETIONS, json={"prompt": "a" * 8191})
        assert response.status == 200
        body = await response.json()
        assert body["usage"]["completion_tokens"] == 1
        assert body["choices"][0]["finish_reason"] == "length"


async def test_a_client_that_leaves_ends_its_request_in_the_queue(server):
    async with LocalPool(server, engine="scripted:step_ms=20") as pool, gateway(server) as http:
        await until_ready(http)
        response = await http.post(CHAT, json=chat(max_tokens=5000, stream=True))
        request_id = ""
        async for line in response.content:
            request_id = frames(f"{line.decode()}\n")[0]["id"].removeprefix("chatcmpl-")
            break
        response.close()
        async with asyncio.timeout(10):
            while (status := await pool.client.status(request_id)).state != "done":
                await asyncio.sleep(0.05)
        assert status.reason == "cancelled"


async def test_a_lost_redis_is_a_quick_503_and_heals(server):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        server.kill()
        try:
            async with asyncio.timeout(10):
                while (await http.get("/ready")).status == 200:
                    await asyncio.sleep(0.05)
            begin = time.monotonic()
            response = await http.post(CHAT, json=chat())
            assert time.monotonic() - begin < 1.5
            assert response.status == 503
            assert response.headers["Retry-After"]
            assert (await http.get("/health")).status == 200
        finally:
            server.start()
        await until_ready(http)
        assert (await http.post(CHAT, json=chat())).status == 200


async def test_a_frozen_redis_is_a_503_after_a_bounded_wait(server):
    async with LocalPool(server), gateway(server) as http:
        await until_ready(http)
        server.freeze()
        try:
            await asyncio.sleep(1.1)  # what was known of the workers is out of date
            begin = time.monotonic()
            responses = await asyncio.gather(*(http.post(CHAT, json=chat()) for _ in range(5)))
            assert [r.status for r in responses] == [503] * 5
            assert time.monotonic() - begin < 3.0
        finally:
            server.freeze(False)
        await until_ready(http)


async def test_the_queue_limit_is_a_429(server):
    async with LocalPool(server, prefill_engine="scripted:prefill_us=20000"), gateway(server, max_queued=2) as http:
        await until_ready(http)
        asking = [asyncio.create_task(http.post(CHAT, json=chat(max_tokens=1))) for _ in range(12)]
        statuses = [(await a).status for a in asking]
        assert set(statuses) == {200, 429}
