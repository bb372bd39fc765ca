"""Worker programs as real processes, which a test may kill or freeze."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers import Server


class Programs:
    """Starts `python -m pdq.workers.<stage>` with PDQ_* variables; the logs end up in the failure report."""

    def __init__(self, server: Server, **settings: object) -> None:
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
        values = {"redis_url": server.url, "threads": 1, **settings}
        self._env |= {f"PDQ_{k.upper()}": str(v) for k, v in values.items()}
        self._logs = Path(tempfile.mkdtemp(prefix="pdq-logs-"))
        self._all: list[subprocess.Popen[bytes]] = []

    def start(self, stage: str) -> subprocess.Popen[bytes]:
        log = (self._logs / f"{stage}-{len(self._all)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", f"pdq.workers.{stage}"], env=self._env, stdout=log, stderr=log
            )
        self._all.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._all:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self._all:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if error is not None:
            for log in sorted(self._logs.iterdir()):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
