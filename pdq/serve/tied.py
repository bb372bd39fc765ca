"""Become another program that the kernel ends when the parent process dies.

    python tied.py PARENT_PID SIGNAL PROGRAM ARGUMENT...

`pdq serve` starts every child through this file: a supervisor that is killed cannot stop its children itself. The tie
is made here, after the fork, because code run between fork and exec of a threaded process can deadlock. It holds while
the *thread* that forked lives; the supervisor forks from its main thread only. Linux only: elsewhere the program is
started as it is.

Imports the standard library alone, since it runs before every child.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, signal: int, argv: list[str]) -> None:
    """Never returns: this process becomes `argv`, or ends because `parent` is already gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0)
        if os.getppid() != parent:  # it died before the tie was made, so no signal will come
            sys.exit(1)
    os.execv(argv[0], argv)  # noqa: S606  the point of this file


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
