"""KV slots for asyncio: wait for room in an engine's KV memory, first come first served."""

from __future__ import annotations

import asyncio

from pdq.engine.base import Engine, Slot


class Slots:
    """The slots of one engine. waiting: jobs that wait for room now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()
        self.waiting = 0

    async def open(self, capacity: int) -> Slot:
        """A slot for `capacity` tokens, as soon as there is room. It must fit into an empty engine."""
        self.waiting += 1
        try:
            async with self._turn:
                while not self._engine.can_open(capacity):
                    self._freed.clear()
                    await self._freed.wait()
                return self._engine.open(capacity)
        finally:
            self.waiting -= 1

    def close(self, slot: Slot) -> None:
        self._engine.close(slot)
        self._freed.set()
