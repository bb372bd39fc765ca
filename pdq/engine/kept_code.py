"""Machine code on disk, so that only the first process on a machine waits for the compiler.

A file is named by all that its code follows from, and begins with a hash of itself: what was written halfway or has
changed is compiled again. Only files and folders that nobody but this user can write are believed; where there is no
such folder nothing is kept. Once there are many, those used longest ago go.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from pdq.config import cache_folder

log = logging.getLogger(__name__)

_MOST_FILES = 800  # a model takes about ten
_MOST_BYTES = 16 << 20  # of a file; the largest are a hundredth of that
_DIGEST = hashlib.sha256().digest_size


def place(*follows_from: str) -> Path:
    """Where the code is kept that follows from these."""
    digest = hashlib.sha256("\0".join(follows_from).encode()).hexdigest()
    return cache_folder() / "code" / f"{digest}.o"


def read(path: Path) -> bytes | None:
    """None: it has to be compiled."""
    try:
        if not (_private(path.parent) and _private(path)):
            return None
        with path.open("rb") as file:
            whole = file.read(_MOST_BYTES)
    except OSError:
        return None
    digest, code = whole[:_DIGEST], whole[_DIGEST:]
    if hashlib.sha256(code).digest() != digest:
        return None
    with suppress(OSError):
        os.utime(path)  # the files used longest ago go first
    return code


def write(path: Path, code: bytes) -> None:
    """Not an error where nothing can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not _private(path.parent):
            return
        handle, name = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
        _tidy(path.parent)
    except OSError as e:
        log.info("compiled code cannot be kept: %s", e)


def _private(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _tidy(folder: Path) -> None:
    files = sorted(folder.glob("*.o"), key=lambda path: path.stat().st_mtime)
    for path in files[:-_MOST_FILES]:
        with suppress(OSError):
            path.unlink()
