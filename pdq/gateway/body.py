"""From the bytes of a request to a checked body: size, time to arrive, JSON, schema. Everything wrong is a 4xx."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import orjson
from aiohttp import web

from pdq.errors import InvalidRequest
from pdq.gateway.context import GATEWAY
from pdq.gateway.offload import TooSlow
from pdq.gateway.schemas import ChatBody, CompletionBody

B = TypeVar("B", ChatBody, CompletionBody)

INLINE_BYTES = 64 * 1024  # a thread costs more than parsing less than this
PARSE_SECONDS = 30.0
ARRIVE_SECONDS = 60.0
# Building values holds the interpreter, and with it the event loop, for up to a microsecond each. Text may hold as many
# of these characters, but then it is too long for any context.
MAX_VALUES = 2_000_000


async def read_body(request: web.Request, schema: type[B]) -> B:
    """The checked body. Raises InvalidRequest, Busy, HTTPRequestEntityTooLarge, HTTPRequestTimeout."""
    data = await _receive(request)
    gateway = request.app[GATEWAY]
    limit = gateway.served().max_model_len
    if len(data) <= INLINE_BYTES:
        return _parse(data, schema, limit)
    try:
        return await gateway.threads.run(PARSE_SECONDS, _parse, data, schema, limit)
    except TooSlow as e:
        raise InvalidRequest(f"The body took more than {PARSE_SECONDS:g} s to parse.") from e


async def _receive(request: web.Request) -> bytes:
    limit = request.app[GATEWAY].settings.max_body_bytes
    if (request.content_length or 0) > limit:
        raise web.HTTPRequestEntityTooLarge(limit)
    try:
        async with asyncio.timeout(ARRIVE_SECONDS):
            return await request.read()
    except TimeoutError as e:
        raise web.HTTPRequestTimeout from e
    except web.RequestPayloadError as e:
        raise InvalidRequest("The body does not have the encoding that its headers announce.") from e


def _parse(data: bytes, schema: type[B], limit: int) -> B:
    if sum(data.count(c) for c in (b",", b"[", b"{")) > MAX_VALUES:
        raise InvalidRequest(f"The body has more than {MAX_VALUES} values.")
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise InvalidRequest(f"The body is not valid JSON: {e}.") from None
    return schema.parse(value, limit)
