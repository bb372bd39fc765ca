"""The Redis clients, with every default that has changed between redis-py versions pinned.

Four kinds: `command` (asyncio; scripts and short commands), `blocking` (asyncio; XREAD and XREADGROUP, which wait on
the server), `bulk` (threads; KV bytes) and `lease` (threads; one connection that nothing else uses). They never share
connections: a block of 4 MB must not delay a token, and a waiting read must not delay a lease.

Commands are retried here only where a repetition is harmless: all scripts are idempotent, reads are reads. A blocking
XREADGROUP is not retried (see queue.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from pdq.errors import ConfigError

log = logging.getLogger(__name__)

AsyncRedis = aredis.Redis
SyncRedis = redis.Redis
RedisError = redis.RedisError

CONNECT_TIMEOUT = 2.0
COMMAND_TIMEOUT = 5.0
LEASE_TIMEOUT = 2.0
BULK_TIMEOUT = 10.0  # without a byte moving
BLOCK_SECONDS = 5.0  # longest wait of a blocking read; its socket timeout is above it by
BLOCK_MARGIN = 5.0
POOL_WAIT = 5.0

# A retry connects anew. After READONLY too: the master has become a replica, and only a new connection can find the
# new master behind the same address.
_RETRIED = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
_COMMON = {
    "protocol": 2,
    "legacy_responses": True,
    "decode_responses": False,
    "socket_connect_timeout": CONNECT_TIMEOUT,
    "health_check_interval": 0,
}
# An idle connection that leads nowhere any more (a firewall forgot it) is closed after 11 s, before anybody needs it.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class _AsyncRetry(AsyncRetry):
    """Every asyncio command, pipeline and connect goes through this; see to it that a cancel gets through.

    Before Python 3.12 `asyncio.wait_for`, with which redis-py sends, loses a cancel that comes as the send completes.
    """

    async def call_with_retry(self, *args: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        try:
            return await super().call_with_retry(*args, **options)
        finally:
            if task and task.cancelling() > before:
                raise asyncio.CancelledError


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=0.02, cap=0.2)


def command(url: str, connections: int = 16) -> AsyncRedis:
    """Short commands and scripts. Callers over `connections` at once wait for a connection instead of failing."""
    retry = _AsyncRetry(_backoff(), 2, supported_errors=_RETRIED)
    return _asyncio(url, COMMAND_TIMEOUT, retry, connections)


def blocking(url: str) -> AsyncRedis:
    """One connection for reads that wait on the server."""
    return _asyncio(url, BLOCK_SECONDS + BLOCK_MARGIN, _AsyncRetry(NoBackoff(), 0, supported_errors=_RETRIED), 1)


def bulk(url: str, connections: int, **transport: Any) -> SyncRedis:
    """KV bytes, from threads. transport: parser_class and command_packer of `bulk.connect`."""
    retry = Retry(_backoff(), 1, supported_errors=_RETRIED)
    return _threads(url, BULK_TIMEOUT, retry, connections, read_size=1 << 16, **transport)


def lease(url: str) -> SyncRedis:
    """The lease thread's own connection; short timeouts, since a late renewal is no renewal."""
    return _threads(url, LEASE_TIMEOUT, Retry(NoBackoff(), 1, supported_errors=_RETRIED), 1, read_size=1 << 16)


def _options(url: str) -> dict[str, Any]:
    if url.startswith("unix:"):
        return _COMMON
    options = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
    return {**_COMMON, "socket_keepalive": True, "socket_keepalive_options": options}


def _asyncio(url: str, timeout: float, retry: AsyncRetry, connections: int) -> AsyncRedis:
    try:
        pool = aredis.BlockingConnectionPool.from_url(
            url, max_connections=connections, timeout=POOL_WAIT, socket_timeout=timeout, retry=retry, **_options(url)
        )
    except ValueError as e:
        raise ConfigError(f"redis_url: {e}") from e
    return aredis.Redis.from_pool(pool)


def _threads(url: str, timeout: float, retry: Retry, connections: int, read_size: int, **transport: Any) -> SyncRedis:
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=POOL_WAIT,
            socket_timeout=timeout,
            socket_read_size=read_size,
            retry=retry,
            **_options(url),
            **transport,
        )
    except ValueError as e:
        raise ConfigError(f"redis_url: {e}") from e
    return redis.Redis.from_pool(pool)


async def check_server(client: AsyncRedis, role: str) -> None:
    """Refuse a server that evicts live jobs, or heartbeats before blocks. role: "queue" or "kv".

    Raises ConfigError, RedisError.
    """
    try:
        memory = await client.info("memory")
    except NoPermissionError as e:
        log.warning("the eviction policy of Redis cannot be seen, it must not be allkeys-*: %s", e)
        return
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if role == "queue" and (policy.startswith("allkeys") or policy == "volatile-ttl"):
        victims = "heartbeats and results first" if policy == "volatile-ttl" else "queued requests"
        raise ConfigError(
            f"redis_url: maxmemory-policy {policy} may evict {victims}; set it with "
            "'CONFIG SET maxmemory-policy volatile-lru' (or noeviction), or give the queue a Redis of its own"
        )
