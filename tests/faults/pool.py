"""A pool of real processes on a Valkey that keeps every write, for the tests that break it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from pdq.client import AsyncClient, Handle
from pdq.config import RedisSettings
from pdq.keys import Keys
from pdq.messages import Event, WorkerInfo, decode
from tests.faults.programs import Program, Programs
from tests.hygiene import leaks
from tests.servers import Server

LEASE = 1.0


class Pool:
    """Valkey with an append-only file, and programs. current: the one process of each kind that serves now.

    options: settings of all programs; those with a prefix such as `decode_` are for that kind alone.
    """

    def __init__(self, *kinds: str, **options: object) -> None:
        self.server = Server("valkey9", "--appendfsync", "always", save=True)
        self.keys = Keys("default")
        common = {"engine": "scripted", "lease_seconds": LEASE, "block_size": 4, "kv_memory": "1MiB"}
        self._own = {k: v for k, v in options.items() if k.partition("_")[0] in ("gateway", "prefill", "decode")}
        rest = {k: v for k, v in options.items() if k not in self._own}
        self.programs = Programs(self.server, **common | rest)
        self.current = {kind: self.start(kind) for kind in kinds}
        self.programs.wait(*self.current.values())
        self.redis = self.server.client()

    def start(self, kind: str, **more: object) -> Program:
        mine = {k.removeprefix(f"{kind}_"): v for k, v in self._own.items() if k.startswith(f"{kind}_")}
        return self.programs.start(kind, **mine | more)

    def close(self) -> None:
        self.server.freeze(False)
        self.programs.close()
        self.redis.close()
        self.server.close()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """An SDK client; prints the programs' logs if the block fails."""
        try:
            async with AsyncClient(RedisSettings(redis_url=self.server.url)) as client:
                yield client
        except BaseException:
            print(self.programs.report())
            raise

    def field(self, request_id: str, name: str) -> str:
        """A field of the request's hash, "" if it has none."""
        return (self.redis.hget(self.keys.request(request_id), name) or b"").decode()

    def info(self, program: Program) -> WorkerInfo | None:
        """The worker's latest heartbeat."""
        data = self.redis.get(self.keys.worker(program.name))
        return None if data is None else decode(WorkerInfo, data)

    def counter(self, program: Program, name: str) -> int:
        info = self.info(program)
        return 0 if info is None else dict(info.counters).get(name, 0)

    async def at_rest(self, seconds: float = 10.0) -> None:
        """Wait until nothing is left but what has an end of its own."""
        await until(lambda: not leaks(self.redis), seconds, lambda: leaks(self.redis))


async def until(condition: Callable[[], bool], seconds: float = 30.0, why: Callable[[], object] = lambda: "") -> None:
    """Wait for a condition, looking every few milliseconds. Raises TimeoutError that says `why`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {why()}")
        await asyncio.sleep(0.005)


async def read(handle: Handle, seconds: float = 60.0, after: int = 0) -> list[Event]:
    """All events; fails if a token is repeated or skipped, or if anything follows the end."""
    events: list[Event] = []
    async with asyncio.timeout(seconds):
        async for event in handle.stream(after):
            assert event.index == after + sum(len(e.token_ids) for e in events)
            assert not (events and events[-1].terminal)
            events.append(event)
    assert events[-1].terminal
    return events


def text_of(events: Sequence[Event]) -> str:
    return "".join(e.text for e in events)


async def submit(client: AsyncClient, prompt: str, count: int, **options: Any) -> Handle:
    return await client.submit(prompt=prompt, max_tokens=count, temperature=0, **options)
