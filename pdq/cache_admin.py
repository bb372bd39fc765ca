"""`pdq cache`: what the KV store holds and did, and how to empty it. Reads and deletes; nothing of a request is shown.

Looks at the whole keyspace of the KV Redis with SCAN, a little at a time, so it may run beside a busy pool. Blocks are
told apart by the model they belong to (the first 8 bytes of its fingerprint), not by pool: pools that serve one model
share them. No torch.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, TypeAlias

from redis import RedisCluster
from redis.exceptions import RedisClusterException

from pdq import connection, heartbeats
from pdq.config import RedisSettings
from pdq.connection import RedisError, SyncRedis
from pdq.errors import ConfigError, Unavailable
from pdq.keys import BlockKeys, Keys, kv_pattern, model_of, tail_pattern

Redis: TypeAlias = SyncRedis | RedisCluster
_BATCH = 500
_SECONDS = 3.0


@dataclass(slots=True)
class ModelStats:
    """One model's blocks. bytes: of the values. idle: seconds since the last use of the least and most recently used.

    indexed: blocks that a lookup finds; pinned: those of them that a request in work needs.
    """

    model: str
    blocks: int = 0
    bytes: int = 0
    indexed: int = 0
    pinned: int = 0
    longest_idle: float | None = None
    shortest_idle: float | None = None


@dataclass(slots=True)
class CacheStats:
    """The KV Redis, its blocks by model, and what the pool's live workers have counted since they started."""

    used_memory: int
    max_memory: int
    policy: str
    tails: int
    models: list[ModelStats]
    counters: dict[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def hit_ratio(self) -> float | None:
        """Cached part of the prompt tokens that prefill has seen."""
        prompt = self.counters.get("prompt_tokens", 0)
        return self.counters.get("cached_tokens", 0) / prompt if prompt else None


def stats(settings: RedisSettings) -> CacheStats:
    """Raises Unavailable if the KV Redis does not answer."""
    with _open(settings) as redis, _named("kv_url"):
        memory = _memory(redis)
        blocks: Counter[str] = Counter()
        sample: dict[str, bytes] = {}
        for key in redis.scan_iter(kv_pattern("*"), count=_BATCH):
            if model := model_of(key):
                blocks[model] += 1
                sample.setdefault(model, key)
        now = _now_ms(redis)
        models = [_model(redis, name, count, sample[name], now) for name, count in sorted(blocks.items())]
        return CacheStats(
            used_memory=sum(int(m["used_memory"]) for m in memory),
            max_memory=sum(int(m.get("maxmemory", 0)) for m in memory),
            policy=str(memory[0].get("maxmemory_policy", "noeviction")),
            tails=sum(1 for _ in redis.scan_iter(tail_pattern(), count=_BATCH)),
            models=models, counters=_counters(settings),
        )  # fmt: skip


def clear(settings: RedisSettings, model: str | None = None, *, pinned: bool = False) -> int:
    """Delete the blocks of all models, or of the one named as in `stats`; how many.

    Workers forget what they hold themselves before their next lookup. pinned: those that requests in work need, too;
    such a request computes them again. Raises ConfigError, Unavailable.
    """
    if model is not None and not re.fullmatch(r"[0-9a-f]{16}", model):
        raise ConfigError(f"model: 16 hex digits as shown by 'pdq cache stats' are wanted, got {model!r}")
    with _open(settings) as redis, _named("kv_url"):
        found = {model_of(k) for k in redis.scan_iter(kv_pattern(model or "*"), count=_BATCH)}
        return sum(_clear(redis, name, pinned) for name in found if name)


def _clear(redis: Redis, model: str, pinned: bool) -> int:
    names = BlockKeys(bytes.fromhex(model))
    # First of all: what a worker stores from its own memory after this has been looked up after it, too.
    redis.incr(names.epoch)
    redis.expire(names.epoch, 30 * 86400)
    kept: set[bytes] = set()
    if not pinned:
        alive: Any = redis.zrangebyscore(names.index, f"({_now_ms(redis)}", "+inf")
        kept = set(alive)
    kept_keys = {names.block(h).encode() for h in kept}
    victims = (k for k in redis.scan_iter(kv_pattern(model), count=_BATCH) if k not in kept_keys and model_of(k))
    deleted = 0
    for batch in _batches(victims):
        pipe = redis.pipeline(transaction=False)
        for key in batch:
            pipe.unlink(key)
        pipe.zrem(names.index, *(bytes.fromhex(k.rpartition(b":")[2].decode()) for k in batch))
        deleted += sum(pipe.execute()[:-1])
    return deleted


def _memory(redis: Redis) -> list[dict[str, Any]]:
    """Of each server."""
    if isinstance(redis, RedisCluster):
        return list(redis.info("memory", target_nodes=RedisCluster.PRIMARIES).values())
    found: Any = redis.info("memory")
    return [found]


def _model(redis: Redis, name: str, blocks: int, sample: bytes, now: float) -> ModelStats:
    index = BlockKeys(bytes.fromhex(name)).index
    first: Any = redis.zrange(index, 0, 0, withscores=True)
    last: Any = redis.zrevrangebyscore(index, now, "-inf", start=0, num=1, withscores=True)
    size: Any = redis.strlen(sample)  # all of a model's blocks are of one size
    idle = [max(now - score, 0.0) / 1000 for _, score in [*first, *last]]
    return ModelStats(
        model=name, blocks=blocks, bytes=blocks * int(size), indexed=int(redis.zcard(index)),
        pinned=int(redis.zcount(index, f"({now}", "+inf")),
        longest_idle=idle[0] if idle else None, shortest_idle=idle[-1] if idle else None,
    )  # fmt: skip


def _counters(settings: RedisSettings) -> dict[str, int]:
    """Sums over the pool's live workers; empty if the queue's Redis cannot be asked."""

    async def ask() -> Counter[str]:
        sums: Counter[str] = Counter()
        keys = Keys(settings.pool)
        async with connection.command(settings.redis_url, 1, keys.home) as redis, asyncio.timeout(_SECONDS):
            for worker in await heartbeats.live(redis, keys):
                sums.update(dict(worker.counters))
        return sums

    with suppress(RedisError, TimeoutError):
        return dict(sorted(asyncio.run(ask()).items()))
    return {}


def _open(settings: RedisSettings) -> Redis:
    with _named("kv_url"):
        return connection.everywhere(settings.blocks_url)


class _named:  # noqa: N801  reads as the statement it is
    """Errors of Redis as Unavailable that names the setting."""

    def __init__(self, setting: str) -> None:
        self._setting = setting

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RedisError | RedisClusterException):
            raise Unavailable(f"{self._setting}: Redis does not answer: {error}") from error


def _now_ms(redis: Redis) -> float:
    seconds, micros = redis.time()
    return float(seconds * 1000 + micros / 1000)


def _batches(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    keys = iter(keys)
    while batch := list(islice(keys, _BATCH)):
        yield batch
