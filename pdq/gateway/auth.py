"""Who asks: the API key of a request, and the tenant it stands for.

Runs before anything of a request is looked at, whether it could be served or not. With keys configured, everything but
the probes needs one; without, all requests are of one tenant, "". The tenant is what separates the prefix caches and
the idempotency keys of those who share a pool, and no field of a body can replace it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from pdq.api_keys import ApiKeys
from pdq.gateway.context import GATEWAY
from pdq.gateway.errors import NotAllowed
from pdq.gateway.middleware import ALWAYS_OPEN

WATCH_SECONDS = 1.0  # between two looks at the keys file
TENANT: web.RequestKey[str] = web.RequestKey("tenant", str)


@web.middleware
async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Note the tenant of `request`. Raises NotAllowed."""
    keys = request.app[GATEWAY].keys
    request[TENANT] = _tenant(request, keys) if keys.required and request.path not in ALWAYS_OPEN else ""
    return await handler(request)


def _tenant(request: web.Request, keys: ApiKeys) -> str:
    key = _bearer(request)
    if not key:
        raise NotAllowed("An API key is needed: send it in the header 'Authorization: Bearer KEY'.")
    tenant = keys.tenant(key)
    if tenant is None:
        raise NotAllowed("The API key is not valid.")
    return tenant


def _bearer(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def watch_keys(app: web.Application) -> AsyncIterator[None]:
    """While the app runs: read the keys file again when it has changed (a cleanup context)."""
    keys = app[GATEWAY].keys
    if not keys.from_file:
        yield
        return

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            await asyncio.to_thread(keys.refresh)

    task = asyncio.create_task(watch(), name="pdq-api-keys")
    yield
    task.cancel()
    await asyncio.wait({task})
