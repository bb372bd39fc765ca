"""Large values in and out of Redis: a stream of SETs or GETs with a bounded number of bytes under way.

redis-py keeps doing what it does well: addresses, TLS, authentication, pools, reconnects. Replaced are the two parts
that copy: the packer (values go to the socket from where they lie) and the parser (a large value is read from the
socket into memory of its own, once). That is about three times as fast as its pipelines and MGET.

Values in Redis are not trusted: of one that is larger than the reader expects only the start is kept. On a cluster each
command goes to the node of its key; what that node cannot answer is a missing value, not an error. Used by `store` in
worker threads; knows nothing of blocks.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from redis._parsers import BaseParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, OutOfMemoryError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from pdq import connection
from pdq.cluster import REDIRECTIONS, Nodes
from pdq.connection import SyncRedis

T = TypeVar("T")
Value: TypeAlias = bytes | memoryview
Command: TypeAlias = tuple[Any, ...]  # a verb, the key, whatever follows; of a script as EVALSHA wants it
WINDOW_BYTES = 8 << 20  # of values asked for or sent and not yet answered, per call
KEPT_BYTES = 128  # of a value that is too large
_SEPARATE = 16 << 10  # bytes from which on a value is neither joined nor buffered
_BROKEN = (RedisConnectionError, RedisTimeoutError)
_SCRIPTS = ("EVALSHA", "EVAL")
_CLOSED = "Connection closed by server."


def connect(url: str, connections: int, largest: int) -> SyncRedis | Nodes:
    """What `Values` needs. connections: to each node. largest: bytes of the largest value that is wanted whole."""
    transport: dict[str, Any] = {"parser_class": parser(largest), "command_packer": Packer()}
    if connection.is_cluster(url):
        return connection.nodes(url, connections, **transport)
    return connection.bulk(url, connections, **transport)


class Packer:
    """Commands as RESP, large arguments as pieces of their own."""

    def pack(self, *args: Any) -> list[Value]:
        first, *rest = args
        words: list[Value] = [w if isinstance(w, memoryview) else _encoded(w) for w in rest]
        words = [*_encoded(first).split(), *words]  # "CONFIG GET" is two words
        pieces: list[Value] = []
        line = [b"*%d\r\n" % len(words)]
        for word in words:
            line.append(b"$%d\r\n" % len(word))
            if len(word) < _SEPARATE:
                line += (bytes(word), b"\r\n")
            else:
                pieces += (b"".join(line), word)
                line = [b"\r\n"]
        return [*pieces, b"".join(line)]


def _encoded(word: object) -> bytes:
    return word if isinstance(word, bytes) else str(word).encode()


def parser(largest: int) -> Callable[..., Parser]:
    """For redis-py's `parser_class`."""
    return lambda socket_read_size: Parser(socket_read_size, largest)


