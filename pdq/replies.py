"""Reads many reply streams over one connection, and wakes whoever waits for each.

One task blocks in a single XREAD over all open streams plus a private wake stream, to which a line is added when a
stream has been opened and the read does not end by itself. A reader starts after any position and sees every later
event once, in order: entry ids are `0-<tokens visible>` and the terminal `1-0`. No torch, no aiohttp.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from contextlib import suppress
from typing import Any

from pdq.connection import BLOCK_SECONDS, AsyncRedis, RedisError
from pdq.errors import PdqError, RequestFailed, Unavailable
from pdq.keys import Keys
from pdq.messages import BadMessage, Event, decode
from pdq.tasks import cancelled

log = logging.getLogger(__name__)

READ_COUNT = 256  # events of one stream in one reply: a late reader of a long answer must not get it all at once
OUTAGE_SECONDS = 15.0  # Redis away for longer ends the waiting with Unavailable
SHORT_SECONDS = 2.0  # for commands that must not hold up anybody
WAKE_SECONDS = 0.0005  # in which a read may end by itself; a first event takes longer
MANY = 8  # open streams, from which on events are let gather: a read costs all sides something for each stream
GATHER_SECONDS = 0.0005
_WAKE_TTL_MS = 3_600_000


class Subscription:
    """The events of one request from a position on. Close it, or use it up to the terminal event."""

    def __init__(self, hub: ReplyHub, request_id: str, after: int) -> None:
        self.request_id = request_id
        self.last_id = f"0-{after}"
        self._hub = hub
        self._events: deque[Event | PdqError] = deque()
        self._ready: asyncio.Future[None] | None = None  # of whoever waits in `get`, one at a time

    async def get(self, timeout: float) -> Event | None:
        """The next event, or None when none came within `timeout` seconds. Raises Unavailable in an outage."""
        if not self._events:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            late = loop.call_later(timeout, self._wake)
            try:
                await self._ready
            finally:
                late.cancel()
        if not self._events:
            return None
        event = self._events.popleft()
        if isinstance(event, PdqError):
            raise event
        return event

    def close(self) -> None:
        self._hub.forget(self)

    def put(self, item: Event | PdqError) -> None:
        """Called by the hub."""
        self._events.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(None)


class ReplyHub:
    """The one reader of a process. redis: a command client; waiting: a blocking client of its own."""

    def __init__(self, redis: AsyncRedis, waiting: AsyncRedis, keys: Keys) -> None:
        self._redis = redis
        self._waiting = waiting
        self._keys = keys
        self._open: dict[str, list[Subscription]] = {}
        self._wake_key = keys.wake(uuid.uuid4().hex)
        self._wake_id = "0-0"
        self._task: asyncio.Task[None] | None = None
        self._reading = False
        self._reads = 0  # the latest one
        self._woken = 0  # the latest one that is to be ended
        self._wakes: set[asyncio.Task[None]] = set()
        self._outage: float | None = None  # since when
        self.away = False  # does Redis not answer now?

    async def subscribe(self, request_id: str, after: int = 0) -> Subscription:
        """Start reading the request's events after the first `after` tokens. Raises Unavailable."""
        sub = Subscription(self, request_id, after)
        self._open.setdefault(self._keys.out(request_id), []).append(sub)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._pump(), name="pdq-replies")
            self._task.add_done_callback(self._on_end)
        elif self._reading and self._woken < self._reads:
            self._woken = self._reads
            asyncio.get_running_loop().call_later(WAKE_SECONDS, self._wake_from, self._reads)
        return sub

    def forget(self, sub: Subscription) -> None:
        key = self._keys.out(sub.request_id)
        subs = self._open.get(key, [])
        if sub in subs:
            subs.remove(sub)
        if not subs:
            self._open.pop(key, None)

    async def aclose(self) -> None:
        await cancelled([*self._wakes, *([] if self._task is None else [self._task])])
        with suppress(RedisError, TimeoutError):
            async with asyncio.timeout(SHORT_SECONDS):
                await self._redis.delete(self._wake_key)

    def _wake_from(self, read: int) -> None:
        if self._reading and self._reads == read:  # else a later one has all streams that were open then
            task = asyncio.create_task(self._wake(), name="pdq-wake")
            self._wakes.add(task)
            task.add_done_callback(self._wakes.discard)

    async def _wake(self) -> None:
        """End the current XREAD. The stream keeps the line, so it is seen also by a read that starts only now."""
        line = ("XADD", self._wake_key, "MAXLEN", 1, "*", "w", "1")
        try:
            async with asyncio.timeout(SHORT_SECONDS):
                await self._redis.execute_many([line, ("PEXPIRE", self._wake_key, _WAKE_TTL_MS)])
        except (RedisError, TimeoutError) as e:
            log.warning("cannot wake the reply reader: %s", e)  # it looks again after BLOCK_SECONDS at the latest

    async def _pump(self) -> None:
        self._outage, self.away, delay = None, False, 0.05
        while self._open:
            asked = time.monotonic()
            try:
                if self.away:
                    await self._probe()
                reply = await self._read()
            except (RedisError, TimeoutError) as e:
                self._on_outage(e, asked + BLOCK_SECONDS)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 1.0)
                continue
            self._outage, delay = None, 0.05
            for stream, entries in reply or []:
                self._deliver(stream.decode(), entries)
            if len(self._open) > MANY:
                await asyncio.sleep(GATHER_SECONDS)

    async def _probe(self) -> None:
        """Is the outage over? A blocking read takes longer to find out, if it is one of those that get no answer."""
        async with asyncio.timeout(SHORT_SECONDS):
            await self._redis.ping()
        self.away = False

    async def _read(self) -> Any:
        # Several readers of one request may stand at different places; read from the earliest, deliver what is new.
        streams = {
            key: subs[0].last_id if len(subs) == 1 else min((s.last_id for s in subs), key=_order)
            for key, subs in self._open.items()
        }
        streams[self._wake_key] = self._wake_id
        self._reading, self._reads = True, self._reads + 1
        try:
            return await self._waiting.xread(
                streams,  # type: ignore[arg-type]
                count=READ_COUNT,
                block=int(BLOCK_SECONDS * 1000),
            )
        finally:
            self._reading = False

    def _deliver(self, key: str, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> None:
        if key == self._wake_key:
            self._wake_id = entries[-1][0].decode()
            return
        for raw_id, data in entries:
            entry_id = raw_id.decode()
            item: Event | PdqError
            try:
                item = decode(Event, data[b"e"])
            except (BadMessage, KeyError) as e:
                item = RequestFailed(f"the reply cannot be read: {e}")
            for sub in list(self._open.get(key, ())):
                if _order(entry_id) > _order(sub.last_id):
                    sub.last_id = entry_id
                    sub.put(item)
                    if isinstance(item, PdqError) or item.terminal:
                        self.forget(sub)

    def _on_outage(self, error: Exception, due: float) -> None:
        """due: when an answer should have come at the latest; a silent Redis is away since then."""
        now, self.away, why = time.monotonic(), True, str(error) or "no answer"
        if self._outage is None:
            self._outage = min(now, due)
            log.warning("Redis does not answer the reply reader: %s", why)
        if now - self._outage >= OUTAGE_SECONDS:
            self._end_all(Unavailable(f"Redis has been away for {OUTAGE_SECONDS:g} s: {why}", retry_after=5.0))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Nobody is left waiting for a reader that a bug has ended; the next subscription starts another."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the reply reader failed", exc_info=error)
            self._end_all(RequestFailed("the reply cannot be read"))

    def _end_all(self, error: PdqError) -> None:
        for sub in [s for subs in self._open.values() for s in subs]:
            sub.put(error)
            self.forget(sub)


def _order(entry_id: str) -> tuple[int, int]:
    first, _, second = entry_id.partition("-")
    return int(first), int(second)
