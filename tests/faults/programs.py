"""pdq's programs as real processes, which a test may kill, freeze, drain or replace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from pdq.keys import Keys
from pdq.serve import health
from tests.servers import Server, free_port

MODULES = {"gateway": "pdq.gateway", "prefill": "pdq.workers.prefill", "decode": "pdq.workers.decode"}


class Program(subprocess.Popen[bytes]):
    """One process. kind: gateway, prefill or decode. name: of a worker, in heartbeats and as owner of a job."""

    def __init__(self, kind: str, name: str, env: dict[str, str], log: Path) -> None:
        self.kind = kind
        self.name = name
        self.log = log
        self.port = int(env.get("PDQ_PORT", "0"))
        with log.open("wb") as out:
            super().__init__([sys.executable, "-m", MODULES[kind]], env=env, stdout=out, stderr=out)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def freeze(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send_signal(signal.SIGCONT)

    def end(self, seconds: float = 20.0) -> int:
        """SIGTERM, and the exit code; killed if it does not end."""
        if self.poll() is None:
            self.thaw()
            self.terminate()
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait()
            raise


class Programs:
    """Starts programs with PDQ_* variables; the logs end up in the failure report."""

    def __init__(self, server: Server, **settings: object) -> None:
        self._server = server
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
        self._env |= _variables({"redis_url": server.url, "threads": 1, **settings})
        self._keys = Keys(str(settings.get("pool", "default")))
        self._logs = Path(tempfile.mkdtemp(prefix="pdq-logs-"))
        self._all: list[Program] = []

    def start(self, kind: str, **settings: object) -> Program:
        """A new process of this kind, with settings of its own on top. Does not wait for it."""
        name = f"{kind}-{len(self._all)}"
        settings |= {"port": free_port()} if kind == "gateway" else {"name": name}
        program = Program(kind, name, self._env | _variables(settings), self._logs / f"{name}.log")
        self._all.append(program)
        return program

    def wait(self, *programs: Program, seconds: float = 30.0) -> None:
        """Until gateways answer that they are alive, and workers have a heartbeat. Redis must be up."""
        deadline = time.monotonic() + seconds
        waiting = list(programs)
        while waiting := [p for p in waiting if not self.is_up(p)]:
            if dead := [p.name for p in waiting if p.poll() is not None]:
                raise RuntimeError(f"{dead} ended at the start\n{self.report()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{[p.name for p in waiting]} do not come up\n{self.report()}")
            time.sleep(0.01)

    def is_up(self, program: Program) -> bool:
        """Does it serve? Raises RedisError."""
        if program.kind == "gateway":
            answer = health.get("127.0.0.1", program.port, "/v1/models")
            return answer is not None and answer.status == 200
        with self._server.client() as client:
            return bool(client.exists(self._keys.worker(program.name)))

    def close(self) -> None:
        running = [p for p in self._all if p.poll() is None]
        for program in running:
            program.thaw()
            program.terminate()
        for program in running:
            try:
                program.wait(10)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()

    def report(self) -> str:
        """The ends of all logs."""
        logs = sorted(self._logs.iterdir(), key=lambda log: log.stat().st_mtime)[-8:]
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if error is not None:
            print(self.report())


def _variables(settings: dict[str, object]) -> dict[str, str]:
    return {f"PDQ_{k.upper()}": str(v) for k, v in settings.items()}
