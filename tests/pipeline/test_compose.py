"""The services of compose.yaml as processes of this machine: their very commands and environments, decode twice."""

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import binary, free_port

ROOT = Path(__file__).parents[2]
SCALE = {"valkey": 1, "gateway": 1, "prefill": 1, "decode": 2}


class Services:
    """Starts services with host names and ports replaced by those of this machine."""

    def __init__(self) -> None:
        self.compose: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
        self.redis_port, self.port = free_port(), free_port()
        self.running: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="pdq-compose-"))

    def environment(self, service: str) -> dict[str, str]:
        shell = {"PDQ_ENGINE": "scripted:text=0123456789", "PDQ_KV_MEMORY": "64MiB"}
        given = self.compose[service].get("environment", {})
        named = {k: shell.get(k) if v is None else v for k, v in given.items()}
        found = {k: v.replace("//valkey:6379", f"//127.0.0.1:{self.redis_port}") for k, v in named.items() if v}
        if "PDQ_PORT" in found:
            found["PDQ_PORT"] = str(self.port)
        system = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
        return system | found | {"PYTHONUNBUFFERED": "1"}

    def command(self, service: str) -> list[str]:
        program, *words = self.compose[service]["command"]
        if program == "valkey-server":
            words = [word.replace("${VALKEY_MEMORY:-4gb}", "64mb") for word in words]
            return [str(binary("valkey9")), *words, "--port", str(self.redis_port), "--bind", "127.0.0.1"]
        return [self.program(program), *words]

    def program(self, name: str) -> str:
        return str(Path(sys.executable).with_name(name))

    def up(self, service: str) -> None:
        for _ in range(SCALE[service]):
            with (self.folder / f"{service}.log").open("ab") as log:
                process = subprocess.Popen(
                    self.command(service), env=self.environment(service), cwd=self.folder, stdout=log, stderr=log
                )
            self.running.setdefault(service, []).append(process)

    def healthy(self, service: str) -> bool:
        """The service's own health check."""
        kind, *words = self.compose[service]["healthcheck"]["test"]
        assert kind == "CMD"
        words[0] = self.program(words[0])
        done = subprocess.run(words, env=self.environment(service), capture_output=True, timeout=20, check=False)
        return done.returncode == 0

    def down(self) -> None:
        for process in (p for some in self.running.values() for p in some):
            if process.poll() is None:
                process.kill()
            process.wait()
        shutil.rmtree(self.folder)

    def get(self, path: str) -> tuple[int, Any]:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return self._ask("POST", path, json.dumps(body))

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except OSError:
            return 0, {}
        finally:
            connection.close()


def until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    running = Services()
    try:
        for service in ("valkey", "gateway", "prefill", "decode"):
            running.up(service)
        until(
            lambda: (
                running.get("/ready") == (200, {"status": "ready", "prefill": 1, "decode": 2, "numerics": ["scripted"]})
            )
        )
        yield running
    finally:
        running.down()


def test_the_services_answer_a_chat_together(services: Services) -> None:
    messages = [{"role": "user", "content": "hi"}]
    status, body = services.post("/v1/chat/completions", {"messages": messages, "max_tokens": 12})
    assert status == 200, body
    assert body["choices"][0]["message"]["content"] == "012345678901"


@pytest.mark.parametrize("service", ["gateway", "prefill", "decode"])
def test_health_checks_pass_while_a_service_lives(service: str, services: Services) -> None:
    assert services.healthy(service)


@pytest.mark.parametrize("service", ["decode", "prefill", "gateway"])
def test_stopping_a_service_is_clean_and_its_health_check_fails(service: str, services: Services) -> None:
    for process in services.running[service]:
        process.terminate()
    assert [process.wait(20) for process in services.running[service]] == [0] * SCALE[service]
    assert not services.healthy(service)


def test_health_checks_of_workers_fail_without_valkey(services: Services) -> None:
    services.running["valkey"][0].kill()
    services.running["valkey"][0].wait()
    assert not services.healthy("prefill")
