"""A small OpenAI-style server in a thread of its own, which records what it is asked and answers what the test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
from aiohttp import web

Reply = Callable[[web.Request, dict[str, object]], Awaitable[web.StreamResponse]]
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def said(text: str) -> bytes:
    """A content chunk of a chat."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def completed(text: str) -> bytes:
    """A content chunk of a completion."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def finish(reason: str = "length") -> bytes:
    return event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **details}})


WHOLE = (said("a"), said("b"), said("c"), finish(), usage(10, 3, 4), DONE)


async def stream(request: web.Request, parts: Sequence[bytes | float]) -> web.StreamResponse:
    """An event stream of `parts`; a number is a pause in seconds."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        if isinstance(part, bytes):
            await response.write(part)
        else:
            await asyncio.sleep(part)
    return response


class FakeServer:
    """`asked`: bodies of requests, in order; `paths` and `keys` (Authorization) belong to them."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.keys: list[str] = []
        self.listed: object = {"data": [{"id": "tiny"}, {"id": "other"}]}
        self.url = ""
        self._replies: list[Reply] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def replies(self, *replies: Reply) -> None:
        """To requests in turn; the last to all that follow."""
        self._replies = list(replies)

    def says(self, *parts: bytes | float) -> None:
        self.replies(lambda request, _: stream(request, parts))

    @property
    def prompts(self) -> list[str]:
        """Last user turn, or prompt, of each request."""
        found = [a["messages"][-1]["content"] if "messages" in a else a["prompt"] for a in self.asked]  # type: ignore[index]
        return [str(text) for text in found]

    async def stop_listening(self) -> None:
        """To be awaited by a reply."""
        await self._site.stop()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/v1/{kind:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        self._site = web.TCPSite(runner, "127.0.0.1", 0)
        await self._site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(self.listed)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization", ""))
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        return await reply(request, body)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """Answers three words with usage (10 in, 4 of them cached, 3 out) unless told otherwise."""
    server = FakeServer()
    server.says(*WHOLE)
    yield server
    server.close()
