"""KV blocks in Redis: find the longest stored prefix, put, get, touch, evict. Bytes in, bytes out; no torch.

Methods block and are meant for a small thread pool. A block is one value under its hash (blocks.py). The index, a
sorted set of hashes, answers "how long a prefix is there" in one round trip; it is written after the bytes and is only
a hint: what `get` finds missing leaves it.

A block's score in the index is the time of its last use, or a time to come while a request needs it: until then it is
*pinned*. Eviction takes the lowest scores up to now. Pins are times, so they cannot leak. Within a chain the scores
fall from head to tail, since a tail is worth nothing without its head.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from pdq import keys, scripts
from pdq.blocks import HEADER_BYTES, BlockCodec, KVMiss
from pdq.bulk import Command, Value, Values
from pdq.cluster import Nodes
from pdq.connection import SyncRedis
from pdq.local_cache import LocalCache

CLOCK_SECONDS = 60.0
STEP = 1 / 1024  # between the scores, in ms, of neighbours in a chain; a double holds that exactly for centuries
MOST_EVICTED = 4096  # by one put
PIN_SLACK_MS = 100  # by which two workers may have computed the end of one pin apart


class BlockStore:
    """The blocks of one model.

    ttl: seconds an unused block stays. budget: bytes of all blocks in Redis; None leaves that to Redis' own limits.
    local: bytes of blocks kept in this process, too. counters: tokens found by tier, misses by reason, bytes and
    microseconds in and out, blocks evicted and dropped.
    """

    def __init__(
        self,
        redis: SyncRedis | Nodes,
        codec: BlockCodec,
        *,
        block_size: int,
        ttl: float,
        budget: int | None = None,
        local: int = 0,
    ) -> None:
        value_bytes = HEADER_BYTES + codec.payload_bytes(block_size)
        self._values = Values(redis, value_bytes)
        self._codec = codec
        self._keys = keys.BlockKeys(codec.fingerprint)
        self._block_size = block_size
        self._ttl_ms = int(ttl * 1000)
        self._most_blocks = None if budget is None else budget // value_bytes
        self._local = LocalCache(local)
        self._epoch: bytes | None = None  # in which the local cache was filled
        self._lock = threading.Lock()
        self._clock = (0, 0.0)  # Redis' milliseconds ahead of ours, and until when that is taken to hold
        self.counters: Counter[str] = Counter()

    def pin(self, seconds: float) -> int:
        """The time, in Redis' milliseconds, to which blocks are pinned that are needed for `seconds`."""
        return self._now_ms() + int(seconds * 1000)

    def longest_prefix(self, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are known here or in the index. One round trip. Raises RedisError."""
        if not hashes:
            return 0
        epoch, scores = self._values.run(("GET", self._keys.epoch), ("ZMSCORE", self._keys.index, *hashes))
        if epoch != self._epoch:  # somebody has cleared the blocks
            self._epoch = epoch
            self._local.clear()
        scores = scores or [None] * len(hashes)  # of a cluster the node may be away
        known = (score is not None or h in self._local for h, score in zip(hashes, scores, strict=True))
        return next((i for i, found in enumerate(known) if not found), len(hashes))

    def holds(self, block_hash: bytes) -> bool:
        """Is the block in this process' own memory? No round trip."""
        return block_hash in self._local

    def get(self, hashes: Sequence[bytes], *, first: int = 0, indexed: bool = True) -> Iterator[memoryview]:
        """Checked payloads of neighbouring blocks as they come in, up to the first that is missing or wrong.

        Hash i names tokens [(first+i)*block_size, (first+i+1)*block_size). indexed: False for blocks of one request
        alone. Raises RedisError.
        """
        held = [self._local.get(h) for h in hashes]
        far = self._values.get([self._keys.block(h) for h, value in zip(hashes, held, strict=True) if value is None])
        fetched: list[tuple[bytes, Value]] = []
        try:
            for i, (block_hash, value) in enumerate(zip(hashes, held, strict=True), first):
                if value is not None:
                    self.count(hit_tokens_local=self._block_size)
                    yield memoryview(value)[HEADER_BYTES:]
                    continue
                began = time.perf_counter()
                value = next(far)
                try:
                    payload = self._open(value, block_hash, i)
                except KVMiss:
                    if indexed:
                        far.close()
                        self._values.run(("ZREM", self._keys.index, block_hash))
                    return
                self.count(
                    hit_tokens_redis=self._block_size, bytes_in=len(payload),
                    us_in=int((time.perf_counter() - began) * 1e6),
                )  # fmt: skip
                if value is not None and indexed:
                    fetched.append((block_hash, value))
                yield payload
        finally:
            far.close()
            self._local.add(reversed(fetched))

    def _open(self, value: Value | None, block_hash: bytes, i: int) -> memoryview:
        try:
            return self._codec.open(value, block_hash, i * self._block_size, (i + 1) * self._block_size)
        except KVMiss as miss:
            self.count(**{f"miss_{miss.reason}": 1})
            raise

    def put(self, blocks: Sequence[tuple[bytes, memoryview]], first: int = 0, pin: int = 0) -> int:
        """Store sealed values (header and payload) under their hashes, then index them; how many there was room for.

        blocks: neighbours in a chain, from its block `first` on. pin: see `pin`; 0: used now, needed by nobody.
        Raises RedisError.
        """
        self._local.add(reversed(blocks))
        stored = self._store(blocks, self._ttl(pin))
        if stored:
            self._index([block_hash for block_hash, _ in blocks[:stored]], first, pin)
        return stored

    def put_private(self, blocks: Sequence[tuple[bytes, memoryview]], ttl: float) -> int:
        """Like `put` for blocks that nobody but one request will look for; they are dropped by `drop`."""
        return self._store(blocks, max(int(ttl * 1000), 1))

    def drop(self, hashes: Sequence[bytes]) -> None:
        if hashes:
            self._unlink(hashes)

    def _store(self, blocks: Sequence[tuple[bytes, memoryview]], ttl_ms: int) -> int:
        began = time.perf_counter()
        stored = self._values.put([(self._keys.block(h), value) for h, value in blocks], ttl_ms)
        self.count(
            bytes_out=sum(len(value) for _, value in blocks[:stored]),
            us_out=int((time.perf_counter() - began) * 1e6),
            dropped_blocks=len(blocks) - stored,
        )
        return stored

    def _ttl(self, pin: int) -> int:
        """A pinned block lives at least as long as its pin."""
        return max(self._ttl_ms, pin - self._now_ms()) if pin else self._ttl_ms

    def _now_ms(self) -> int:
        """By the clock of Redis, which is asked once a minute: workers of one pool need not agree on the time."""
        ahead, until = self._clock
        if time.monotonic() >= until:
            answer = self._values.eval("return redis.call('TIME')", 1, self._keys.index)
            local = time.monotonic()
            seconds, microseconds = map(int, answer or (time.time(), 0))  # of a cluster that node may be away
            ahead = seconds * 1000 + microseconds // 1000 - int(local * 1000)
            self._clock = (ahead, local + CLOCK_SECONDS)
        return int(time.monotonic() * 1000) + ahead

    def _index(self, hashes: Sequence[bytes], first: int, pin: int) -> None:
        now = self._now_ms()
        score = max(pin, now)
        index = self._keys.index
        # A block unused for a TTL has expired: its line goes, so that the index cannot outgrow the blocks.
        *_, indexed = self._values.run(
            self._scored(hashes, score, first),
            ("ZREMRANGEBYSCORE", index, "-inf", now - self._ttl_ms - 1),
            ("PEXPIRE", index, max(2 * self._ttl_ms, score - now + self._ttl_ms)),
            ("ZCARD", index),
        )
        if self._most_blocks is not None and (indexed or 0) > self._most_blocks:
            self._evict(now, self._most_blocks)

    def _scored(self, hashes: Sequence[bytes], score: int, first: int = 0) -> Command:
        scores = (word for i, h in enumerate(hashes, first) for word in (score - i * STEP, h))
        return ("ZADD", self._keys.index, "GT", *scores)

    def _evict(self, now: int, most: int) -> None:
        call = scripts.evict([self._keys.index], now, most, MOST_EVICTED)
        victims: list[bytes] = call.run_sync(self._values) or []
        self.count(evicted_blocks=len(victims))
        self._unlink(victims)

    def _unlink(self, hashes: Sequence[bytes]) -> None:
        self._values.run(*(("UNLINK", self._keys.block(h)) for h in hashes))

    def touch(self, hashes: Sequence[bytes], pin: int = 0) -> None:
        """The leading blocks of a chain are in use: start their TTL anew, and pin them.

        What is here and no longer in Redis is put there again: other workers will look for it. Raises RedisError.
        """
        if not hashes:
            return
        now, ttl = self._now_ms(), self._ttl(pin)
        renewals = (("PEXPIRE", self._keys.block(h), ttl) for h in hashes)
        # A Redis that is full or read-only has still given the blocks.
        there = self._values.run(*renewals, self._scored(hashes, max(pin, now)), errors=True)
        for i, (block_hash, found) in enumerate(zip(hashes, there, strict=False)):
            value = self._local.get(block_hash)
            if found == 0 and value is not None:
                self.count(restored_blocks=1)
                self.put([(block_hash, memoryview(value))], i, pin)

    def unpin(self, hashes: Sequence[bytes], pin: int) -> None:
        """The request that pinned these leading blocks of a chain until `pin` has ended. Raises RedisError."""
        if hashes:
            now = self._now_ms()
            scripts.unpin([self._keys.index], pin + PIN_SLACK_MS, now, STEP, *hashes).run_sync(self._values)

    def put_tail(self, key: str, value: memoryview, ttl: float) -> bool:
        """Store the sealed partial block of a handoff for `ttl` seconds; was there room? Raises RedisError."""
        stored = self._values.put([(key, value)], max(int(ttl * 1000), 1)) == 1
        self.count(bytes_out=len(value) * stored, dropped_tails=1 - stored)
        return stored

    def fetch_tail(self, key: str) -> Value | None:
        """Reading does not delete. Raises RedisError."""
        (value,) = self._values.get([key])
        return value

    def open_tail(self, value: Value | None, tail_hash: bytes, start: int, stop: int) -> memoryview:
        """The checked payload of tokens [start, stop) in the value of a tail. Raises KVMiss."""
        try:
            payload = self._codec.open(value, tail_hash, start, stop)
        except KVMiss as miss:
            self.count(**{f"miss_{miss.reason}": 1})
            raise
        self.count(bytes_in=len(payload))
        return payload

    def drop_tail(self, key: str) -> None:
        self._values.run(("UNLINK", key))

    def count(self, **amounts: int) -> None:
        with self._lock:
            self.counters.update({name: n for name, n in amounts.items() if n})
