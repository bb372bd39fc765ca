"""GET /health, /ready and /v1/models: what this process and its pool can do now."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pdq.errors import Unavailable
from pdq.gateway.context import GATEWAY, Gateway
from pdq.gateway.errors import NoWorker, error_object, json_response
from pdq.gateway.pool import STAGES, Snapshot


async def health(_: web.Request) -> web.Response:
    """The process lives; says nothing of Redis or workers."""
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 when a request could be answered now, else 503 with what is missing."""
    gateway = request.app[GATEWAY]
    snapshot = Snapshot()
    if gateway.draining:
        missing = ["draining"]
    elif gateway.model is None:
        missing = ["model"]
    else:
        try:
            snapshot = await gateway.look()
            missing = snapshot.missing
        except Unavailable:
            missing = ["redis"]
    counts = {stage: getattr(snapshot, stage) for stage in STAGES}
    if not missing:
        return json_response({"status": "ready", **counts, "numerics": snapshot.numerics})
    text = f"Not ready: {' and '.join(missing)}."
    body = {"status": "unready", "missing": missing, **counts, "error": error_object(text, 503, "not_ready")}
    response = json_response(body, 503)
    response.headers["Retry-After"] = "2"
    return response


async def list_models(request: web.Request) -> web.Response:
    """The pool's model if any live worker serves it."""
    gateway = request.app[GATEWAY]
    snapshot = await gateway.look()
    models = [] if snapshot.max_model_len is None else [_model(gateway, snapshot.max_model_len)]
    return json_response({"object": "list", "data": models})


async def get_model(request: web.Request) -> web.Response:
    gateway = request.app[GATEWAY]
    name = request.match_info["id"]
    snapshot = await gateway.look(name)
    if snapshot.max_model_len is None:
        raise NoWorker(f"No live worker serves {name!r}.")
    return json_response(_model(gateway, snapshot.max_model_len))


def _model(gateway: Gateway, workers_limit: int) -> dict[str, Any]:
    served = gateway.served()
    return {
        "id": served.name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "pdq",
        "max_model_len": min(served.max_model_len, workers_limit),
    }
