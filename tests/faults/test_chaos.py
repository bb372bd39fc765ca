"""Everything goes wrong at once (chaos.py): no request is lost, repeated, wrong or hung."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SUMMARY = r"accepted (\d+)  ended once (\d+)  lost (\d+)  repeated (\d+)  wrong (\d+)  hung (\d+)"


def run(seconds: float, *options: str) -> tuple[int, str]:
    """Exit code and output of a chaos run, whose processes end with it."""
    words = [sys.executable, "-m", "tests.faults.chaos", "--minutes", str(seconds / 60), *options]
    with tempfile.TemporaryFile("w+") as output:  # not a pipe: a process that is left over would hold it open
        process = subprocess.Popen(
            words, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            code = process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return code, output.read()


def check(code: int, output: str, least: int) -> None:
    print(output)
    found = re.search(SUMMARY, output)
    assert found is not None
    accepted, ended, *bad = map(int, found.groups())
    assert bad == [0, 0, 0, 0]
    assert accepted == ended >= least
    assert code == 0


def test_a_few_seconds_of_chaos() -> None:
    check(*run(8, "--seed", "11"), least=20)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["scripted", "torch"])
def test_a_minute_of_chaos(engine: str) -> None:
    check(*run(60, "--seed", "12", "--engine", engine), least=60)
