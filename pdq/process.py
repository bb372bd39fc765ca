"""How the process of a worker waits for its cores and keeps its memory: the same, whoever has started it.

To be called before torch is loaded, which reads the variables. What is set in the environment already stays.
"""

from __future__ import annotations

import ctypes
import os

# OpenMP threads sleep when they wait instead of spinning for others' cores: two processes with 2 threads each on 2
# cores took 590-960 ms for what takes 10 ms this way. Before that they look around for some microseconds: a chunk of
# 512 tokens on 2 threads took 207 ms so, and 305-390 without.
_OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}

# glibc keeps freed memory of some MB instead of giving it back to the kernel, which would have to zero it page by page
# at the next use: blocks come in two to three times as fast. Its variable -> what `mallopt` calls it, and bytes.
_MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": (-1, 512 << 20),
    "MALLOC_TOP_PAD_": (-2, 16 << 20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}


def prepare(threads: int | None) -> None:
    """threads: of each parallel region in whichever thread does not say; None: OpenMP's own choice."""
    for name, value in _OPENMP.items():
        os.environ.setdefault(name, value)
    if threads is not None:
        os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries than glibc keep memory as they like
    for name, (parameter, size) in _MALLOC.items():
        if mallopt is not None and name not in os.environ:
            mallopt(parameter, size)
