"""The Redis of the queue as the gateway looks at it, beside the client: may requests be put there, and how many wait?

One connection of its own. Knows nothing of HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdq import connection
from pdq.keys import Keys
from pdq.queue import queued_tokens

if TYPE_CHECKING:
    from pdq.config import RedisSettings


class QueueRedis:
    """safe: the server's eviction policy has been looked at and spares what is queued."""

    def __init__(self, settings: RedisSettings) -> None:
        self._keys = Keys(settings.pool)
        self._redis = connection.command(settings.redis_url, 1, self._keys.home)
        self.safe = False

    async def check(self) -> None:
        """Raises ConfigError if the server may evict requests, RedisError while it does not answer."""
        await connection.check_server(self._redis, "queue")
        self.safe = True

    async def queued_tokens(self) -> int:
        """Prompt tokens that wait for prefill or are in it. Raises RedisError."""
        return await queued_tokens(self._redis, self._keys)

    async def aclose(self) -> None:
        await self._redis.aclose()
