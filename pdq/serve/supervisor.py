"""Child processes that are kept running: start, output, restart with back-off, stop in time, kill.

Used by `serve.py` alone. Knows nothing of what the programs do: a program is a name, a command line and an environment.
Every child leads a session of its own, so that Ctrl-C in a terminal reaches only the supervisor, and is tied to it
(tied.py), so that none outlives it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from pdq.errors import ConfigError, PdqError, Unavailable
from pdq.serve import tied

WRONG_SETTING = 2  # the exit code of a program that another start cannot help
_LONGEST_LINE = 16 * 1024
_LAST_OUTPUT_SECONDS = 1.0  # a grandchild may hold the pipe open after the child's end

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run. `before`: called ahead of every start. `last_words`: why it ended, if it does not print that.

    on_orphaned: the signal it gets when the supervisor dies.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    cwd: Path | None = None
    pass_fds: tuple[int, ...] = ()
    before: Callable[[], None] | None = None
    last_words: Callable[[], str] | None = None
    on_orphaned: signal.Signals = signal.SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """Seconds before the first restart, doubled up to `limit`, forgotten after `healthy` seconds of life.

    tries: deaths of one program before the pool was ever ready that make the whole start a failure.
    """

    first: float = 0.5
    limit: float = 30.0
    healthy: float = 60.0
    tries: int = 5


class Supervisor:
    """All children of this process. `say(name, line)` gets every line they print and every note about them.

    `failed` resolves to the error that makes the start of the whole pool hopeless; never after `settled` was set.
    """

    def __init__(self, say: Say, restarts: Restarts | None = None) -> None:
        self.failed: asyncio.Future[PdqError] = asyncio.get_running_loop().create_future()
        self.settled = False
        self._say = say
        self._restarts = restarts or Restarts()
        self._children: dict[str, _Child] = {}

    def start(self, program: Program) -> None:
        """Run `program` until `stop` or `kill`."""
        self._children[program.name] = _Child(self, program)

    def pid(self, name: str) -> int | None:
        """Process id of a child; None while it is not running."""
        process = self._children[name].process
        return process.pid if process and process.returncode is None else None

    async def stop(self, name: str, seconds: float) -> bool:
        """SIGTERM, after `seconds` SIGKILL. True if the child ended in time. An unknown name is fine."""
        child = self._children.get(name)
        return await child.stop(seconds) if child else True

    async def kill(self) -> None:
        """SIGKILL to every child and its descendants; returns when they are gone."""
        for child in self._children.values():
            child.kill()
        await asyncio.gather(*(child.task for child in self._children.values()))

    def note(self, name: str, text: str) -> None:
        self._say(name, text)

    def after_death(self, child: _Child, code: int) -> float | None:
        """Seconds until the next start; None if there will be none."""
        if not self.settled and (code == WRONG_SETTING or child.deaths >= self._restarts.tries):
            words = child.last_words() or f"{child.program.name} {ending(code)}"
            if not self.failed.done():
                kind = ConfigError if code == WRONG_SETTING else Unavailable
                self.failed.set_result(kind(sentence(words)))
            return None
        delay = min(self._restarts.first * 2.0 ** min(child.deaths - 1, 30), self._restarts.limit)
        self._say(child.program.name, f"{ending(code)}; starting again in {delay:g} s")
        return delay

    @property
    def healthy_seconds(self) -> float:
        return self._restarts.healthy


class _Child:
    """One program and the task that keeps it alive."""

    def __init__(self, owner: Supervisor, program: Program) -> None:
        self.program = program
        self.process: asyncio.subprocess.Process | None = None
        self.deaths = 0  # in a row, without a healthy minute between them
        self._owner = owner
        self._output: Output | None = None
        self._stopping = asyncio.Event()
        self._killed = False
        self.task = asyncio.create_task(self._keep(), name=program.name)

    def last_words(self) -> str:
        if self.program.last_words:
            return self.program.last_words()
        return self._output.last if self._output else ""

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping.is_set():
            began = loop.time()
            code = await self._live_once()
            if self._stopping.is_set():
                return
            self.deaths = 1 if loop.time() - began >= self._owner.healthy_seconds else self.deaths + 1
            delay = self._owner.after_death(self, code)
            if delay is None:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _live_once(self) -> int:
        """One life of the program; its exit code, negative for a signal."""
        self._output = Output(lambda line: self._owner.note(self.program.name, line))
        try:
            if self.program.before:
                self.program.before()
            async with self._output.pipe() as write:
                self.process = await spawn(self.program, stdout=write, stderr=write)
        except OSError as e:
            self._output.last = f"{self.program.name} cannot be started: {e}"
            return WRONG_SETTING
        if self._stopping.is_set():  # asked while the process was being made
            self._signal(signal.SIGKILL if self._killed else signal.SIGTERM)
        code = await self.process.wait()
        await self._output.rest()
        return code

    async def stop(self, seconds: float) -> bool:
        self._stopping.set()
        self._signal(signal.SIGTERM)
        done, _ = await asyncio.wait({self.task}, timeout=seconds)
        if done:
            return not self._killed
        self.kill()
        await self.task
        return False

    def kill(self) -> None:
        self._stopping.set()
        self._killed = True
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is None or self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):  # it ended this moment
            if number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


class Output(asyncio.Protocol):
    """Cuts what a child prints into lines; a progress line that overwrites itself counts with its last state."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        self._emit = emit
        self._rest = b""
        self._closed = asyncio.Event()
        self.last = ""

    @asynccontextmanager
    async def pipe(self) -> AsyncIterator[int]:
        """The descriptor to give to the child, for as long as it takes to start it."""
        read, write = os.pipe()
        try:
            await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(read, "rb", 0))
            yield write
        finally:
            os.close(write)

    async def rest(self) -> None:
        """What is still in the pipe after the child's end, unless a descendant of it keeps the pipe open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_OUTPUT_SECONDS):
                await self._closed.wait()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._line(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._line(self._rest)
        self._closed.set()

    def _line(self, raw: bytes) -> None:
        text = raw.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace").rstrip()
        if text:
            self.last = text
            self._emit(text)


async def spawn(program: Program, stdout: int, stderr: int) -> asyncio.subprocess.Process:
    """Start `program` in its own session, tied to this process. Must be called in the main thread (tied.py)."""
    tie = (sys.executable, "-I", "-S", tied.__file__, str(os.getpid()), str(int(program.on_orphaned)))
    return await asyncio.create_subprocess_exec(
        *tie,
        *program.argv,
        env=program.env,
        cwd=program.cwd,
        pass_fds=program.pass_fds,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def sentence(line: str) -> str:
    """The message in a log line, without time and level."""
    return re.sub(r"^([\d-]+ [\d:,.]+ [A-Z] |error: )", "", line)


def ending(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")
