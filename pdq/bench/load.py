"""When requests are sent: closed loops (a fixed number at a time) and open ones (by a clock). Knows no HTTP.

A closed loop slows down with its server; an open one does not, so it shows the queues that real clients would make.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from pdq.bench.records import clock

T = TypeVar("T")
Send = Callable[[T], Awaitable[None]]


async def closed_loop(work: Iterator[T], send: Send[T], streams: int) -> None:
    """`streams` at a time, each taking the next of `work` when its last has ended."""

    async def stream() -> None:
        for one in work:
            await send(one)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(stream())


async def open_loop(work: Iterator[T], send: Send[T], times: Iterable[float], late: list[float]) -> None:
    """One at each of `times` (seconds from now, rising), however many still run; waits for all of them.

    late: gets the seconds by which each was sent late, which is this process's fault and not the server's.
    """
    begin = clock()
    async with asyncio.TaskGroup() as group:
        for at, one in zip(times, work, strict=False):
            await asyncio.sleep(begin + at - clock())
            late.append(max(0.0, clock() - begin - at))
            group.create_task(_sent(send, one))


async def _sent(send: Send[T], one: T) -> None:
    await send(one)


def arrivals(rate: float, burst: float | None, seed: int, duration: float | None) -> Iterator[float]:
    """Seconds of the arrivals up to `duration` (None: without end), `rate` a second on average.

    The gaps are gamma-distributed: shape 1 (also for None) is a Poisson process, a lower one comes in bursts.
    """
    shape = 1.0 if burst is None else burst
    rng = random.Random(f"{seed} arrivals")  # noqa: S311  a load, not a secret
    at = 0.0
    while True:
        at += rng.gammavariate(shape, 1 / (shape * rate))
        if duration is not None and at >= duration:
            return
        yield at


def until(deadline: float | None, work: Iterator[T]) -> Iterator[T]:
    """`work` as long as the clock is before `deadline`."""
    while deadline is None or clock() < deadline:
        try:
            yield next(work)
        except StopIteration:
            return
