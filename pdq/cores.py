"""Cores that the workers of one machine lend each other: an idle stage's cores compute for the other one.

Each worker owns as many cores as it has threads. It *works* from the claim of a job to its end; while it does not,
another worker may borrow its cores for one forward. Whoever owns cores never waits for them: should they be lent when
its work begins, two processes share them until the borrower's forward ends, and it will not borrow again.

The state lives in locks on files, which the kernel releases when a process dies: `<worker>.work` is held by an owner
that works, `<worker>.lent` by a borrower, `<worker>.cores` says how many there are. No torch, no Redis.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol


class Cores(Protocol):
    """What a worker does with the cores of its machine."""

    @contextmanager
    def working(self) -> Iterator[None]:
        """This worker needs its own cores within the block. Blocks may overlap."""
        ...

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        """How many cores of idle workers are this one's within the block, for one forward."""
        ...

    def close(self) -> None: ...


class OwnCores:
    """Nothing is lent: the other workers run on other machines, or threads were set by hand."""

    @contextmanager
    def working(self) -> Iterator[None]:
        yield

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        yield 0

    def close(self) -> None:
        return None


class SharedCores:
    """folder: common to the workers of one machine. name: of this worker, a file name. own: its cores."""

    def __init__(self, folder: Path, name: str, own: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._name = name
        self._blocks = 0
        self._work = _opened(folder / f"{name}.work")
        self._lent: dict[str, int] = {}  # name of another worker -> its lock file, open
        self._others: dict[str, int] = {}  # likewise -> its work file
        (folder / f"{name}.cores").write_text(str(own))

    @contextmanager
    def working(self) -> Iterator[None]:
        self._blocks += 1
        if self._blocks == 1:
            fcntl.flock(self._work, fcntl.LOCK_EX)  # a borrower looks at it for an instant only
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                fcntl.flock(self._work, fcntl.LOCK_UN)

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        taken: list[int] = []
        cores = 0
        try:
            for name, count in self._neighbours():
                lock = self._borrow(name)
                if lock is not None:
                    taken.append(lock)
                    cores += count
            yield cores
        finally:
            for lock in taken:
                fcntl.flock(lock, fcntl.LOCK_UN)

    def _neighbours(self) -> Iterator[tuple[str, int]]:
        for path in self._folder.glob("*.cores"):
            if path.stem != self._name:
                with suppress(OSError, ValueError):
                    yield path.stem, int(path.read_text())

    def _borrow(self, name: str) -> int | None:
        """The lock on another worker's cores, or None if it works, has died or has lent them already."""
        if name not in self._lent:
            self._lent[name] = _opened(self._folder / f"{name}.lent")
            self._others[name] = _opened(self._folder / f"{name}.work")
        lent, work = self._lent[name], self._others[name]
        if not _try(lent, fcntl.LOCK_EX):
            return None
        if _try(work, fcntl.LOCK_SH):
            fcntl.flock(work, fcntl.LOCK_UN)
            return lent
        fcntl.flock(lent, fcntl.LOCK_UN)
        return None

    def close(self) -> None:
        """Nobody borrows from a worker that is gone: what runs instead of it will need the cores."""
        (self._folder / f"{self._name}.cores").unlink(missing_ok=True)
        for file in (self._work, *self._lent.values(), *self._others.values()):
            os.close(file)
        self._lent, self._others = {}, {}


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
