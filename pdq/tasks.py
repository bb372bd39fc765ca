"""Ends asyncio tasks for certain, and awaits to its end what must not be left half done. Knows nothing of what they do.

Once is not enough: in Python 3.11 `asyncio.wait_for`, with which redis-py sends, loses a cancel that comes just as what
it waits for is done. pdq itself uses `asyncio.timeout`, which loses none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_SECONDS = 1.0  # between two cancels of a task that goes on


async def cancelled(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended. What they raise is left in them."""
    while left := [task for task in tasks if not task.done()]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=CANCEL_SECONDS)


async def settled(future: asyncio.Future[Any]) -> None:
    """Wait until `future` is done, and leave its outcome in it. Cancels of the caller are raised only then.

    `cancelled` cancels again every CANCEL_SECONDS, so one `asyncio.wait` in an `except CancelledError` is not enough.
    """
    cancel: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as e:
            cancel = e
    if cancel is not None:
        raise cancel


async def finished(work: Awaitable[T]) -> T:
    """What `work` gives. However often the caller is cancelled, `work` runs to its end before the cancel is raised."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await settled(future)
        raise