class Parser(BaseParser):
    """RESP2 from a blocking socket. Bulk strings of 16 KiB and more are memoryviews."""

    def __init__(self, socket_read_size: int, largest: int) -> None:
        self._largest = largest
        self._buffer = memoryview(bytearray(max(socket_read_size, _SEPARATE)))
        self._at = self._end = 0  # what of the buffer is not read yet
        self._sock: Any = None

    def on_connect(self, connection: Any) -> None:
        self._sock = connection._sock
        self._at = self._end = 0

    def on_disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        return self._at < self._end or bool(select.select([self._sock], [], [], timeout)[0])

    def read_response(self, disable_decoding: bool = False, timeout: object = None) -> Any:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._bulk(int(rest))
        if kind == b"+":
            return rest
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return None if rest == b"-1" else [self.read_response() for _ in range(int(rest))]
        if kind == b"-":
            error = self.parse_error(rest.decode(errors="replace"))  # type: ignore[no-untyped-call]
            if isinstance(error, RedisConnectionError):
                raise error
            return error
        raise InvalidResponse(f"not RESP2: {bytes(line[:50])!r}")

    def _line(self) -> bytes:
        buffered = self._buffer.obj
        assert isinstance(buffered, bytearray)  # noqa: S101  made in __init__
        while (cut := buffered.find(b"\r\n", self._at, self._end)) < 0:
            if self._end - self._at >= len(self._buffer):
                raise InvalidResponse("a line without an end")
            self._more()
        line, self._at = bytes(self._buffer[self._at : cut]), cut + 2
        return line

    def _more(self) -> None:
        """Read whatever is there into the buffer."""
        if self._at == self._end:
            self._at = self._end = 0
        elif self._end == len(self._buffer):
            kept = bytes(self._buffer[self._at : self._end])
            self._at, self._end = 0, len(kept)
            self._buffer[: self._end] = kept
        self._end += self._receive(self._buffer[self._end :])

    def _receive(self, space: memoryview) -> int:
        if self._sock is None:
            raise RedisConnectionError(_CLOSED)
        count: int = self._sock.recv_into(space)
        if not count:
            raise RedisConnectionError(_CLOSED)
        return count

    def _bulk(self, size: int) -> Value | None:
        if size < 0:
            return None
        if size > self._largest:
            return self._start_of(size)
        if size < _SEPARATE:
            while self._end - self._at < size + 2:
                self._more()
            value = bytes(self._buffer[self._at : self._at + size])
            self._at += size + 2
            return value
        # With two spare bytes the line end comes with the last read.
        large = np.empty(size + 2, np.uint8).data
        self._fill(large)
        return large[:size]

    def _fill(self, space: memoryview) -> None:
        """The next len(space) bytes; of the socket no more than that."""
        have = min(self._end - self._at, len(space))
        space[:have] = self._buffer[self._at : self._at + have]
        self._at += have
        while have < len(space):
            have += self._receive(space[have:])

    def _start_of(self, size: int) -> bytes:
        """Read a value that is too large to be one of ours, and keep its start."""
        kept = bytearray(min(size, KEPT_BYTES))
        self._fill(memoryview(kept))
        left = size + 2 - len(kept)
        scratch = memoryview(bytearray(min(left, 1 << 20)))
        while left:
            part = scratch[: min(left, len(scratch))]
            self._fill(part)
            left -= len(part)
        return bytes(kept)


