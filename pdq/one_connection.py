"""A Redis client whose commands all travel over one connection, without waiting for each other's answers.

redis-py's own asyncio client takes a connection from a pool for each command, which costs more CPU than most of our
commands do on the server. Here a command is written at once, together with what others ask in the same turn of the
event loop, and the answers are given out in the order of the commands. Who gives up waiting leaves its answer unread by
anybody and disturbs nobody.

Between redis-py, whose connections it drives (login, TLS, clusters and parsers are theirs), and `connection`, which
makes these clients. For short commands, or for one reader that waits on the server: commands wait for the answers of
those before them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import redis.asyncio as aredis
from redis.asyncio.retry import Retry
from redis.connection import Connection
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ReadOnlyError, ResponseError
from redis.exceptions import TimeoutError as Unanswered

pack_command: Callable[[tuple[Any, ...]], bytes] | None = None
with suppress(ImportError):
    from hiredis import pack_command  # without what redis-py looks at before: names of several words

T = TypeVar("T")
_RETRIED = (Disconnected, Unanswered, ReadOnlyError)
# With hiredis where it is installed; asyncio connections pack in Python.
_pack: Callable[..., list[bytes]] = Connection().pack_command  # type: ignore[no-untyped-call]


class OneConnection(aredis.Redis):
    """Commands are tried again as `retry` says, each time on a new connection; so is what a replica refuses to write.

    pool: how connections are made; a pipeline would take one of its own, see `execute_many`. timeout: seconds for an
    answer. patience: seconds of silence after which a caller who gives up ends the connection, too, so that the next
    command does not wait for an answer that may never come; 0 for reads that wait on the server and must not take what
    nobody hears.
    """

    def __init__(self, pool: aredis.ConnectionPool, retry: Retry, timeout: float, patience: float) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._again = retry
        self._timeout = timeout
        self._patience = patience
        self._line: _Line | None = None
        self._connecting: asyncio.Task[_Line] | None = None

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's clients do."""

        async def ask(line: _Line) -> Any:
            return await self.parse_response(line.ask(args), args[0], **options)  # type: ignore[arg-type]

        return await self._tried(ask)

    async def execute_many(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one round trip; their answers as they are, a ResponseError where one failed."""

        async def ask(line: _Line) -> list[Any]:
            answers = [await answer.raw() for answer in [line.ask(command) for command in commands]]
            for answer in answers:
                if isinstance(answer, _RETRIED):
                    raise answer
            return answers

        return await self._tried(ask)

    async def execute_all(self, *commands: tuple[Any, ...]) -> list[Any]:
        """`execute_many`, but an error is raised."""
        answers = await self.execute_many(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def _tried(self, ask: Callable[[_Line], Awaitable[T]]) -> T:
        line, failed = self._line, None
        if line is not None and line.error is None:
            try:
                return await self._once(line, ask)
            except _RETRIED as e:
                failed = e

        async def attempt() -> T:
            nonlocal failed
            if failed is not None:  # that was the first one
                error, failed = failed, None
                raise error
            return await self._once(await self._connected(), ask)

        return await self._again.call_with_retry(attempt, _pass)

    async def _once(self, line: _Line, ask: Callable[[_Line], Awaitable[T]]) -> T:
        try:
            return await ask(line)
        except _RETRIED as e:
            self._leave(line, e)
            raise
        except asyncio.CancelledError:
            if line.silence >= self._patience:
                self._leave(line, Disconnected("a caller gave up on this connection"))
            raise

    def _leave(self, line: _Line, error: Exception) -> None:
        """A connection that led nowhere, or to a server that has become a replica, is used no more."""
        line.close(error)
        if self._line is line:
            self._line = None

    async def _connected(self) -> _Line:
        """The connection; one attempt to connect is everybody's."""
        if self._line is not None and self._line.error is None:
            return self._line
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="pdq-connect")
            self._connecting.add_done_callback(self._on_connected)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Line:
        connection = self.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._timeout):
                await connection.connect_check_health(retry_socket_connect=False)
        except BaseException as e:
            connection._close()
            if isinstance(e, TimeoutError):
                raise Unanswered("Timeout connecting to server") from e
            if isinstance(e, RuntimeError):  # of uvloop: it was closed before the first word
                raise Disconnected(f"cannot write: {e}") from e
            raise
        self._line = _Line(connection, self._timeout)
        return self._line

    def _on_connected(self, task: asyncio.Task[_Line]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # whoever still waits has it; perhaps nobody does

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._line is not None:
            self._line.close(Disconnected("the client is closed"))
            await self._line.closed()
            self._line = None
        await super().aclose(close_connection_pool)


class _Answer:
    """The answer to come to one command, in the shape of a connection from which redis-py reads it."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future

    async def raw(self) -> Any:
        """An error of the server, or of the connection, as a value: nobody may be left to raise it."""
        return await self._future

    async def read_response(self, disable_decoding: bool = True) -> Any:
        answer = await self._future
        if isinstance(answer, Exception):
            raise answer
        return answer


class _Line:
    """A connection in use. error: why it is not any more."""

    def __init__(self, connection: aredis.Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._unwritten: list[bytes] = []
        self._owed: deque[tuple[asyncio.Future[Any], float]] = deque()  # answers, and when they were asked for
        self._alarm: asyncio.TimerHandle | None = None
        self._reader = self._loop.create_task(self._read(), name="pdq-answers")
        self.error: Exception | None = None

    def ask(self, command: tuple[Any, ...]) -> _Answer:
        """Send a command before the event loop waits again. Raises redis.DataError, or why nothing can be sent."""
        if self.error is not None:
            raise _same(self.error)
        packed = _packed(command)
        future = self._loop.create_future()
        if not self._unwritten:
            self._loop.call_soon(self._write)
        self._unwritten += packed
        now = self._loop.time()
        self._owed.append((future, now))
        if self._alarm is None:
            self._alarm = self._loop.call_at(now + self._timeout, self._look)
        return _Answer(future)

    def _write(self) -> None:
        data = b"".join(self._unwritten)
        self._unwritten.clear()
        writer = self._connection._writer
        if self.error is not None or writer is None:
            return
        try:
            writer.write(data)
        except (OSError, RuntimeError) as e:  # RuntimeError: uvloop knows before the reader does that it is closed
            self.close(Disconnected(f"cannot write: {e}"))

    async def _read(self) -> None:
        try:
            while True:
                try:
                    answer = await self._connection.read_response(disable_decoding=True, timeout=math.inf)
                except ResponseError as e:
                    self._give(e)
                else:
                    self._give(answer)
        except Exception as e:  # noqa: BLE001  whatever it is, all who wait are told
            self.close(e)

    def _give(self, answer: Any) -> None:
        if not self._owed:
            raise Disconnected("an answer that nobody asked for")
        future, _ = self._owed.popleft()
        if not future.done():
            future.set_result(answer)

    @property
    def silence(self) -> float:
        """For how many seconds the oldest answer has been owed; -1 if none is."""
        return self._loop.time() - self._owed[0][1] if self._owed else -1.0

    def _look(self) -> None:
        """Has the oldest answer been owed for too long? One timer for all of them."""
        self._alarm = None
        if not self._owed:
            return
        due = self._owed[0][1] + self._timeout
        if due <= self._loop.time():
            self.close(Unanswered("Timeout reading from the server"))
        else:
            self._alarm = self._loop.call_at(due, self._look)

    def close(self, error: Exception) -> None:
        """Hang up; all that is owed fails with `error`."""
        if self.error is not None:
            return
        self.error = error
        if self._alarm is not None:
            self._alarm.cancel()
        if self._reader is not asyncio.current_task():
            self._reader.cancel()
        self._connection._close()  # type: ignore[no-untyped-call]
        for future, _ in self._owed:
            if not future.done():
                future.set_result(_same(error))
        self._owed.clear()

    async def closed(self) -> None:
        with suppress(asyncio.CancelledError):
            await self._reader


def _same(error: Exception) -> Exception:
    """For each waiter its own: an exception raised in several places collects the tracebacks of all."""
    kind = Unanswered if isinstance(error, Unanswered) else Disconnected
    return kind(*error.args)


def _packed(command: tuple[Any, ...]) -> list[bytes]:
    if pack_command is not None and command[0] == "EVALSHA":
        with suppress(TypeError):  # redis-py tells what is wrong, or knows another way
            return [pack_command(command)]
    return _pack(*command)


async def _pass(error: Exception, *_: object) -> None:
    """Nothing to mend between two tries: the next one connects anew."""
