"""Calls machine code on torch's own threads: two pools of threads would spin against each other for the cores."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache

_Native = Callable[[int], None]
_entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run(address: int, fields: Sequence[str], values: Mapping[str, int], threads: int) -> None:
    """Call the function at `address` on that many threads at once, without the GIL.

    fields: of its job, int64 each, the first of which begins at 0. On one thread, or where torch's OpenMP is not found,
    there is no parallel region.
    """
    job = (ctypes.c_int64 * len(fields))(0, *(values[name] for name in fields[1:]))
    team = _openmp()
    if threads == 1 or team is None:
        _callable(address)(ctypes.addressof(job))
    else:
        team(address, ctypes.addressof(job), threads, 0)


@cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """Runs a function on a number of threads of torch's pool: `GOMP_parallel`, which LLVM's OpenMP has as well.

    torch loads its OpenMP for the whole process. None where there is none under that name.
    """
    team = _symbol("GOMP_parallel")
    if team is None:
        return None
    team.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    team.restype = None
    found: Callable[[int, int, int, int], None] = team
    return found


@cache
def barrier() -> int:
    """Address of a function without arguments in which threads of a region wait for each other; 0: there is none."""
    found = _symbol("GOMP_barrier")
    return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0


@cache
def _callable(address: int) -> _Native:
    return _entry(address)


def _symbol(name: str) -> ctypes._NamedFuncPointer | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None
