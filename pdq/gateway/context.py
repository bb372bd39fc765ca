"""What the handlers share: settings, the SDK client, the served model, and the helpers that live as long as the app.

Holds no request's state.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdq.api_keys import ApiKeys
from pdq.config import GatewaySettings
from pdq.connection import RedisError
from pdq.errors import ModelNotFound, Unavailable
from pdq.gateway.errors import ModelLoading
from pdq.gateway.offload import Offload
from pdq.gateway.pool import PoolView, Snapshot
from pdq.gateway.queue_redis import QueueRedis
from pdq.text import Tokenizer

if TYPE_CHECKING:
    from pdq.client import AsyncClient

CLOSE_SECONDS = 2.0
ESTIMATE_SECONDS = 0.05  # a refusal is to be quick


@dataclass(frozen=True, slots=True)
class Served:
    """The model behind this gateway. max_model_len: prompt + completion, in tokens."""

    name: str
    tokenizer: Tokenizer
    max_model_len: int


class Background:
    """Work that outlives the request it belongs to, such as telling Redis that a client has gone."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Give what still runs CLOSE_SECONDS, then cancel it."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        for task in late:
            task.cancel()


class Activity:
    """Counts the requests being answered; `wait_idle` returns when there are none."""

    def __init__(self) -> None:
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self._running += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()


class Gateway:
    """One per application. model: None until it is loaded. ping_seconds: longest silence of a stream.

    redis: to look at the queue's Redis itself; None if whoever made `client` sees to it. Raises ConfigError if there
    are no keys in the keys file.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        client: AsyncClient,
        model: Served | None,
        ping_seconds: float,
        redis: QueueRedis | None = None,
    ) -> None:
        self.settings = settings
        self.client = client
        self.model = model
        self.ping_seconds = ping_seconds
        self.redis = redis
        self.keys = ApiKeys(settings.api_key, settings.api_keys_file)
        self.created = int(time.time())
        self.draining = False
        self.pool = PoolView(client)
        self.threads = Offload()
        self.background = Background()
        self.activity = Activity()

    def served(self, name: str | None = None) -> Served:
        """The model if it goes by `name` (None: whatever is served). Raises ModelLoading, ModelNotFound."""
        if self.model is None:
            raise ModelLoading("The model is loading; try again later.", retry_after=5.0)
        if name is not None and name != self.model.name:
            shown = name if len(name) <= 200 else name[:200] + "…"
            raise ModelNotFound(
                f"The model {shown!r} does not exist; this server has {self.model.name!r}.", param="model"
            )
        return self.model

    async def look(self, name: str | None = None) -> Snapshot:
        """The live workers of the model `name`. Raises ModelLoading, ModelNotFound, and Unavailable without Redis."""
        served = self.served(name)
        self._require_safe_redis()
        return await self.pool.look(served.name)

    def _require_safe_redis(self) -> None:
        """Nothing is queued in a Redis that may evict it: one that has not been looked at counts as away."""
        if self.redis is not None and not self.redis.safe:
            raise Unavailable("Redis has not answered yet", retry_after=2.0)

    async def wait_estimate(self) -> float | None:
        """Seconds until prefill has done what is queued now; None when that cannot be told."""
        if self.redis is None:
            return None
        try:
            async with asyncio.timeout(ESTIMATE_SECONDS):
                return self.pool.rate.wait(await self.redis.queued_tokens())
        except (RedisError, TimeoutError):
            return None

    async def context_limit(self, name: str | None) -> int:
        """Tokens of context for a request to the model `name`, if it can be served now.

        Workers may have been started with less than the model's own. Raises ModelNotFound, NoWorker, Unavailable.
        """
        served = self.served(name)
        self._require_safe_redis()
        snapshot = await self.pool.serving(served.name)
        return min(served.max_model_len, snapshot.max_model_len or served.max_model_len)

    async def aclose(self) -> None:
        """For the end of the app: handlers that were cancelled may still have requests to cancel in Redis."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.activity.wait_idle()
        await self.background.aclose()
        await self.pool.aclose()
        self.threads.close()


GATEWAY: web.AppKey[Gateway] = web.AppKey("gateway", Gateway)
