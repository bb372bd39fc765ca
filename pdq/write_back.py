"""Stores the blocks that a completion has filled, so that the next turn of a chat finds all up to its last message.

Runs beside the batch: decode hands over a finished completion's slot and goes on. The bytes under way are bounded; what
would be more is dropped, since a lost write-back costs the next turn some prefill and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from pdq.connection import RedisError
from pdq.engine.base import Slot
from pdq.kv_transfer import KVTransfer, Prefix
from pdq.messages import Request
from pdq.slots import Slots
from pdq.tasks import cancelled

log = logging.getLogger(__name__)

MOST_BYTES = 256 << 20  # of blocks on their way to the store
DRAIN_SECONDS = 5.0


class WriteBack:
    """policy: whose blocks are stored, "always", "chat" (requests with messages) or "off". token_bytes: of KV."""

    def __init__(self, policy: str, transfer: KVTransfer, slots: Slots, token_bytes: int) -> None:
        self._policy = policy
        self._transfer = transfer
        self._slots = slots
        self._token_bytes = token_bytes
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.counters: Counter[str] = Counter()

    def take(self, slot: Slot, tokens: list[int], prompt: Prefix, request: Request) -> None:
        """Store what is new in the slot of a finished completion, then close it.

        tokens: whose KV the slot holds. prompt: the chain that was loaded into it.
        """
        chain = self._transfer.prefix(tokens, request)
        chain.stored = prompt.stored
        size = (len(chain.hashes) - chain.stored) * self._transfer.block_size * self._token_bytes
        wanted = self._policy == "always" or (self._policy == "chat" and request.messages is not None)
        if not (wanted and chain.shared and size):
            size = 0
        elif self._under_way + size > MOST_BYTES:
            self.counters["write_backs_dropped"] += 1
            size = 0
        if not size:
            self._slots.close(slot)
        if size or prompt.stored:
            task = asyncio.create_task(self._settle(slot, chain, prompt, size))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _settle(self, slot: Slot, chain: Prefix, prompt: Prefix, size: int) -> None:
        self._under_way += size
        try:
            if size:
                await self._store(slot, chain)
            await self._transfer.end(prompt)
        except (RedisError, ValueError) as e:  # ValueError: KV that its form in Redis cannot hold
            self.counters["write_backs_failed"] += 1
            log.warning("blocks of a completion were not stored: %s", e)
        finally:
            self._under_way -= size

    async def _store(self, slot: Slot, chain: Prefix) -> None:
        start, before = chain.stored * self._transfer.block_size, chain.stored
        try:
            blocks = await self._transfer.export_beside(slot, chain, start)
        finally:
            self._slots.close(slot)
        await self._transfer.publish(blocks, start, chain, 0)
        self.counters["write_backs"] += 1
        self.counters["written_back_blocks"] += chain.stored - before

    async def close(self) -> None:
        """Wait a moment for what is under way, then cancel it; an export that runs is awaited, for it reads a slot."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=DRAIN_SECONDS)
            await cancelled(late)
