"""Conditional disaggregation: is a prompt so short that a decode worker with little to do may compute it itself?

That saves the way of its KV through Redis and, behind long prompts, a wait. Decode computes a few tokens of it a step,
so that its running streams do not stutter; with a large batch even that is too much. Asked by the prefill worker.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from pdq.connection import RedisError
from pdq.messages import WorkerInfo

LIGHT = 4  # a decode worker with at most one in this many of its places taken has little to do
LOOK_SECONDS = 1.0  # between two looks at the workers' heartbeats


class ShortPath:
    """tokens: that a prompt may lack at most; 0 switches the short path off. look: gives the pool's live workers."""

    def __init__(self, tokens: int, look: Callable[[], Awaitable[list[WorkerInfo]]]) -> None:
        self._tokens = tokens
        self._look = look
        self._light = False
        self._next_look = 0.0

    async def takes(self, lacking: int) -> bool:
        """May decode compute a prompt that lacks KV of so many tokens?"""
        if lacking > self._tokens:
            return False
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            try:
                workers = await self._look()
            except RedisError:
                workers = []
            decode = [w for w in workers if w.stage == "decode" and w.state == "ready"]
            self._light = any(w.running * LIGHT <= w.capacity for w in decode)
        return self._light
