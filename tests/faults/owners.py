"""Workers of a pool at the level of single transitions: queues without programs."""

from __future__ import annotations

import asyncio
from typing import Self

from pdq import connection
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.keys import Keys
from pdq.queue import Job, Queue
from tests.servers import Server


class Owners:
    """Queues of several workers on one server; a lease lasts `lease` seconds (0: everything pending is reclaimable)."""

    def __init__(self, server: Server, pool: str = "default", lease: float = 0.0) -> None:
        self.keys = Keys(pool)
        self.redis = connection.command(server.url)
        self.client = AsyncClient(RedisSettings(redis_url=server.url, pool=pool))
        self._waiting = connection.blocking(server.url)
        self._lease = lease

    def queue(self, stage: str, owner: str) -> Queue:
        return Queue(
            *(self.redis, self._waiting), keys=self.keys, stage=stage, owner=owner, lease_seconds=self._lease,
            max_attempts=3, result_ttl=60,
        )  # fmt: skip

    async def take(self, queue: Queue) -> Job:
        async with asyncio.timeout(10):
            while True:
                jobs, failed = await queue.take(1, 0.01)
                assert failed is None
                if jobs:
                    return jobs[0]

    async def load(self) -> dict[str, int]:
        found = await self.redis.hgetall(self.keys.load)
        return {k.decode(): int(v) for k, v in found.items()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        await self.redis.aclose()
        await self._waiting.aclose()
