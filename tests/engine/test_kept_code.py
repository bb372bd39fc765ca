"""Compiled code on disk: used by the next process, and never believed when it may be somebody else's or damaged."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pdq.engine import code, kept_code
from pdq.engine.code import Code
from pdq.engine.llvm import Function


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDQ_CACHE", str(tmp_path))
    return tmp_path / "code"


def function(number: int = 7) -> Function:
    f = Function("store")
    f.store("i64", str(number), "%job")
    return f


def result(number: int = 7) -> int:
    """What the function leaves in memory."""

    memory = (ctypes.c_int64 * 1)(0)
    compiled = Code([function(number)])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address("store"))(ctypes.addressof(memory))
    return memory[0]


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One for each time that something was compiled."""
    seen: list[object] = []
    real = code._optimize
    monkeypatch.setattr(code, "_optimize", lambda module, machine: seen.append(module) or real(module, machine))
    return seen


def test_the_same_code_is_compiled_once(folder: Path, optimized: list[object]) -> None:
    assert [result(), result(), result(8), result(8)] == [7, 7, 8, 8]
    assert len(optimized) == 2
    assert len(list(folder.iterdir())) == 2
    assert folder.stat().st_mode & 0o777 == 0o700


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda b: b[:-1],
    "other hash": lambda b: b"x" + b[1:],
    "other code": lambda b: b[:40] + b"x" + b[41:],
    "empty": lambda b: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again(folder: Path, optimized: list[object], damage: str) -> None:
    result()
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert result() == 7
    assert len(optimized) == 2
    assert path.read_bytes()[:32] == whole[:32]


@pytest.mark.parametrize("which", ["folder", "file"])
def test_what_others_can_write_is_not_believed(folder: Path, optimized: list[object], which: str) -> None:
    result()
    (path,) = folder.iterdir()
    (folder if which == "folder" else path).chmod(0o777)
    assert result() == 7
    assert len(optimized) == 2


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() == 0, reason="root may write anywhere")
def test_where_nothing_can_be_written_nothing_is_kept(folder: Path) -> None:
    folder.parent.chmod(0o500)
    assert result() == 7


def test_a_file_in_the_place_of_the_folder_is_no_error(folder: Path) -> None:
    folder.write_text("")
    assert result() == 7


def test_old_files_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_code, "_MOST_FILES", 3)
    for i in range(6):
        path = kept_code.place(str(i))
        kept_code.write(path, b"code")
        os.utime(path, (i, i))
    assert len(list(folder.iterdir())) == 3
    assert kept_code.read(kept_code.place("5")) == b"code"
    assert kept_code.read(kept_code.place("0")) is None


def test_code_that_is_in_use_stays_whenever_it_was_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_code, "_MOST_FILES", 3)
    first = kept_code.place("first")
    kept_code.write(first, b"code")
    os.utime(first, (0, 0))
    assert kept_code.read(first) == b"code"
    for i in range(1, 6):
        path = kept_code.place(str(i))
        kept_code.write(path, b"other")
        os.utime(path, (i, i))
    assert kept_code.read(first) == b"code"
