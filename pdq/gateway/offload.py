"""A few threads for work that would hold up the event loop: big bodies, chat templates, long texts.

The queue before them is bounded, so a flood is refused and not collected. The threads are daemons: a template that
never ends must not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from pdq.gateway.errors import Busy

T = TypeVar("T")
THREADS = max(2, min(4, os.cpu_count() or 2))
WAITING = 1024  # a burst of as many requests as the queue takes by default


class TooSlow(Exception):
    """The work ran into its limit. Its thread is busy until the work ends."""


class Offload:
    """threads: how many pieces of work run at once; waiting: how many more may wait for them."""

    def __init__(self, threads: int = THREADS, waiting: int = WAITING) -> None:
        self._jobs: queue.Queue[_Job | None] = queue.Queue(waiting)
        self._count = threads
        for n in range(threads):
            threading.Thread(target=self._serve, name=f"pdq-offload-{n}", daemon=True).start()

    async def run(self, limit: float | None, work: Callable[..., T], *args: Any) -> T:
        """`work(*args)` in a thread. limit: seconds it may wait for a thread, and then seconds it may run; None: any.

        Raises what `work` raises, TooSlow when it runs for longer, Busy when no thread gets free in time.
        """
        job = _Job(work, args)
        try:
            self._jobs.put_nowait(job)
        except queue.Full as e:
            raise _busy() from e
        done = asyncio.wrap_future(job.future)
        try:
            if limit is not None:
                await _in_time(job, done, limit)
            result: T = await done
            return result
        finally:
            job.future.cancel()  # work that still waits for a thread although nobody wants it any more is not begun
            done.cancel()

    def close(self) -> None:
        """Let idle threads end; busy ones are left to themselves."""
        for _ in range(self._count):
            try:
                self._jobs.put_nowait(None)
            except queue.Full:
                return

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # its result may be large


async def _in_time(job: _Job, done: asyncio.Future[Any], limit: float) -> None:
    """Return when `job` has ended. Raises TooSlow, Busy."""
    while True:
        start = job.started
        left = limit if start is None else start + limit - time.monotonic()
        await asyncio.wait({done}, timeout=max(left, 0.0))
        if done.done():
            return
        if start is not None:
            raise TooSlow
        if job.started is None:
            raise _busy()


def _busy() -> Busy:
    return Busy("The server is busy; try again later.", retry_after=1.0)


class _Job:
    __slots__ = ("_args", "_work", "future", "started")

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._work = work
        self._args = args
        self.future: Future[Any] = Future()
        self.started: float | None = None

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        self.started = time.monotonic()
        try:
            result = self._work(*self._args)
        except BaseException as e:  # noqa: BLE001  it is raised again where the result is awaited
            self.future.set_exception(e)
        else:
            self.future.set_result(result)
