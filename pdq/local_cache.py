"""Hot KV blocks in a worker's own memory, in front of Redis: a system prompt that all share costs no transfer.

Holds checked payloads under their hashes, the least recently used leaves first. Knows nothing of Redis; `store` keeps
Redis and this in step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from pdq.bulk import Value


class LocalCache:
    """At most `capacity` bytes of payloads; 0 keeps none. Threads may share it; payloads must never change."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[bytes, Value] = OrderedDict()
        self._lock = threading.Lock()
        self.size = 0  # bytes

    def get(self, block_hash: bytes) -> Value | None:
        with self._lock:
            if block_hash not in self._held:
                return None
            self._held.move_to_end(block_hash)
            return self._held[block_hash]

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.size = 0

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    def add(self, blocks: Iterable[tuple[bytes, Value]]) -> None:
        """Keep these, the last one longest: callers pass tails before heads."""
        with self._lock:
            for block_hash, payload in blocks:
                if len(payload) > self._capacity:
                    continue
                self.size += len(payload) - len(self._held.pop(block_hash, b""))
                self._held[block_hash] = payload
            while self.size > self._capacity:
                _, dropped = self._held.popitem(last=False)
                self.size -= len(dropped)
