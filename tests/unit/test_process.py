"""What a worker's process does before it loads torch; each case in a process of its own."""

import os
import subprocess
import sys

import pytest

from pdq import process, program
from pdq.config import DecodeSettings
from pdq.errors import ConfigError

SHOW = """
import os, resource
from pdq import process
process.prepare({threads})
names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
print(*map(os.environ.get, names))
def blocks():
    for _ in range(20):
        bytearray(4 << 20)
blocks()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
blocks()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def shown(threads: int | None, **variables: str) -> tuple[list[str], int]:
    """The variables of OpenMP, and the page faults of 20 blocks of 4 MB, one after the other."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_"))}
    command = [sys.executable, "-c", SHOW.format(threads=threads)]
    words, faults = subprocess.run(
        command, env=base | variables, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return words.split(), int(faults)


def test_threads_that_wait_sleep_and_are_as_many_as_told() -> None:
    assert shown(3, OMP_NUM_THREADS="64")[0] == ["PASSIVE", "1000", "0", "3", "3"]


def test_what_was_chosen_in_the_environment_stays() -> None:
    words, _ = shown(None, OMP_WAIT_POLICY="ACTIVE", OMP_NUM_THREADS="2")
    assert words == ["ACTIVE", "1000", "0", "2", "None"]


def test_a_worker_does_so_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setenv("PDQ_THREADS", "3")
    monkeypatch.setattr(process, "prepare", done.append)

    def load(settings: DecodeSettings) -> None:
        done.append("loading")
        raise ConfigError("enough")

    monkeypatch.setattr(program, "_load", load)
    with pytest.raises(SystemExit):
        program.run_program("decode", DecodeSettings, None)  # type: ignore[arg-type]
    assert done == [3, "loading"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's way to keep memory")
def test_the_memory_of_blocks_is_used_again_instead_of_being_mapped_anew() -> None:
    _, faults = shown(1)
    _, without = shown(1, MALLOC_MMAP_THRESHOLD_="1048576")
    assert faults < 100
    assert without > 20 * 256  # 4 MB are 1,024 small pages, or a few large ones and what is around them