class Values:
    """Streams of large values, and short commands. redis: from `connect`. usual: bytes of most values."""

    def __init__(self, redis: SyncRedis | Nodes, usual: int) -> None:
        self._redis = redis
        self._ahead = max(WINDOW_BYTES // usual, 1)

    def get(self, names: Sequence[str]) -> Generator[Value | None, None, None]:
        """The values, in order, while they come in. Whoever stops early pays a reconnect. Raises RedisError."""
        done, again = 0, True
        while done < len(names):
            try:
                for value in self._stream(names[done:], last=not again):
                    done += 1
                    yield value
            except _BROKEN:
                if not again:
                    raise
                again = False

    def _stream(self, names: Sequence[str], *, last: bool) -> Generator[Value | None, None, None]:
        asked = 0
        with self._open(last=last) as line:
            for i in range(len(names)):
                while asked < min(i + self._ahead, len(names)):
                    line.send("GET", names[asked])
                    asked += 1
                yield line.receive()

    def put(self, items: Sequence[tuple[str, Value]], ttl_ms: int) -> int:
        """Set values; how many of the leading ones are there.

        Fewer than all: memory is full, or a node of the cluster is gone. Raises RedisError.
        """
        return self._twice(lambda last: self._put(items, ttl_ms, last=last))

    def _put(self, items: Sequence[tuple[str, Value]], ttl_ms: int, *, last: bool) -> int:
        taken: list[bool] = []
        with self._open(last=last) as line:
            for name, value in items:
                line.send("SET", name, value, "PX", ttl_ms)
                if line.owed >= self._ahead:
                    taken.append(_taken(line))
            while line.owed:
                taken.append(_taken(line))
        return [*taken, False].index(False)

    def run(self, *commands: Command, errors: bool = False) -> list[Any]:
        """Short idempotent commands in one round trip; their answers as they are in RESP2.

        On a cluster None where the key's node does not answer. errors: give those of Redis among the answers instead
        of raising the first. Raises RedisError.
        """
        answers = self._twice(lambda last: self._run(commands, last=last))
        if not errors and (error := next((a for a in answers if isinstance(a, Exception)), None)):
            raise error
        return answers

    def _run(self, commands: Sequence[Command], *, last: bool) -> list[Any]:
        answers: list[Any] = []
        with self._open(last=last) as line:
            for command in commands:
                line.send(*command)
            for _ in commands:
                try:
                    answers.append(line.receive())
                except ResponseError as e:
                    answers.append(e)
        return answers

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        """For `scripts`."""
        return self.run(("EVALSHA", sha, numkeys, *keys_and_args))[0]

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        """For `scripts`."""
        return self.run(("EVAL", script, numkeys, *keys_and_args))[0]

    def _twice(self, attempt: Callable[[bool], T]) -> T:
        """attempt: told whether it is the last."""
        try:
            return attempt(False)
        except _BROKEN:
            return attempt(True)

    def _open(self, *, last: bool) -> _Line | _Lines:
        return _Lines(self._redis, last) if isinstance(self._redis, Nodes) else _Line(self._redis)


class _Line:
    """A connection out of the pool, with commands sent and answers owed."""

    def __init__(self, redis: SyncRedis) -> None:
        self._pool: Any = redis.connection_pool
        self._connection: Any = self._pool.get_connection()
        self._held: list[Value] = []  # to be sent
        self._held_bytes = 0
        self.owed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owed:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def send(self, *command: Any) -> None:
        self.owed += 1
        for piece in self._connection.pack_command(*command):
            self._held.append(piece)
            self._held_bytes += len(piece)
        if self._held_bytes >= _SEPARATE:
            self.flush()

    def flush(self) -> None:
        """Small commands go out together, at the latest when an answer is waited for."""
        if self._held:
            small = self._held_bytes < 2 * _SEPARATE
            pieces, self._held, self._held_bytes = self._held, [], 0
            self._connection.send_packed_command([b"".join(pieces)] if small else pieces)

    def receive(self) -> Any:
        self.flush()
        try:
            answer = self._connection.read_response()
        except ResponseError:
            self.owed -= 1
            raise
        self.owed -= 1
        return answer


class _Lines:
    """A `_Line` to each node of a cluster that is needed, as one: the answers come in the order of the commands.

    None is the answer where the key has moved (it is lost, or not taken), and, in the last of two tries, where its node
    is away.
    """

    def __init__(self, nodes: Nodes, last: bool) -> None:
        self._nodes = nodes
        self._last = last
        self._lines: dict[SyncRedis, _Line | None] = {}  # None: broken
        self._turns: deque[SyncRedis | None] = deque()  # who owes the next answers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._lines:
            self._drop(node)

    @property
    def owed(self) -> int:
        return len(self._turns)

    def send(self, *command: Any) -> None:
        node = self._nodes.of(command[3] if command[0] in _SCRIPTS else command[1])
        self._turns.append(node)
        self._with(node, lambda line: line.send(*command))

    def receive(self) -> Any:
        for node in self._lines:
            self._with(node, _Line.flush)
        return self._with(self._turns.popleft(), _Line.receive)

    def _with(self, node: SyncRedis | None, work: Callable[[_Line], T]) -> T | None:
        if node is None:
            return None
        try:
            if node not in self._lines:
                self._lines[node] = _Line(node)
            line = self._lines[node]
            return None if line is None else work(line)
        except REDIRECTIONS as e:
            self._nodes.redirected(e)
        except _BROKEN:
            if not self._last:
                raise
            self._drop(node)
            self._nodes.lost(node)
        return None

    def _drop(self, node: SyncRedis) -> None:
        if line := self._lines.get(node):
            line.__exit__()
        self._lines[node] = None


def _taken(line: _Line | _Lines) -> bool:
    """Did Redis take the value whose turn it is? False: its memory is full."""
    try:
        return line.receive() is not None
    except OutOfMemoryError:
        return False
