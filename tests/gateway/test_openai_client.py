"""The official OpenAI client against a listening gateway: what it parses, and which exceptions it raises."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI

from pdq.errors import QueueFull, RequestFailed
from pdq.messages import Event

from .fakes import MODEL, TEXT

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(http):
    url = f"http://{http.host}:{http.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as found:
        yield found


async def test_chat(client):
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=20)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_chat_stream_with_usage(client):
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [c async for c in stream]
    whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


async def test_chat_stream_helper_accumulates(client):
    async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert answer.choices[0].message.content == TEXT


async def test_completions_and_their_stream(client):
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"])
    assert [c.text for c in answer.choices] == [TEXT, TEXT]
    stream = await client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == TEXT


async def test_models(client):
    assert [m.id async for m in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_bad_request(client):
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
    assert (raised.value.param, raised.value.code, raised.value.type) == (
        "n",
        "invalid_request",
        "invalid_request_error",
    )
    assert raised.value.request_id


async def test_not_found(client):
    with pytest.raises(openai.NotFoundError) as raised:
        await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert raised.value.code == "model_not_found"


async def test_rate_limit(client, fake):
    fake.refuse = QueueFull("1024 requests are waiting, the limit is 1024")
    with pytest.raises(openai.RateLimitError) as raised:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert raised.value.code == "queue_full"


async def test_unavailable(client, fake):
    fake.workers_now = []
    with pytest.raises(openai.InternalServerError) as raised:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert raised.value.status_code == 503


async def test_a_failure_in_mid_stream_raises(client, fake):
    fake.script = lambda _: [Event(0, (1,), "half"), RequestFailed("decode failed")]
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="decode failed"):
        async for _ in stream:
            pass


async def test_a_request_that_failed_is_not_repeated_on_its_own(client, fake):
    fake.script = lambda _: [RequestFailed("prefill was tried 3 times")]
    with pytest.raises(openai.InternalServerError):
        await client.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(fake.asked) == 1


async def test_a_full_queue_is_tried_again(client, fake):
    fake.refuse = QueueFull("full", retry_after=1.0)
    asking = asyncio.create_task(
        client.with_options(max_retries=1).chat.completions.create(model=MODEL, messages=MESSAGES)
    )
    while not fake.looks:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    fake.refuse = None
    assert (await asking).choices[0].message.content == TEXT


async def test_closing_a_stream_cancels(client, fake):
    never = asyncio.Event()
    fake.script = lambda _: [Event(0, (1,), "x"), never]
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 5)
