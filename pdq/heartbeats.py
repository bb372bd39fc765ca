"""Who is in a pool: the heartbeats of live workers, and whether a new worker may join them.

Workers write their heartbeat themselves (worker.py); clients, gateways and new workers read it. No torch.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pdq.connection import AsyncRedis
from pdq.errors import ConfigError
from pdq.keys import Keys
from pdq.messages import BadMessage, WorkerInfo, decode

TTL_MS = 10_000
LOOK_SECONDS = 0.5
MOST_WORKERS = 1000


async def live(redis: AsyncRedis, keys: Keys) -> list[WorkerInfo]:
    """The workers whose heartbeat is fresh. Raises RedisError."""
    names: Any = await redis.zrange(keys.workers, 0, MOST_WORKERS - 1)
    values: Any = await redis.mget([keys.worker(n.decode()) for n in names]) if names else []
    found = []
    for value in values:
        if value is not None:
            try:
                found.append(decode(WorkerInfo, value))
            except BadMessage:  # a newer pdq's worker: none of ours
                continue
    return found


async def join(redis: AsyncRedis, keys: Keys, fingerprint: bytes) -> None:
    """Return once no live worker of the pool has KV that a worker with this fingerprint could not exchange.

    Those of another model may have died just now, so they get the life of a heartbeat to go away. Raises ConfigError
    that names both, RedisError.
    """
    until = time.monotonic() + TTL_MS / 1000 + LOOK_SECONDS
    while others := [w for w in await live(redis, keys) if w.fingerprint != fingerprint]:
        if time.monotonic() > until:
            other = others[0]
            raise ConfigError(
                f"model: pool {keys.pool!r} has the {other.stage} worker {other.name} with {other.model} and KV "
                f"fingerprint {other.fingerprint.hex()[:16]}, this worker's is {fingerprint.hex()[:16]}: weights, "
                "--dtype, --quantization, --block-size or --kv-codec differ; make them equal, declare a common "
                "--kv-codec, or use another --pool"
            )
        await asyncio.sleep(LOOK_SECONDS)
