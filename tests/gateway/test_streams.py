"""Streams over time: keep-alive comments, many at once, a client that does not read, tight chunks."""

from __future__ import annotations

import asyncio
import socket

import orjson
import pytest

from pdq.errors import RequestFailed
from pdq.gateway import replies
from pdq.gateway.chat import CHAT as CHAT_ENDPOINT
from pdq.gateway.sse import Chunks
from pdq.messages import Event, Usage

from .fakes import TEXT, spoken
from .helpers import CHAT, chat, chat_text, frames


async def test_comments_are_sent_while_a_request_waits_in_the_queue(start, fake):
    said = asyncio.Event()
    fake.script = lambda _: [said, *spoken(prompt_tokens=1)]
    http = await start(ping_seconds=0.05)
    response = await http.post(CHAT, json=chat(stream=True))
    assert response.status == 200
    for _ in range(3):
        assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
    said.set()
    found = frames((await response.read()).decode())
    chunks = [c for c in found if c != ": ping"]
    assert chunks[-1] == "[DONE]"
    assert chat_text(chunks) == TEXT


async def test_headers_wait_for_the_first_event(start, fake):
    said = asyncio.Event()
    fake.script = lambda _: [said, *spoken(prompt_tokens=1)]
    http = await start(ping_seconds=30.0)
    asking = asyncio.create_task(http.post(CHAT, json=chat(stream=True)))
    done, _ = await asyncio.wait({asking}, timeout=0.3)
    assert not done
    said.set()
    response = await asking
    assert "ping" not in await response.text()


async def test_comments_fill_a_pause_between_tokens(start, fake):
    said = asyncio.Event()
    first, *rest = spoken(("a", "b"), 1)
    fake.script = lambda _: [first, said, *rest]
    http = await start(ping_seconds=0.05)
    response = await http.post(CHAT, json=chat(stream=True))
    await response.content.readuntil(b"\n\n")
    await response.content.readuntil(b"\n\n")
    assert await response.content.readuntil(b"\n\n") == b": ping\n\n"
    said.set()
    await response.read()


async def test_a_failure_after_a_long_wait_is_an_error_event(start, fake):
    said = asyncio.Event()
    fake.script = lambda _: [said, RequestFailed("broken")]
    http = await start(ping_seconds=0.05)
    response = await http.post(CHAT, json=chat(stream=True))
    assert response.status == 200
    await response.content.readuntil(b"\n\n")
    said.set()
    *_, last = frames((await response.read()).decode())
    assert last["error"]["code"] == "request_failed"


async def test_an_event_without_text_sends_the_headers_and_no_chunk(http, fake):
    said = asyncio.Event()
    fake.script = lambda _: [Event(0, (1,), ""), said, *spoken(("a",), 1)]
    response = await http.post(CHAT, json=chat(stream=True))
    assert response.status == 200
    said.set()
    chunks = frames(await response.text())
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {},
    ]  # fmt: skip


async def test_two_hundred_streams_at_once_stay_apart(http, fake):
    gate = asyncio.Event()

    def script(asked):
        words = [w + " " for w in asked.prompt.split()] * 5
        events = spoken(words, len(asked.token_ids))
        return [events[0], gate, *events[1:]]

    fake.script = script

    async def one(n):
        messages = [{"role": "user", "content": f"w{n} x{n}"}]
        response = await http.post(CHAT, json=chat(messages=messages, stream=True))
        assert response.status == 200
        chunks = frames(await response.text())
        assert chunks[-1] == "[DONE]"
        return chat_text(chunks)

    asking = [asyncio.create_task(one(n)) for n in range(200)]
    async with asyncio.timeout(30):
        while len(fake.handles) < 100:  # the test client opens at most 100 connections
            await asyncio.sleep(0.01)
        gate.set()
        texts = await asyncio.gather(*asking)
    assert texts == [f"user: w{n} x{n} assistant: " * 5 for n in range(200)]


async def test_a_client_that_never_reads_is_cut_off_at_the_deadline(start, fake, monkeypatch):
    monkeypatch.setattr(replies, "GRACE_SECONDS", 0.2)
    fake.script = lambda _: [Event(n, (1,), "x" * 60_000) for n in range(1000)]
    http = await start(request_timeout=0.3)
    body = orjson.dumps(chat(stream=True))
    with socket.create_connection((http.host, http.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        async with asyncio.timeout(10):
            while not fake.handles:
                await asyncio.sleep(0.01)
            await fake.handles[0].cancelled.wait()
            while http.server.runner.server.connections:  # closing politely would wait for the client to read
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("usage", [False, True])
def test_a_text_event_becomes_one_valid_chunk_and_no_raw_line_breaks(usage):
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": 'm"\n',
        "system_fingerprint": None,
    }
    chunks = Chunks(CHAT_ENDPOINT.shape, head, 1, include_usage=usage)
    assert chunks.render(0, Event(0, (0,), "")) == b""
    out = chunks.render(0, Event(0, (1,), "a\nb")) + chunks.render(0, Event(1, (2,), "c"))
    assert out.count(b"\n") == 6
    assert [f | head for f in frames(out.decode())] == frames(out.decode())
    assert chunks.render(0, Event(2, (3,), "")) == b""
    assert not chunks.done
    end = chunks.render(0, Event(3, finish_reason="stop", usage=Usage(1, 3)))
    assert len(frames(end.decode())) == 2 + usage
    assert chunks.done
