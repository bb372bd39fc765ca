"""The Redis clients, with every default that has changed between redis-py versions pinned.

Four kinds: `command` (asyncio; scripts and short commands), `blocking` (asyncio; XREAD and XREADGROUP, which wait on
the server), `bulk` (threads; KV bytes) and `lease` (threads; one connection that nothing else uses). They never share
connections: a block of 4 MB must not delay a token, and a waiting read must not delay a lease.

A URL of `redis+cluster://` or `rediss+cluster://` names any node of a Redis Cluster (cluster.py). `home` is then the
key in whose slot a client works, wherever that slot goes; `nodes` is `bulk` for keys of all slots.

Commands are retried here only where a repetition is harmless: all scripts are idempotent, reads are reads. A blocking
XREADGROUP is not retried (see queue.py).
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis
import redis.asyncio as aredis
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.exceptions import NoPermissionError
from redis.retry import Retry

from pdq.cluster import (
    REDIRECTIONS,
    SLOTS,
    Address,
    AsyncFollowing,
    AsyncFollowingTLS,
    Cluster,
    Following,
    FollowingTLS,
    Home,
    Nodes,
)
from pdq.errors import ConfigError
from pdq.one_connection import OneConnection

log = logging.getLogger(__name__)

AsyncRedis = OneConnection
SyncRedis = redis.Redis
RedisError = redis.RedisError

CONNECT_TIMEOUT = 2.0
COMMAND_TIMEOUT = 5.0
LEASE_TIMEOUT = 2.0
BULK_TIMEOUT = 10.0  # without a byte moving
BLOCK_SECONDS = 5.0  # longest wait of a blocking read; its socket timeout is above it by
BLOCK_MARGIN = 5.0
POOL_WAIT = 5.0
PATIENCE = 0.05  # with a silent connection, by those who give up waiting

# A retry connects anew. After READONLY too: the master has become a replica, and only a new connection can find the
# new master behind the same address.
_RETRIED = (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError)
# Answers that a server gives to every command, or to every write, for a while. redis-py has no classes for some of
# them, and a Redis before 7 puts what a script met into the middle of its own error.
_REFUSES_ALL = re.compile(r"(?:^|[ -])(?:BUSY|CLUSTERDOWN|LOADING|MASTERDOWN|MISCONF|NOREPLICAS|READONLY|TRYAGAIN) ")
_CLUSTER = "+cluster"
IS_CLUSTER = "the server is a node of a Redis Cluster; write redis+cluster:// (or rediss+cluster://)"
IS_NO_CLUSTER = "the server is no node of a Redis Cluster; write redis:// (or rediss://)"
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


def is_outage(error: redis.RedisError) -> bool:
    """Is Redis away, or does it refuse everybody's writes for now? Then the same write may succeed later.

    Any other error is a refusal of this one write, which would be refused again. OutOfMemoryError is no outage: the
    scripts of running requests do not meet it (lua/common), and for what else does there may be room later.
    """
    if isinstance(error, (*_RETRIED, *REDIRECTIONS)):
        return True
    return isinstance(error, redis.ResponseError) and _REFUSES_ALL.search(str(error)) is not None


def command(url: str, connections: int = 16, home: str = "") -> AsyncRedis:
    """Short commands and scripts, on one connection; `connections` bounds those of pipelines, which wait for one."""
    retry = _AsyncRetry(_backoff(), 2, supported_errors=_RETRIED)
    return _asyncio(url, COMMAND_TIMEOUT, retry, connections, home, PATIENCE)


def blocking(url: str, home: str = "") -> AsyncRedis:
    """One connection for reads that wait on the server."""
    retry = _AsyncRetry(NoBackoff(), 0, supported_errors=_RETRIED)
    return _asyncio(url, BLOCK_SECONDS + BLOCK_MARGIN, retry, 1, home, 0.0)


def bulk(url: str, connections: int, **transport: Any) -> SyncRedis:
    """KV bytes, from threads. transport: parser_class and command_packer of `bulk.connect`."""
    retry = Retry(_backoff(), 1, supported_errors=_RETRIED)
    return _threads(url, BULK_TIMEOUT, retry, connections, **transport)


def nodes(url: str, connections: int, **transport: Any) -> Nodes:
    """`bulk` for each node of a cluster. Nothing is repeated: a node may be gone for good."""

    def open_node(node: Address) -> SyncRedis:
        return _threads(_at(url, node), BULK_TIMEOUT, Retry(NoBackoff(), 0), connections, **transport)

    return Nodes(_cluster(url), open_node)


def everywhere(url: str) -> SyncRedis | redis.RedisCluster:
    """All of a Redis, all nodes of a cluster, for who looks at it from outside. Raises RedisError, ConfigError."""
    if not is_cluster(url):
        return bulk(url, 1)
    seed = _at(url, _seed(url))
    try:
        return redis.RedisCluster.from_url(seed, socket_timeout=BULK_TIMEOUT, **_options(url))
    except redis.RedisClusterException as e:
        raise redis.ConnectionError(str(e)) from e


def lease(url: str, home: str = "") -> SyncRedis:
    """The lease thread's own connection; short timeouts, since a late renewal is no renewal."""
    return _threads(url, LEASE_TIMEOUT, Retry(NoBackoff(), 1, supported_errors=_RETRIED), 1, home)


