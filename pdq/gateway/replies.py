"""One answer, whole or as a stream, for both endpoints.

The first event decides the status: until then a failure is a 4xx or 5xx of its own, afterwards it is one error event
and the end of the stream, without a finish chunk or `[DONE]`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from pdq.errors import DeadlineExceeded, InvalidRequest, PdqError
from pdq.gateway.auth import TENANT
from pdq.gateway.context import GATEWAY, Gateway
from pdq.gateway.errors import bug_object, describe, json_response
from pdq.gateway.jobs import Jobs, Numbered, submitted
from pdq.gateway.logprobs import Wording
from pdq.gateway.middleware import LABEL, is_label
from pdq.gateway.prompts import Prompt
from pdq.gateway.schemas import GenerationBody
from pdq.gateway.sse import Chunks, EventStream, Shape, server_timing, usage_object

log = logging.getLogger(__name__)

# The reader of a reply gives up by itself a while after the deadline; this guards against a client that does not read.
GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How one endpoint words its answers.

    prompt_field: where the prompt stands in the body. whole: the fields of a choice that carry the text. logprobs:
    makes what words the log probabilities of one choice.
    """

    shape: Shape
    object: str
    prompt_field: str
    whole: Callable[[str], dict[str, Any]]
    logprobs: Callable[[], Wording]


async def answer(
    request: web.Request, endpoint: Endpoint, prompts: list[Prompt], body: GenerationBody
) -> web.StreamResponse:
    """Queue one request a prompt and answer with the results, as `body` wants it."""
    try:
        return await _answer(request, endpoint, prompts, body)
    except InvalidRequest as e:
        if e.param == "token_ids":  # a worker found fault with what the client knows by another name
            e.param = endpoint.prompt_field
        raise


async def _answer(
    request: web.Request, endpoint: Endpoint, prompts: list[Prompt], body: GenerationBody
) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    options = body.sampling() | body.handling() | {"tenant": request[TENANT]}
    async with submitted(gateway, prompts, options, _idempotency_key(request)) as jobs:
        head = {
            "id": endpoint.shape.id_prefix + jobs.id,
            "object": endpoint.shape.chunk_object if body.stream else endpoint.object,
            "created": int(time.time()),
            "model": gateway.served().name,
            "system_fingerprint": None,
        }
        limit = gateway.settings.request_timeout + GRACE_SECONDS
        if not body.stream:
            return await _whole(endpoint, head, jobs, limit, scored=body.scored is not None)
        wordings = [] if body.scored is None else [endpoint.logprobs() for _ in prompts]
        chunks = Chunks(endpoint.shape, head, len(prompts), include_usage=body.include_usage, logprobs=wordings)
        try:
            async with asyncio.timeout(limit):
                return await _stream(request, gateway, chunks, jobs)
        except TimeoutError as e:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the client does not read its stream") from e


def _idempotency_key(request: web.Request) -> str | None:
    key = request.headers.get("Idempotency-Key")
    if key is not None and not is_label(key):
        raise InvalidRequest("Idempotency-Key must be 1 to 128 printable ASCII characters.", param="Idempotency-Key")
    return key


async def _whole(endpoint: Endpoint, head: dict[str, Any], jobs: Jobs, limit: float, *, scored: bool) -> web.Response:
    try:
        async with asyncio.timeout(limit):
            results = await jobs.results()
    except TimeoutError as e:
        raise DeadlineExceeded("The request was not finished in time.") from e
    jobs.done = True
    choices = [
        {
            "index": n,
            **endpoint.whole(r.text),
            "logprobs": endpoint.logprobs()(r.logprobs) if scored else None,
            "finish_reason": r.finish_reason,
        }
        for n, r in enumerate(results)
    ]
    response = json_response(head | {"choices": choices, "usage": usage_object([r.usage for r in results])})
    response.headers["Server-Timing"] = server_timing(results[0].timings)
    return response


async def _stream(request: web.Request, gateway: Gateway, chunks: Chunks, jobs: Jobs) -> web.StreamResponse:
    out = EventStream(request, gateway.ping_seconds)
    async with aclosing(out), aclosing(jobs.events()) as events:
        try:
            choice, event = await _first(events, out, gateway.ping_seconds)
            if not out.started:
                await out.start(event.timings)
            if data := chunks.render(choice, event):
                await out.write(data)
            async for choice, event in events:
                if data := chunks.render(choice, event):
                    await out.write(data)
        except ConnectionError:
            raise
        except Exception as e:
            if not out.started:
                raise
            await out.write(_failure(e, request[LABEL]))
        jobs.done = chunks.done
    await out.response.write_eof()
    return out.response


async def _first(events: AsyncGenerator[Numbered, None], out: EventStream, patience: float) -> Numbered:
    """The first event. After `patience` seconds without it the stream starts, so that comments can be sent."""
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=patience)
        if not first.done():
            await out.start()
        return await first
    finally:
        if not first.done():
            first.cancel()
            with suppress(asyncio.CancelledError, PdqError):
                await first


def _failure(error: Exception, label: str) -> bytes:
    """The event that tells of a failure after the first byte."""
    if isinstance(error, PdqError):
        found = describe(error, label)
    else:
        log.error("%s: failed in mid-stream", label, exc_info=error)
        found = bug_object(label)
    return b"data: " + orjson.dumps({"error": found}) + b"\n\n"
