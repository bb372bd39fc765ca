"""Is the process of this host alive and at work? Asks the gateway over HTTP, or Redis for a worker's heartbeat.

For health checks of containers (`pdq health`) and for `pdq serve`, which waits with it until its gateway is ready.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pdq.client import AsyncClient
from pdq.config import DecodeSettings, GatewaySettings, PrefillSettings, RedisSettings, WorkerSettings
from pdq.errors import ConfigError, Unavailable

_SECONDS = 2.0
_STAGES: dict[str, type[WorkerSettings]] = {"prefill": PrefillSettings, "decode": DecodeSettings}


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP status and the JSON object of the body ({} if it was none)."""

    status: int
    body: dict[str, Any]


def check(role: str) -> None:
    """Raises Unavailable unless the gateway answers, or a worker of this stage on this host has a fresh heartbeat.

    A heartbeat that says "stalled" is a failure: the process lives, but its work has not moved for `stall_seconds`.
    Configured by the same variables as the process itself: address of the gateway; Redis, pool and worker name.
    """
    if role == "gateway":
        settings = GatewaySettings.load()
        answer = get(settings.host, settings.port, "/health")
        if answer is None or answer.status != 200:
            raise Unavailable(f"no gateway answers at {url(settings.host, settings.port)}")
    elif role in _STAGES:
        asyncio.run(_check_worker(_STAGES[role].load(), role))
    else:
        raise ConfigError(f"health: one of gateway, prefill, decode is wanted, got {role!r}")


async def _check_worker(settings: WorkerSettings, stage: str) -> None:
    mine = f"{stage}-{socket.gethostname()}-"  # how a worker names itself
    try:
        async with AsyncClient(settings.part(RedisSettings)) as client, asyncio.timeout(2 * _SECONDS):
            found = await client.workers()
    except TimeoutError as e:
        raise Unavailable("Redis does not answer") from e
    here = [w for w in found if (w.name == settings.name if settings.name else w.name.startswith(mine))]
    if not here:
        raise Unavailable(f"no heartbeat of {settings.name or f'a {stage} worker on this host'}")
    if stalled := [w.name for w in here if w.state == "stalled"]:
        raise Unavailable(f"{', '.join(stalled)} has stalled: its work does not move")


def get(host: str, port: int, path: str, api_key: str | None = None) -> Answer | None:
    """GET from a gateway that listens on `host`; None while it does not answer. Blocks for 2 s at most."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    connection = http.client.HTTPConnection(reachable(host), port, timeout=_SECONDS)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body: Any = {}
        with suppress(ValueError):
            body = json.loads(response.read())
        return Answer(response.status, body if isinstance(body, dict) else {})
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def url(host: str, port: int) -> str:
    """Where a gateway that listens on `host` is reached from this machine."""
    host = reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable(host: str) -> str:
    """An address to connect to for one to listen on: "every address" is also this machine's own."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104
