"""Around every request: its label, whether we can serve at all, the shape of failures, and one log line.

The label (`x-request-id`) is the client's if it is printable, else a new one. It is for people who compare logs; it
never becomes a key in Redis, so two requests may share one.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from pdq.errors import PdqError
from pdq.gateway.context import GATEWAY
from pdq.gateway.errors import Draining, bug_response, error_response, http_response

log = logging.getLogger(__name__)

HEADER = "x-request-id"
LABEL: web.RequestKey[str] = web.RequestKey("label", str)
MAX_LABEL = 128
ALWAYS_OPEN = ("/health", "/ready")


def is_label(text: str) -> bool:
    """Printable ASCII, and not too long: safe in a header and in a log line."""
    return 0 < len(text) <= MAX_LABEL and text.isascii() and text.isprintable()


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: everything that happens to a request becomes a response with a label and a log line."""
    given = request.headers.get(HEADER, "")
    label = request[LABEL] = given if is_label(given) else f"req-{uuid.uuid4().hex}"
    start = time.monotonic()
    status = 499  # nobody reads the answer of a client that has gone; the number is for the log
    try:
        with request.app[GATEWAY].activity:
            response = await _shaped(request, handler, label)
            status = response.status
            return response
    finally:
        took = (time.monotonic() - start) * 1000
        # The path without its query: people put keys there.
        level = logging.DEBUG if request.path in ALWAYS_OPEN else logging.INFO  # probes come every second
        log.log(level, "%s %.200s %d %.0f ms %s", request.method, request.rel_url.raw_path, status, took, label)


async def _shaped(request: web.Request, handler: Handler, label: str) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as e:
        return http_response(e)
    except PdqError as e:
        return error_response(e, label)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        log.exception("%s: failed", label)
        return bug_response(label)


@web.middleware
async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Nothing but the probes is served while the model loads or the process is about to end."""
    if request.path not in ALWAYS_OPEN:
        gateway = request.app[GATEWAY]
        if gateway.draining:
            raise Draining("The server is shutting down; try again later.")
        gateway.served()
    return await handler(request)


async def mark(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of every response, streams included (on_response_prepare)."""
    if LABEL in request:
        response.headers[HEADER] = request[LABEL]
    response.headers["Server"] = "pdq"
    if request.app[GATEWAY].draining:
        response.force_close()
