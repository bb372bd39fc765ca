"""Server-sent events: the bytes of every chunk of an answer, and the response that carries them.

On the path of every token, so what is the same in all chunks of an answer is formatted once. Order per choice: the role
chunk (chat), text chunks, one finish chunk; then a usage chunk if asked for, and `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from pdq.gateway.logprobs import Wording
from pdq.messages import Event, Timings, Usage
from pdq.tasks import cancelled

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the chunks
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How one endpoint words its chunks, as pieces of JSON.

    opening: what a choice starts with, b"" for nothing. before, after: around the text. empty: for the finish chunk.
    """

    id_prefix: str
    chunk_object: str
    opening: bytes
    before: bytes
    after: bytes
    empty: bytes


class Chunks:
    """Turns the events of one answer into bytes to send.

    choices: how many terminal events end it. logprobs: how each choice words its log probabilities, if it has any.
    """

    def __init__(
        self,
        shape: Shape,
        head: dict[str, Any],
        choices: int,
        *,
        include_usage: bool,
        logprobs: Sequence[Wording] = (),
    ) -> None:
        self._shape = shape
        # {"id":...,"model":... without the closing brace
        self._head = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._before = [self._head + b'{"index":%d,' % n + shape.before for n in range(choices)]
        self._after = shape.after + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._logprobs = logprobs
        self._opened: set[int] = set()
        self._include_usage = include_usage
        self._usages: list[Usage] = []
        self._running = choices

    @property
    def done(self) -> bool:
        """Has every choice ended?"""
        return not self._running

    def render(self, choice: int, event: Event) -> bytes:
        """All chunks for `event`, b"" if it shows nothing yet."""
        scored = bool(event.logprobs and self._logprobs)
        if event.finish_reason is None and not event.text and not scored:
            return b""
        out = b""
        if choice not in self._opened:
            self._opened.add(choice)
            if self._shape.opening:
                out = self._chunk(choice, self._shape.opening, None)
        if scored:  # tokens whose text is held back have theirs already
            out += self._before[choice] + orjson.dumps(event.text) + self._scored(choice, event)
        elif event.text:
            out += self._before[choice] + orjson.dumps(event.text) + self._after
        if event.finish_reason is not None:
            out += self._chunk(choice, self._shape.empty, event.finish_reason)
            out += self._end(event.usage)
        return out

    def _scored(self, choice: int, event: Event) -> bytes:
        """What stands instead of `_after`."""
        found = orjson.dumps(self._logprobs[choice](event.logprobs))
        return self._shape.after + b',"logprobs":' + found + b',"finish_reason":null}' + self._tail

    def _chunk(self, choice: int, body: bytes, finish_reason: str | None) -> bytes:
        reason = orjson.dumps(finish_reason)
        return b"".join((
            self._head, b'{"index":%d,' % choice, body, b',"logprobs":null,"finish_reason":', reason, b"}", self._tail,
        ))  # fmt: skip

    def _end(self, usage: Usage | None) -> bytes:
        self._running -= 1
        if usage is not None:
            self._usages.append(usage)
        if self._running:
            return b""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(usage_object(self._usages)) + b"}\n\n" + DONE


def usage_object(usages: list[Usage]) -> dict[str, Any]:
    """OpenAI's usage: the sum over all choices."""
    prompt = sum(u.prompt_tokens for u in usages)
    completion = sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages)},
    }


def server_timing(timings: Timings) -> str:
    """The value of a Server-Timing header, in milliseconds."""
    parts = {
        "queue": timings.queue_ms,
        "prefill": timings.prefill_ms,
        "handoff": timings.handoff_ms,
        "decode": timings.decode_ms,
    }
    return ", ".join(f"{name};dur={ms:.1f}" for name, ms in parts.items())


class EventStream:
    """One `text/event-stream` response. It starts late, so that an early failure can still be a real status.

    ping_seconds: after this long without a chunk a comment is sent: proxies cut silent connections.
    """

    def __init__(self, request: web.Request, ping_seconds: float) -> None:
        self._request = request
        self._ping_seconds = ping_seconds
        self._loop = asyncio.get_running_loop()
        self._wrote = 0.0
        self._pinger: asyncio.Task[None] | None = None
        self.response = web.StreamResponse(headers=HEADERS)

    @property
    def started(self) -> bool:
        return self._pinger is not None

    async def start(self, timings: Timings | None = None) -> None:
        """Send status 200 and the headers."""
        if timings is not None:
            self.response.headers["Server-Timing"] = server_timing(timings)
        await self.response.prepare(self._request)
        self._wrote = self._loop.time()
        self._pinger = asyncio.create_task(self._ping())

    async def write(self, data: bytes) -> None:
        """Send `data`; waits while the client does not read. Raises ConnectionError when it has gone."""
        self._wrote = self._loop.time()
        await self.response.write(data)

    async def aclose(self) -> None:
        if self._pinger is not None:
            await cancelled([self._pinger])

    async def _ping(self) -> None:
        while True:
            due = self._wrote + self._ping_seconds - self._loop.time()
            if due > 0:
                await asyncio.sleep(due)
                continue
            try:
                await self.write(PING)
            except ConnectionError:
                return  # the next write of the handler, or its cancellation, finds out as well
