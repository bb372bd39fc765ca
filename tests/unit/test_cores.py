"""Cores lent between processes: to whom, when not, and back when somebody dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdq.cores import OwnCores, SharedCores
from pdq.program import Parts


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SharedCores, SharedCores]]:
    prefill, decode = SharedCores(tmp_path, "prefill-1", 3), SharedCores(tmp_path, "decode-1", 5)
    yield prefill, decode
    prefill.close()
    decode.close()


def test_an_idle_workers_cores_are_lent_for_one_forward(pair: tuple[SharedCores, SharedCores]) -> None:
    prefill, decode = pair
    with prefill.working(), prefill.borrowed() as more:
        assert more == 5
    with decode.working(), decode.borrowed() as more:
        assert more == 3


def test_a_worker_at_work_lends_nothing(pair: tuple[SharedCores, SharedCores]) -> None:
    prefill, decode = pair
    with prefill.working():
        with decode.working(), decode.working(), prefill.borrowed() as more:
            assert more == 0
        with prefill.borrowed() as more:
            assert more == 5


def test_cores_are_lent_to_one_worker_at_a_time(pair: tuple[SharedCores, SharedCores], tmp_path: Path) -> None:
    prefill, _ = pair
    other = SharedCores(tmp_path, "prefill-2", 2)
    with prefill.working(), other.working(), prefill.borrowed() as mine, other.borrowed() as its:
        assert (mine, its) == (5, 0)
    with other.working(), other.borrowed() as its:
        assert its == 8
    other.close()


def test_an_owner_does_not_wait_for_what_it_has_lent(pair: tuple[SharedCores, SharedCores]) -> None:
    prefill, decode = pair
    with prefill.working():
        with prefill.borrowed() as more:
            assert more == 5
            with decode.working():
                pass  # it has begun its work meanwhile
            entered = decode.working()
            entered.__enter__()
        with prefill.borrowed() as more:
            assert more == 0
        entered.__exit__(None, None, None)


def test_a_worker_that_has_closed_lends_nothing(tmp_path: Path) -> None:
    prefill, decode = SharedCores(tmp_path, "prefill-1", 3), SharedCores(tmp_path, "decode-1", 5)
    decode.close()
    with prefill.working(), prefill.borrowed() as more:
        assert more == 0
    prefill.close()


HOLD = """
import sys, time
from pathlib import Path
from pdq.cores import SharedCores
cores = SharedCores(Path(sys.argv[1]), "decode-1", 5)
with cores.working(), cores.borrowed() as more:
    print(more, flush=True)
    time.sleep(60)
"""


def test_the_death_of_a_process_gives_back_what_it_held(tmp_path: Path) -> None:
    prefill = SharedCores(tmp_path, "prefill-1", 3)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"3\n"
        third = SharedCores(tmp_path, "prefill-2", 1)
        with third.working(), third.borrowed() as more:
            assert more == 0  # one works, one is lent
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with third.working(), third.borrowed() as more:
            assert more == 8
    third.close()
    prefill.close()


def test_a_borrow_costs_little(pair: tuple[SharedCores, SharedCores]) -> None:
    prefill, _ = pair
    best = float("inf")
    with prefill.working():
        for _ in range(20):
            began = time.perf_counter()
            with prefill.borrowed():
                pass
            best = min(best, time.perf_counter() - began)
    assert best < 0.001


def test_without_a_folder_nothing_is_lent() -> None:
    own = OwnCores()
    with own.working(), own.borrowed() as more:
        assert more == 0
    own.close()


class Lending(OwnCores):
    """Three cores of neighbours, whoever asks."""

    @contextmanager
    def borrowed(self) -> Iterator[int]:
        yield 3


CASES = [(1, 1, 0, 3), (7, 8, 1, 0), (8, 8, 1, 2), (8, 8, 4, 0)]


@pytest.mark.parametrize(("count", "borrowing", "leaving", "more"), CASES)
def test_a_forward_borrows_from_a_number_of_segments_on_and_leaves_some(
    count: int, borrowing: int, leaving: int, more: int
) -> None:
    engine = SimpleNamespace(more_threads=9)
    engine.forward = lambda segments: [engine.more_threads] * len(segments)
    parts = Parts(engine, *[None] * 5, Lending())  # type: ignore[arg-type]
    assert parts.forward([object()] * count, borrowing, leaving) == [more] * count  # type: ignore[list-item]
