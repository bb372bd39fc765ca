"""Ends asyncio tasks for certain. Knows nothing of what they do; for whoever must not hang on a task that it gives up.

Once is not enough: in Python 3.11 `asyncio.wait_for`, with which redis-py sends, loses a cancel that comes just as what
it waits for is done. pdq itself uses `asyncio.timeout`, which loses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

CANCEL_SECONDS = 1.0  # between two cancels of a task that goes on


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended. What they raise is left in them."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CANCEL_SECONDS)
