"""Which node of a Redis Cluster has a key, and connections that go there.

The control keys of a pool are in one slot (keys.py). Their clients are ordinary ones whose connections look for the
owner of that slot whenever they connect (`Following`); a redirection counts as a lost connection, so what heals an
outage heals a failover and a moved slot, too. KV blocks are in all slots: `Nodes` has connections to each node.

Between redis-py and `connection`, which makes these things; knows nothing of requests or blocks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import redis
import redis.asyncio as aredis
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

Address: TypeAlias = tuple[str, int]
REDIRECTIONS = (AskError, TryAgainError, ClusterDownError)  # MOVED is an ASK here
SLOTS = 16384
PAUSE_SECONDS = 1.0  # between two looks at the cluster, and before a node that was away is tried again
LOOK_SECONDS = 4.0  # after which no further node is asked


def slot_of(key: str) -> int:
    return key_slot(key.encode())


class Cluster:
    """Who has which slot, as far as is known. Shared by the threads of one client.

    seed: the node that is asked first, and again when no other answers. ask: a node's answer to CLUSTER SLOTS; raises
    RedisError. trouble: why the last look failed.
    """

    def __init__(self, seed: Address, ask: Callable[[Address], list[Any]]) -> None:
        self._seed = seed
        self._ask = ask
        self._owners: list[Address | None] = [None] * SLOTS
        self._doubtful = True
        self._next_look = 0.0
        self._lock = threading.Lock()
        self.nodes = [seed]
        self.trouble = "no node has it"

    def owner(self, slot: int) -> Address | None:
        """The node that has the slot; None if there is none. Blocks while the nodes are asked."""
        if self._doubtful and time.monotonic() >= self._next_look:
            with self._lock:
                if self._doubtful and time.monotonic() >= self._next_look:
                    self._look()
                    self._next_look = time.monotonic() + PAUSE_SECONDS
        return self._owners[slot]

    def doubt(self) -> None:
        """Something did not go as if all were known: ask again, if that was not done just now."""
        self._doubtful = True

    def redirected(self, error: Exception) -> None:
        """Learn from an error of REDIRECTIONS."""
        self._doubtful = True
        if isinstance(error, MovedError) and error.host:
            self._owners[error.slot_id] = (error.host, error.port)

    def _look(self) -> None:
        until = time.monotonic() + LOOK_SECONDS
        for address in list(self.nodes):
            try:
                self._learn(address, self._ask(address))
                return
            except redis.RedisError as e:
                self.trouble = str(e)
                self.nodes.append(self.nodes.pop(0))
            if time.monotonic() > until:
                return

    def _learn(self, asked: Address, ranges: list[Any]) -> None:
        owners: list[Address | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_ in ranges:
            # A node that does not know its own name leaves it out: it is the one that was asked.
            owners[first : last + 1] = [(host.decode() if host else asked[0], port)] * (last - first + 1)
        found = dict.fromkeys([*(owner for owner in owners if owner is not None), self._seed])
        # Whoever was asked is asked last the next time: it may be cut off from the others and not know it.
        order = dict.fromkeys([*(node for node in (*self.nodes, *found) if node != asked), asked])
        self.nodes = [node for node in order if node in found]
        self._owners, self._doubtful, self.trouble = owners, False, "no node has it"


class Home:
    """One slot, wherever it is: where a `Following` connection goes."""

    def __init__(self, cluster: Cluster, key: str) -> None:
        self._cluster = cluster
        self._slot = slot_of(key)

    def address(self) -> Address:
        """Blocks while the nodes are asked. Raises redis.ConnectionError."""
        self._cluster.doubt()  # whoever connects anew may do so because the slot has moved
        owner = self._cluster.owner(self._slot)
        if owner is None:
            raise redis.ConnectionError(f"slot {self._slot} of the cluster: {self._cluster.trouble}")
        return owner

    def lost(self, error: Exception) -> redis.ConnectionError:
        """A redirection, as what it means to the client."""
        self._cluster.redirected(error)
        return redis.ConnectionError(f"slot {self._slot} of the cluster is elsewhere: {type(error).__name__} {error}")


class Following(redis.Connection):
    """Connects to the node that has `home`."""

    def __init__(self, *, home: Home, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._home = home

    def _connect(self) -> Any:
        self.host, self.port = self._home.address()
        return super()._connect()  # type: ignore[no-untyped-call]

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except REDIRECTIONS as e:
            self.disconnect()  # type: ignore[no-untyped-call]
            raise self._home.lost(e) from e


class FollowingTLS(Following, redis.SSLConnection):
    """`Following` over TLS."""


class AsyncFollowing(aredis.Connection):
    """`Following` for asyncio."""

    def __init__(self, *, home: Home, **options: Any) -> None:
        super().__init__(**options)
        self._home = home

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._home.address)
        await super()._connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except REDIRECTIONS as e:
            await self.disconnect(nowait=True)
            raise self._home.lost(e) from e


class AsyncFollowingTLS(AsyncFollowing, aredis.SSLConnection):
    """`AsyncFollowing` over TLS."""


class Nodes:
    """A client for each node. open_node: makes one."""

    def __init__(self, cluster: Cluster, open_node: Callable[[Address], redis.Redis]) -> None:
        self._cluster = cluster
        self._open_node = open_node
        self._clients: dict[Address, redis.Redis] = {}
        self._away: dict[redis.Redis, float] = {}  # until when
        self._lock = threading.Lock()

    def of(self, key: str) -> redis.Redis | None:
        """For the node that has `key`. None: no node has it, or the one that has was away a moment ago."""
        owner = self._cluster.owner(slot_of(key))
        if owner is None:
            return None
        client = self._clients.get(owner) or self._add(owner)
        return None if self._away.get(client, 0.0) > time.monotonic() else client

    def _add(self, owner: Address) -> redis.Redis:
        with self._lock:
            for address in [a for a in self._clients if a not in self._cluster.nodes]:
                gone = self._clients.pop(address)
                self._away.pop(gone, None)
                gone.close()
            return self._clients.setdefault(owner, self._open_node(owner))

    def redirected(self, error: Exception) -> None:
        self._cluster.redirected(error)

    def lost(self, client: redis.Redis) -> None:
        """This node does not answer."""
        self._away[client] = time.monotonic() + PAUSE_SECONDS
        self._cluster.doubt()

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