def is_cluster(url: str) -> bool:
    return url.partition("://")[0].endswith(_CLUSTER)


def _at(url: str, node: Address) -> str:
    """The URL of one node of the cluster that `url` names."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")
    host = f"[{node[0]}]" if ":" in node[0] else node[0]
    netloc = f"{''.join(login[:2])}{host}:{node[1]}"
    return urlunsplit(parts._replace(scheme=parts.scheme.removesuffix(_CLUSTER), netloc=netloc))


def _cluster(url: str) -> Cluster:
    def ask(node: Address) -> list[Any]:
        with _threads(_at(url, node), LEASE_TIMEOUT, Retry(NoBackoff(), 0), 1) as client:
            try:
                ranges: list[Any] = client.execute_command("CLUSTER SLOTS")
            except redis.ResponseError as e:
                if "cluster support disabled" not in str(e):
                    raise
                return [[0, SLOTS - 1, [b"", node[1]]]]  # `check_server` refuses it
            return ranges

    return Cluster(_seed(url), ask)


def _seed(url: str) -> Address:
    try:
        parts = urlsplit(url)
        return parts.hostname or "localhost", parts.port or 6379
    except ValueError as e:
        raise ConfigError(f"redis_url: {e}") from e


def _options(url: str) -> dict[str, Any]:
    if url.startswith("unix:"):
        return _COMMON
    options = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
    return {**_COMMON, "socket_keepalive": True, "socket_keepalive_options": options}


def _following(url: str, home: str, plain: type, tls: type) -> tuple[str, dict[str, Any]]:
    """URL and options for a pool; of a cluster's only the scheme is not used, since it would set the class."""
    if not is_cluster(url):
        return url, {}
    scheme, _, rest = url.partition(f"{_CLUSTER}://")
    return f"redis://{rest}", {
        "connection_class": tls if scheme == "rediss" else plain,
        "home": Home(_cluster(url), home),
    }


def _asyncio(url: str, timeout: float, retry: AsyncRetry, connections: int, home: str, patience: float) -> AsyncRedis:
    url, more = _following(url, home, AsyncFollowing, AsyncFollowingTLS)
    try:
        pool = aredis.BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=POOL_WAIT,
            socket_timeout=timeout,
            retry=retry,
            **_options(url),
            **more,
        )
    except ValueError as e:
        raise ConfigError(f"redis_url: {e}") from e
    return OneConnection(pool, retry, timeout, patience)


def _threads(url: str, timeout: float, retry: Retry, connections: int, home: str = "", **transport: Any) -> SyncRedis:
    url, more = _following(url, home, Following, FollowingTLS)
    try:
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=connections,
            timeout=POOL_WAIT,
            socket_timeout=timeout,
            socket_read_size=1 << 16,
            retry=retry,
            **_options(url),
            **more,
            **transport,
        )
    except ValueError as e:
        raise ConfigError(f"redis_url: {e}") from e
    return redis.Redis.from_pool(pool)


async def check_server(client: AsyncRedis, role: str) -> None:
    """Refuse a server that evicts live jobs, or heartbeats before blocks, and a wrong kind. role: "queue" or "kv".

    Raises ConfigError, RedisError.
    """
    try:
        _check_kind(await client.info("cluster"), role, following="home" in client.connection_pool.connection_kwargs)
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


def _check_kind(info: dict[str, Any], role: str, *, following: bool) -> None:
    name = {"queue": "redis_url", "kv": "kv_url"}[role]
    is_node = bool(info.get("cluster_enabled"))
    if is_node and not following:
        raise ConfigError(f"{name}: {IS_CLUSTER}")
    if following and not is_node:
        raise ConfigError(f"{name}: {IS_NO_CLUSTER}")
