"""Moves KV between an engine's slots and the block store: what prefill and decode do with a prompt's blocks.

One object a worker. Redis calls run in a small thread pool of their own (sync clients), so that neither the event loop
nor the engine's thread waits for bytes. Between the store (bytes, hashes) and the engine (slots); no torch here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdq import connection, prefix
from pdq.blocks import HEADER_BYTES, BlockCodec, KVMiss
from pdq.config import WorkerSettings
from pdq.engine.base import Engine, Slot
from pdq.store import BlockStore

T = TypeVar("T")
BULK_THREADS = 4


class Prefix:
    """The hash chain of one token sequence."""

    def __init__(self, start: bytes, token_ids: Sequence[int], block_size: int) -> None:
        self._start = start
        self._tokens = token_ids
        self.hashes = prefix.chain(start, token_ids, block_size)
        self.full = len(self.hashes) * block_size  # tokens in full blocks
        self.length = len(token_ids)

    @property
    def tail_hash(self) -> bytes:
        return prefix.tail_hash(self.hashes[-1] if self.hashes else self._start, self._tokens[self.full :])


class KVTransfer:
    """Slots in and out of Redis. The methods raise RedisError, and KVMiss where they say so."""

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        spec = engine.spec
        self._engine = engine
        self._codec = BlockCodec(spec.fingerprint, spec.dtype, spec.layout, spec.token_bytes)
        self._size = settings.block_size
        self._threads = ThreadPoolExecutor(BULK_THREADS, thread_name_prefix="pdq-bulk")
        self._redis = connection.bulk(settings.blocks_url, BULK_THREADS)
        self.store = BlockStore(self._redis, self._codec, block_size=self._size, ttl=settings.kv_ttl)

    def close(self) -> None:
        """Close the connections. A call that runs meanwhile may fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._redis.close()

    def prefix(self, token_ids: Sequence[int], tenant: str) -> Prefix:
        return Prefix(prefix.root(self._codec.fingerprint, self._size, tenant), token_ids, self._size)

    async def load_prefix(self, slot: Slot, chain: Prefix, most: int) -> int:
        """Fill an empty slot with the longest stored prefix of at most `most` tokens; the tokens that were there."""
        hashes = chain.hashes[: most // self._size]

        def fetch() -> int:
            found = self.store.longest_prefix(hashes)
            return self._load(slot, self.store.get(hashes[:found]))

        return await self._run(fetch)

    async def load(self, slot: Slot, chain: Prefix, tail_key: str) -> None:
        """Fill an empty slot with the whole of `chain`, blocks and tail. Raises KVMiss if a part is not to be had."""

        def fetch() -> None:
            payloads = self.store.get(chain.hashes)
            if len(payloads) < len(chain.hashes):
                raise KVMiss("block")
            self._load(slot, payloads)
            if chain.length > chain.full:
                tail = self.store.get_tail(tail_key, chain.tail_hash, chain.full, chain.length)
                self._engine.load(slot, chain.full, [(chain.length - chain.full, tail)])

        await self._run(fetch)

    def _load(self, slot: Slot, payloads: Sequence[memoryview]) -> int:
        if payloads:
            self._engine.load(slot, 0, [(self._size, p) for p in payloads])
        return len(payloads) * self._size

    def export(self, slot: Slot, chain: Prefix, start: int, stop: int) -> list[tuple[bytes, memoryview]]:
        """The full blocks of tokens [start, stop) as (hash, unsealed value). On the engine's thread."""
        first, last = start // self._size, stop // self._size
        values = self._engine.export(slot, first * self._size, last * self._size, self._size, HEADER_BYTES)
        return list(zip(chain.hashes[first:last], values, strict=True))

    async def publish(self, blocks: list[tuple[bytes, memoryview]], first: int) -> None:
        """Seal and store exported blocks; `first` is the position of the first one's first token."""

        def send() -> None:
            for i, (block_hash, value) in enumerate(blocks):
                start = first + i * self._size
                self._codec.seal(value, block_hash, start, start + self._size)
            self.store.put(blocks)

        await self._run(send)

    def export_tail(self, slot: Slot, chain: Prefix) -> memoryview | None:
        """The partial last block, unsealed; None if there is none. On the engine's thread."""
        if chain.length == chain.full:
            return None
        (value,) = self._engine.export(slot, chain.full, chain.length, self._size, HEADER_BYTES)
        return value

    async def publish_tail(self, key: str, value: memoryview, chain: Prefix, ttl: float) -> None:
        def send() -> None:
            self._codec.seal(value, chain.tail_hash, chain.full, chain.length)
            self.store.put_tail(key, value, ttl)

        await self._run(send)

    async def drop_tail(self, key: str) -> None:
        """Delete a tail that nobody will want again; its TTL covers a failure to."""
        if key:
            await self._run(lambda: self.store.drop_tail(key))

    async def _run(self, work: Callable[[], T]) -> T:
        return await in_thread(self._threads, work)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Do work on a slot in a thread. A cancel is raised after its end: whoever gives up closes the slot."""
    done = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise
