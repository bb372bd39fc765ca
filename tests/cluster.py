"""A Redis Cluster of real Valkey servers, made by the test: slots in equal parts, no replicas unless asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import redis
from redis.crc import key_slot

from tests.servers import Server, free_port

SLOTS = 16384
OPTIONS = (
    *("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-node-timeout", "500"),
    *("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0"),
    *("--cluster-allow-replica-migration", "no"),
)


class Cluster:
    """`url` names one node; the others are found through it. What is sent to a node goes over `at`."""

    def __init__(self, count: int = 3) -> None:
        self.nodes: list[Server] = []
        self._at: dict[Server, redis.Redis] = {}
        try:
            self._make(count)
        except BaseException:
            self.close()
            raise

    def _make(self, count: int) -> None:
        for _ in range(count):
            self._start()
        edges = [SLOTS * i // count for i in range(count + 1)]
        for node, (first, end) in zip(self.nodes, pairwise(edges), strict=True):
            self.at(node).execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        self._wait(lambda: all(self._knows(n, count) for n in self.nodes))

    def _start(self) -> Server:
        bus = free_port()
        node = Server("valkey9", "--cluster-port", str(bus), *OPTIONS)
        self._at[node] = node.client()
        if self.nodes:
            self.at(node).execute_command("CLUSTER MEET", "127.0.0.1", self.nodes[0].port, self._bus)
        else:
            self._bus = bus
        self.nodes.append(node)
        return node

    def _knows(self, node: Server, count: int) -> bool:
        info = self.at(node).execute_command("CLUSTER INFO")
        return (info["cluster_state"], info["cluster_size"]) == ("ok", str(count))

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.nodes[-1].port}/0"

    def at(self, node: Server) -> redis.Redis:
        return self._at[node]

    def id_of(self, node: Server) -> str:
        return str(self.at(node).execute_command("CLUSTER MYID").decode())

    def owner(self, key: str, view: Server | None = None) -> Server:
        """The node that has `key`, as another sees it."""
        asked, slot = view or next(n for n in self.nodes if n.alive), key_slot(key.encode())
        ranges = self.at(asked).execute_command("CLUSTER SLOTS")
        port = next(port for first, last, (_, port, *_), *_ in ranges if first <= slot <= last)
        return next(n for n in self.nodes if n.port == port)

    def keys(self, prefix: str) -> dict[Server, set[str]]:
        """The keys of each node that begin so."""
        return {n: {k.decode() for k in self.at(n).scan_iter(f"{prefix}*", count=1000)} for n in self.masters}

    def move(self, first: int, last: int, source: Server, target: Server) -> None:
        """Give a range of slots, with the keys in it, to another node."""
        self.at(source).execute_command("CLUSTER MIGRATESLOTS", "SLOTSRANGE", first, last, "NODE", self.id_of(target))
        self._wait(lambda: all(self.port_of(n, first) == target.port for n in self.nodes))

    def port_of(self, view: Server, slot: int) -> int:
        ranges = self.at(view).execute_command("CLUSTER SLOTS")
        return next((port for first, last, (_, port, *_), *_ in ranges if first <= slot <= last), 0)

    def range_of(self, node: Server) -> tuple[int, int]:
        """The first range of slots that the node has."""
        ranges = self.at(node).execute_command("CLUSTER SLOTS")
        return min((first, last) for first, last, (_, port, *_), *_ in ranges if port == node.port)

    def replica_of(self, node: Server) -> Server:
        """A new node that follows `node`, once it has all of its data."""
        replica, id_ = self._start(), self.id_of(node)
        self._wait(lambda: id_ in str(self.at(replica).execute_command("CLUSTER NODES")))
        self.at(replica).execute_command("CLUSTER REPLICATE", id_)
        self._wait(lambda: self.at(replica).info("replication").get("master_link_status") == "up")
        return replica

    @property
    def masters(self) -> list[Server]:
        """The nodes that serve now."""
        return [n for n in self.nodes if n.alive and self.at(n).info("replication")["role"] == "master"]

    def clear(self) -> None:
        """Start what was killed, and empty all nodes."""
        for node in self.nodes:
            if not node.alive:
                node.start()
        self._wait(lambda: all(self._knows(n, 3) for n in self.nodes))
        for node in self.masters:
            self.at(node).flushall()

    def close(self) -> None:
        for node, client in self._at.items():
            client.close()
            node.close()

    @staticmethod
    def _wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the cluster does not come to rest")
            time.sleep(0.02)
