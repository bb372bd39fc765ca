"""Moves KV between an engine's slots and the block store: what prefill and decode do with a prompt's blocks.

One object a worker. Redis calls with blocks run in a small thread pool of their own (sync clients), so that neither the
event loop nor the engine's thread waits for bytes; a small tail travels in the handoff itself.
Between the store (bytes, hashes) and the engine (slots); no torch here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdq import bulk, connection, prefix
from pdq.blocks import HEADER_BYTES, BlockCodec, KVMiss
from pdq.bulk import Value
from pdq.config import WorkerSettings
from pdq.engine.base import Engine, Slot
from pdq.kv_form import form
from pdq.messages import Handoff, Request
from pdq.store import BlockStore
from pdq.tasks import finished

T = TypeVar("T")
Blocks = list[tuple[bytes, memoryview]]  # neighbours in a chain: hash, and value without its header
BULK_THREADS = 4
SMALL = 1 << 16  # bytes of a tail that costs less in the handoff than the way to the store and back
GRACE_SECONDS = 60.0  # that what belongs to one request alone outlives its deadline


class Prefix:
    """The hash chain of one token sequence, and what is known of its blocks.

    shared: False if the blocks are for one request alone. stored: leading blocks that are in the store, as far as this
    worker knows. pin: until when they are pinned, by Redis' clock in ms.
    """

    def __init__(self, start: bytes, token_ids: Sequence[int], block_size: int, *, shared: bool = True) -> None:
        self._start = start
        self._tokens = token_ids
        self.hashes = prefix.chain(start, token_ids, block_size)
        self.full = len(self.hashes) * block_size  # tokens in full blocks
        self.length = len(token_ids)
        self.shared = shared
        self.stored = 0
        self.pin = 0

    @property
    def tail_hash(self) -> bytes:
        return prefix.tail_hash(self.hashes[-1] if self.hashes else self._start, self._tokens[self.full :])


class KVTransfer:
    """Slots in and out of Redis. The methods raise RedisError."""

    def __init__(self, settings: WorkerSettings, engine: Engine) -> None:
        spec = engine.spec
        self._engine = engine
        self._form = form(settings.kv_codec, spec.dtype, spec.layout, spec.token_bytes)
        self._codec = BlockCodec(
            spec.fingerprint, self._form.dtype, spec.layout, self._form.token_bytes, self._form.fixed_bytes
        )
        self.block_size = settings.block_size
        self._threads = ThreadPoolExecutor(BULK_THREADS, thread_name_prefix="pdq-bulk")
        largest = HEADER_BYTES + self._codec.payload_bytes(self.block_size)
        self._redis = bulk.connect(settings.blocks_url, BULK_THREADS, largest)
        # A cluster's tails are on all its nodes.
        self._short = None if connection.is_cluster(settings.blocks_url) else connection.command(settings.blocks_url)
        self.store = BlockStore(
            self._redis, self._codec, block_size=self.block_size, ttl=settings.kv_ttl,
            budget=settings.kv_budget_bytes, local=settings.local_cache_size,
        )  # fmt: skip

    async def aclose(self) -> None:
        """Close the connections. A call that runs meanwhile may fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._redis.close()
        if self._short is not None:
            await self._short.aclose()

    def prefix(self, token_ids: Sequence[int], request: Request) -> Prefix:
        """The chain of `token_ids` within the request's tenant, or, with its cache off, within the request."""
        shared = request.cache != "off"
        salt = request.tenant if shared else prefix.salt(request.tenant, f"request {request.id}")
        return Prefix(
            prefix.root(self._codec.fingerprint, self.block_size, salt), token_ids, self.block_size, shared=shared
        )

    async def load_prefix(self, slot: Slot, chain: Prefix, most: int, seconds: float) -> int:
        """Fill a slot with the longest stored prefix of at most `most` tokens; the tokens that are there then.

        The slot is empty, or holds the `chain.stored` blocks that an earlier call has found. All are pinned for
        `seconds`.
        """
        hashes = chain.hashes[: most // self.block_size]
        if not (chain.shared and chain.hashes):
            return 0

        def fetch() -> int:
            chain.pin = self.store.pin(seconds)
            first, more = chain.stored, hashes[chain.stored :]
            payloads = self.store.get(more[: self.store.longest_prefix(more)], first=first)
            chain.stored = first + self._fill(slot, payloads, first)
            self.store.touch(hashes[: chain.stored], chain.pin)
            return chain.stored * self.block_size

        return await self._run(fetch)

    async def load(self, slot: Slot, chain: Prefix, handoff: Handoff, seconds: float) -> int:
        """Fill an empty slot with as much of `chain` as is to be had, blocks and tail; the tokens that were.

        The blocks are pinned for `seconds`.
        """

        if not chain.length:
            return 0
        if not chain.hashes and handoff.tail:
            return self._take_tail(slot, chain, handoff.tail)

        def fetch() -> int:
            chain.stored = self._fill(slot, self.store.get(chain.hashes, indexed=chain.shared))
            if chain.shared and chain.hashes:
                chain.pin = self.store.pin(seconds)
                self.store.touch(chain.hashes[: chain.stored], chain.pin)
            if chain.stored == len(chain.hashes) and chain.length > chain.full:
                return self._take_tail(slot, chain, handoff.tail or self.store.fetch_tail(handoff.tail_key))
            return chain.stored * self.block_size

        return await self._run(fetch)

    def _fill(self, slot: Slot, payloads: Iterable[memoryview], first: int = 0) -> int:
        """Load blocks into a slot that holds `first`, as they come; how many."""
        count = 0
        for payload in payloads:
            start = (first + count) * self.block_size
            self._engine.load(slot, start, [(self.block_size, self._form.unpack(payload))])
            count += 1
        return count

    def _take_tail(self, slot: Slot, chain: Prefix, value: Value | None) -> int:
        try:
            tail = self.store.open_tail(value, chain.tail_hash, chain.full, chain.length)
        except KVMiss:
            return chain.full
        self._engine.load(slot, chain.full, [(chain.length - chain.full, self._form.unpack(tail))])
        return chain.length

    def is_small(self, chain: Prefix) -> bool:
        """Does the tail, if there is one, travel in the handoff?"""
        return (chain.length - chain.full) * self._form.token_bytes <= SMALL

    def export(self, slot: Slot, chain: Prefix, start: int, stop: int) -> Blocks:
        """The full blocks of tokens [start, stop). Not while the slot is in a forward."""
        first, last = start // self.block_size, stop // self.block_size
        values = self._engine.export(
            slot, first * self.block_size, last * self.block_size, self.block_size, HEADER_BYTES
        )
        return list(zip(chain.hashes[first:last], values, strict=True))

    async def export_beside(self, slot: Slot, chain: Prefix, start: int) -> Blocks:
        """`export` of all full blocks from token `start` on, in a thread."""
        return await self._run(lambda: self.export(slot, chain, start, chain.full))

    async def publish(self, blocks: Blocks, start: int, chain: Prefix, seconds: float) -> None:
        """Store exported blocks, the first of which holds token `start`, for whoever has the same prefix.

        Without room in Redis they are dropped, and so is what would follow them: `chain.stored` tells. seconds: that
        blocks of one request alone are needed.
        """
        first = start // self.block_size
        if chain.stored < first or not blocks:
            return

        def send() -> int:
            sealed = [(h, self._sealed(v, h, first + i)) for i, (h, v) in enumerate(blocks)]
            if not chain.shared:
                return self.store.put_private(sealed, seconds + GRACE_SECONDS)
            return self.store.put(sealed, first, chain.pin)

        chain.stored = first + await self._run(send)

    def _sealed(self, value: memoryview, block_hash: bytes, i: int) -> memoryview:
        packed = self._form.pack(value, HEADER_BYTES)
        self._codec.seal(packed, block_hash, i * self.block_size, (i + 1) * self.block_size)
        return packed

    async def end(self, chain: Prefix) -> None:
        """The request has ended: its blocks are like any others now, or gone if they were its own."""
        if chain.stored and chain.shared:
            await self._run(lambda: self.store.unpin(chain.hashes[: chain.stored], chain.pin))
        elif chain.stored:
            await self._run(lambda: self.store.drop(chain.hashes[: chain.stored]))

    async def publish_tail(self, key: str, slot: Slot, chain: Prefix, seconds: float) -> bool:
        """Store the partial last block of a request that has `seconds` left; was there room?

        Not while the slot is in a forward, nor if there is no such block.
        """
        return await self._run(lambda: self.store.put_tail(key, self.tail(slot, chain), seconds + GRACE_SECONDS))

    def tail(self, slot: Slot, chain: Prefix) -> memoryview:
        """The partial last block as it travels. Not while the slot is in a forward, nor if there is none."""
        (value,) = self._engine.export(slot, chain.full, chain.length, self.block_size, HEADER_BYTES)
        packed = self._form.pack(value, HEADER_BYTES)
        self._codec.seal(packed, chain.tail_hash, chain.full, chain.length)
        return packed

    async def drop_tail(self, key: str) -> None:
        """Delete a tail that nobody will want again; its TTL covers a failure to."""
        if not key:
            return
        if self._short is not None:
            await self._short.unlink(key)
        else:
            await self._run(lambda: self.store.drop_tail(key))

    async def _run(self, work: Callable[[], T]) -> T:
        return await in_thread(self._threads, work)


async def in_thread(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Do work on a slot in a thread. Cancels are raised after its end: whoever gives up closes the slot."""
    return await finished(asyncio.get_running_loop().run_in_executor(threads, work))
