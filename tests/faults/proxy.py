"""A TCP proxy before a real server, which spoils connections on demand: what networks do to Redis clients.

Knows nothing of pdq, and of Redis no more than its protocol: commands are answered in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import hiredis

CHUNK = 1 << 20
HEAD = 1 << 16  # of a command, that much is looked at


@dataclass(eq=False)
class _Drop:
    """The next reply to a command that holds `command`, itself holding `reply`, gets lost."""

    command: bytes
    reply: bytes
    lost: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Link:
    """One client's connection and the one made for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    mute: bool = False  # what the server says is swallowed
    dead: bool = False  # nothing gets through, for good: bytes were swallowed, and such a gap cannot be mended
    asked: deque[bytes] = field(default_factory=deque)  # commands without an answer; their beginnings
    commands: hiredis.Reader = field(default_factory=hiredis.Reader)
    answers: hiredis.Reader = field(default_factory=hiredis.Reader)

    def abort(self) -> None:
        for writer in (self.client, self.server):
            if writer is not None:
                writer.transport.abort()


class Proxy:
    """Use as an async context manager.

    target: the server's port; another one is for new connections. delay: seconds that bytes take, each way. accepted:
    connections so far.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._listener: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hole = False
        self._drop: _Drop | None = None
        self.port = 0
        self.delay = 0.0
        self.accepted = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def listen(self) -> None:
        """Take connections (again)."""
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=CHUNK)
            self.port = self._listener.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        """Refuse new connections; those there are stay."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def cut(self) -> None:
        """End all connections at once."""
        for link in self._links:
            link.abort()

    def half_close(self) -> None:
        """Tell every client that nothing more will come; what they still say reaches the server."""
        for link in self._links:
            link.mute = True
            with suppress(OSError, RuntimeError):
                link.client.write_eof()

    def hole(self, on: bool = True) -> None:
        """A black hole: connections are taken, and swallow everything, as do those there are."""
        self._hole = on

    def drop_reply(self, command: bytes = b"", reply: bytes = b"") -> asyncio.Event:
        """Lose the next reply to a command: it was carried out, but its connection is cut instead of the answer.

        command, reply: bytes that the two must hold. The event is set when it has happened.
        """
        self._drop = _Drop(command, reply)
        return self._drop.lost

    def _swallows(self, link: _Link) -> bool:
        link.dead = link.dead or self._hole
        return link.dead

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link(writer, dead=self._hole)
        self._links.add(link)
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        try:
            await self._serve(link, reader)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            link.abort()
            self._links.discard(link)
            if task is not None:
                self._tasks.discard(task)

    async def _serve(self, link: _Link, reader: asyncio.StreamReader) -> None:
        if link.dead:
            while await reader.read(CHUNK):
                pass
            return
        answers, link.server = await asyncio.open_connection("127.0.0.1", self.target, limit=CHUNK)
        pumps = {asyncio.create_task(self._up(link, reader)), asyncio.create_task(self._down(link, answers))}
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _up(self, link: _Link, reader: asyncio.StreamReader) -> None:
        """Carry commands."""
        assert link.server is not None
        while data := await reader.read(CHUNK):
            if self.delay:
                await asyncio.sleep(self.delay)
            if self._swallows(link):
                continue
            link.asked += (b" ".join(command)[:HEAD] for command in _whole(link.commands, data))
            link.server.write(data)
            await link.server.drain()

    def _drops(self, command: bytes, answer: Any) -> bool:
        drop = self._drop
        if drop is None or drop.command not in command or drop.reply not in repr(answer).encode():
            return False
        self._drop = None
        drop.lost.set()
        return True

    async def _down(self, link: _Link, reader: asyncio.StreamReader) -> None:
        """Carry answers."""
        while data := await reader.read(CHUNK):
            for answer in _whole(link.answers, data):
                if self._drops(link.asked.popleft(), answer):
                    return
            if self.delay:
                await asyncio.sleep(self.delay)
            if not self._swallows(link) and not link.mute:
                link.client.write(data)
                await link.client.drain()


def _whole(reader: hiredis.Reader, data: bytes) -> Iterator[Any]:
    """What is complete with `data`."""
    reader.feed(data)
    while (found := reader.gets()) is not False:
        yield found
