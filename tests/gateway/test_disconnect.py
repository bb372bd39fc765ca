"""A client that goes away cancels its requests, whatever the gateway was doing for it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdq.gateway.context import GATEWAY
from pdq.messages import Event

from .fakes import spoken
from .helpers import CHAT, COMPLETIONS, chat, completion


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("stream", [False, True])
async def test_while_waiting_for_the_first_token(http, fake, stream):
    never = asyncio.Event()
    fake.script = lambda _: [never]
    asking = asyncio.create_task(http.post(CHAT, json=chat(stream=stream)))
    await until(lambda: fake.handles)
    await fake.handles[0].reading.wait()
    asking.cancel()
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 5)
    await asyncio.wait_for(fake.handles[0].closed.wait(), 5)


async def test_in_mid_stream_while_nothing_is_written(http, fake, caplog):
    caplog.set_level(logging.INFO)
    never = asyncio.Event()
    fake.script = lambda _: [Event(0, (1,), "x"), never]
    response = await http.post(CHAT, json=chat(stream=True))
    await response.content.readuntil(b"\n\n")
    response.close()
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 5)
    await asyncio.wait_for(fake.handles[0].closed.wait(), 5)
    await until(lambda: f"POST {CHAT} 499 " in caplog.text)


async def test_in_mid_stream_while_tokens_flow(http, fake):
    more = asyncio.Event()
    more.set()
    fake.script = lambda _: [s for n in range(100_000) for s in (Event(n, (1,), "x" * 50), more)]
    response = await http.post(CHAT, json=chat(stream=True))
    await response.content.readuntil(b"\n\n")
    response.close()
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_all_prompts_of_a_completion_are_cancelled(http, fake, stream):
    never = asyncio.Event()
    fake.script = lambda _: [never]
    asking = asyncio.create_task(http.post(COMPLETIONS, json=completion(["a", "b", "c"], stream=stream)))
    await until(lambda: len(fake.handles) == 3)
    asking.cancel()
    for handle in fake.handles:
        await asyncio.wait_for(handle.cancelled.wait(), 5)


async def test_while_the_submit_is_on_its_way(http, fake):
    fake.gate = asyncio.Event()
    asking = asyncio.create_task(http.post(CHAT, json=chat()))
    gateway = http.app[GATEWAY]
    await until(lambda: fake.looks)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.wait_for(gateway.activity.wait_idle(), 5)
    assert fake.handles == []
    fake.gate.set()  # Redis accepts it only now
    await until(lambda: fake.handles)
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 5)


async def test_a_request_with_an_idempotency_key_is_left_for_the_retry(http, fake):
    never = asyncio.Event()
    fake.script = lambda _: [never]
    asking = asyncio.create_task(http.post(CHAT, json=chat(), headers={"Idempotency-Key": "k"}))
    await until(lambda: fake.handles)
    asking.cancel()
    await asyncio.wait_for(fake.handles[0].closed.wait(), 5)
    await asyncio.wait_for(http.app[GATEWAY].activity.wait_idle(), 5)
    assert not fake.handles[0].cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_read_to_its_end_is_not_cancelled(http, fake, stream):
    fake.script = lambda _: spoken(prompt_tokens=3)
    await (await http.post(CHAT, json=chat(stream=stream))).read()
    await asyncio.wait_for(http.app[GATEWAY].activity.wait_idle(), 5)
    assert not fake.handles[0].cancelled.is_set()


async def test_a_dropped_connection_cancels_only_its_own_request(http, fake):
    gates = [asyncio.Event(), asyncio.Event()]
    fake.script = lambda _: [gates[len(fake.handles)], *spoken(("ok",), 1)]
    headers = {"X-Request-Id": "a"}
    first = asyncio.create_task(http.post(CHAT, json=chat(), headers=headers))
    await until(lambda: len(fake.handles) == 1)
    first.cancel()
    second = asyncio.create_task(http.post(CHAT, json=chat(), headers=headers))
    await until(lambda: len(fake.handles) == 2)
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 5)
    gates[1].set()
    assert (await (await second).json())["choices"][0]["message"]["content"] == "ok"
    assert not fake.handles[1].cancelled.is_set()
