"""KV blocks in Redis: find the longest stored prefix, put, get, touch. Bytes in, bytes out; no torch.

Methods block and are meant for a small thread pool (the sync client moves large values about twice as fast as the
asyncio one). A block is one value under its hash (blocks.py). The index, a sorted set of hashes by last use, answers
"how long a prefix is there" in one round trip; it is written after the bytes and is only a hint: what `get` finds
missing leaves it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pdq import keys
from pdq.blocks import BlockCodec, KVMiss
from pdq.connection import SyncRedis

CLOCK_SECONDS = 60.0
BATCH_BYTES = 8 << 20  # of one MGET or one pipeline of SETs: more would hold up the server's other clients


class BlockStore:
    """The blocks of one model. ttl: seconds an unused block stays. counters: hits, misses by reason, bytes."""

    def __init__(self, redis: SyncRedis, codec: BlockCodec, *, block_size: int, ttl: float) -> None:
        self._redis = redis
        self._codec = codec
        self._keys = keys.BlockKeys(codec.fingerprint)
        self._block_size = block_size
        self._ttl_ms = int(ttl * 1000)
        self._per_batch = max(BATCH_BYTES // (block_size * codec.token_bytes), 1)
        self._lock = threading.Lock()
        self._clock = (0, 0.0)  # Redis' milliseconds ahead of ours, and until when that is taken to hold
        self.counters: Counter[str] = Counter()

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks the index knows. One round trip. Raises RedisError."""
        if not hashes:
            return 0
        scores: Any = self._redis.zmscore(self._keys.index, hashes)  # type: ignore[arg-type]
        return next((i for i, score in enumerate(scores) if score is None), len(scores))

    def get(self, hashes: Sequence[bytes]) -> list[memoryview]:
        """Checked payloads of the leading blocks, up to the first that is missing or wrong. Raises RedisError.

        What is read is touched: its TTL starts again. Hash i names tokens [i*block_size, (i+1)*block_size).
        """
        payloads: list[memoryview] = []
        for at in range(0, len(hashes), self._per_batch):
            batch = hashes[at : at + self._per_batch]
            values: Any = self._redis.mget([self._keys.block(h) for h in batch])
            good = self._open(batch, values, at)
            payloads += good
            if len(good) < len(batch):
                self._redis.zrem(self._keys.index, batch[len(good)])
                break
        self._touch(hashes[: len(payloads)])
        return payloads

    def _open(self, hashes: Sequence[bytes], values: Sequence[bytes | None], first: int) -> list[memoryview]:
        payloads: list[memoryview] = []
        for i, (block_hash, value) in enumerate(zip(hashes, values, strict=True), first):
            try:
                payload = self._codec.open(value, block_hash, i * self._block_size, (i + 1) * self._block_size)
            except KVMiss as miss:
                self.count(**{f"miss_{miss.reason}": 1})
                break
            payloads.append(payload)
        self.count(hit_blocks=len(payloads), bytes_in=sum(map(len, payloads)))
        return payloads

    def put(self, blocks: Sequence[tuple[bytes, memoryview]]) -> None:
        """Store sealed values (header and payload) under their hashes, then index them. Raises RedisError."""
        for at in range(0, len(blocks), self._per_batch):
            batch = blocks[at : at + self._per_batch]
            pipe = self._redis.pipeline(transaction=False)
            for block_hash, value in batch:
                pipe.set(self._keys.block(block_hash), value, px=self._ttl_ms)
            pipe.execute()
            self.count(bytes_out=sum(len(value) for _, value in batch))
            self._index([block_hash for block_hash, _ in batch])

    def _now_ms(self) -> int:
        """By the clock of Redis, which is asked once a minute: workers of one pool need not agree on the time."""
        ahead, until = self._clock
        if time.monotonic() >= until:
            seconds, microseconds = self._redis.time()
            local = time.monotonic()
            ahead = seconds * 1000 + microseconds // 1000 - int(local * 1000)
            self._clock = (ahead, local + CLOCK_SECONDS)
        return int(time.monotonic() * 1000) + ahead

    def _index(self, hashes: Sequence[bytes]) -> None:
        now = self._now_ms()
        pipe = self._redis.pipeline(transaction=False)
        pipe.zadd(self._keys.index, dict.fromkeys(hashes, now))
        # A block unused for a TTL has expired: its line goes, so that the index cannot outgrow the blocks.
        pipe.zremrangebyscore(self._keys.index, "-inf", now - self._ttl_ms - 1)
        pipe.pexpire(self._keys.index, 2 * self._ttl_ms)
        pipe.execute()

    def _touch(self, hashes: Sequence[bytes]) -> None:
        if not hashes:
            return
        pipe = self._redis.pipeline(transaction=False)
        for block_hash in hashes:
            pipe.pexpire(self._keys.block(block_hash), self._ttl_ms)
        pipe.zadd(self._keys.index, dict.fromkeys(hashes, self._now_ms()))
        pipe.execute(raise_on_error=False)  # a Redis that is full or read-only has still given the blocks

    def put_tail(self, key: str, value: memoryview, ttl: float) -> None:
        """Store the sealed partial block of a handoff for `ttl` seconds. Raises RedisError."""
        self._redis.set(key, value, px=max(int(ttl * 1000), 1))
        self.count(bytes_out=len(value))

    def get_tail(self, key: str, tail_hash: bytes, start: int, stop: int) -> memoryview:
        """The checked payload of tokens [start, stop). Reading does not delete. Raises KVMiss, RedisError."""
        value: Any = self._redis.get(key)
        payload = self._codec.open(value, tail_hash, start, stop)
        self.count(bytes_in=len(payload))
        return payload

    def drop_tail(self, key: str) -> None:
        self._redis.unlink(key)

    def count(self, **amounts: int) -> None:
        with self._lock:
            self.counters.update(amounts)
