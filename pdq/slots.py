"""KV slots for asyncio: wait for room in an engine's KV memory, higher lanes first, then first come first served.

Nobody starves: a worker claims no job while one waits here.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from contextlib import suppress

from pdq.engine.base import Engine, Slot
from pdq.lease import Running
from pdq.messages import LANES

LOOK_SECONDS = 0.05  # between two looks at whether a job that waits should stop: other threads say so without waking us


class Slots:
    """The slots of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: list[Running] = []
        self._freed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Jobs that wait for room now."""
        return len(self._queue)

    async def open(self, capacity: int, running: Running) -> Slot:
        """A slot for `capacity` tokens, as soon as there is room. It must fit into an empty engine.

        Raises `running.error()` if the job should stop before.
        """
        insort(self._queue, running, key=_turn)
        try:
            while self._queue[0] is not running or not self._engine.can_open(capacity):
                running.check()
                self._freed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._freed.wait()
            return self._engine.open(capacity)
        finally:
            self._queue.remove(running)
            self._freed.set()

    def close(self, slot: Slot) -> None:
        self._engine.close(slot)
        self._freed.set()


def _turn(running: Running) -> tuple[int, float]:
    return LANES.index(running.job.request.lane), running.claimed
