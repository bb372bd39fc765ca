"""Every failure as OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`, all four always there.

Owns the HTTP side of errors: type names, headers, what a client may read. pdq's own errors bring status and code.
"""

from __future__ import annotations

import http
import logging
import math
from typing import Any

import orjson
from aiohttp import web

from pdq.errors import PdqError, RequestFailed, Unavailable

log = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
_TYPES = {404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable", 504: "timeout"}
_CODES = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "request_too_large"}


class NotAllowed(PdqError):
    status, code = 401, "invalid_api_key"


class NotReady(Unavailable):
    """This gateway or its pool cannot serve now; the message is meant for clients."""


class ModelLoading(NotReady):
    code = "model_loading"


class Draining(NotReady):
    code = "draining"


class NoWorker(NotReady):
    code = "no_worker"


class Busy(NotReady):
    code = "overloaded"


def error_object(message: str, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """The value of "error"."""
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    return {"message": encodable(message), "type": kind, "param": param, "code": code}


def encodable(text: str) -> str:
    """`text` without halves of surrogate pairs, which a broken URL or header can hold and JSON cannot."""
    return text.encode("utf-8", "replace").decode()


def describe(error: PdqError, label: str) -> dict[str, Any]:
    """The error object for `error`. label: the request's x-request-id, so that a report can be matched to a log.

    What a Redis client says of an outage names hosts and ports: it is logged, not shown.
    """
    message = error.message
    if isinstance(error, Unavailable) and not isinstance(error, NotReady):
        log.warning("%s: %s", label, message)
        message = "The queue does not answer; try again later."
    elif isinstance(error, RequestFailed):
        message = f"{message} (request id {label})"
    return error_object(message, error.status, error.code, error.param)


def error_response(error: PdqError, label: str) -> web.Response:
    """`error` as a whole response."""
    response = json_response({"error": describe(error, label)}, error.status)
    if error.retryable:
        response.headers["Retry-After"] = str(max(1, math.ceil(error.retry_after or RETRY_SECONDS)))
    elif isinstance(error, NotAllowed):
        response.headers["WWW-Authenticate"] = "Bearer"
    elif error.status in (409, 499) or error.status >= 500:
        # OpenAI's clients repeat a 409 and every 5xx on their own; here that would only queue the same work again.
        response.headers["x-should-retry"] = "false"
    return response


def http_response(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (unknown route, wrong method, body too large) in the same shape, headers kept."""
    status = error.status
    message = f"{http.HTTPStatus(status).phrase}."
    if isinstance(error, web.HTTPMethodNotAllowed):
        message = f"{error.method} is not allowed here; use {' or '.join(sorted(error.allowed_methods))}."
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        message = "The request body is over the limit of this server."
    response = json_response({"error": error_object(message, status, _CODES.get(status))}, status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def bug_response(label: str) -> web.Response:
    """A fault of ours: no internals, only what finds the traceback in the log."""
    return json_response({"error": bug_object(label)}, 500)


def bug_object(label: str) -> dict[str, Any]:
    return error_object(f"Internal error; the log has it under request id {label}.", 500, "server_error")


def json_response(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json", charset="utf-8")
