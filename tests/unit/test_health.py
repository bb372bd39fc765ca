"""`pdq health`, which container health checks run: it fails whenever it cannot see the process alive."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdq.cli import main
from pdq.connection import bulk
from pdq.keys import Keys
from pdq.messages import WorkerInfo, encode
from pdq.serve import health
from tests.servers import Server, free_port


class Gateway(ThreadingHTTPServer):
    """Answers every GET with `status` and `body`."""

    daemon_threads = True
    status = 200
    body = b'{"status": "ok"}'


class Handler(BaseHTTPRequestHandler):
    server: Gateway

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    with Gateway(("127.0.0.1", 0), Handler) as server:
        monkeypatch.setenv("PDQ_PORT", str(server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch, server: Server) -> Server:
    monkeypatch.setenv("PDQ_REDIS_URL", server.url)
    return server


def beat(server: Server, name: str, pool: str = "default", state: str = "ready") -> None:
    keys = Keys(pool)
    info = WorkerInfo(name, name.partition("-")[0], "m", b"f", 8, state)
    with server.client() as client:
        client.set(keys.worker(name), encode(info), px=10_000)
        client.zadd(keys.workers, {name: 1})


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_gateway_that_answers_is_healthy(host: str, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDQ_HOST", host)
    assert main(["health", "gateway"]) == 0


def test_a_gateway_that_answers_with_an_error_is_not(gateway: Gateway) -> None:
    gateway.status = 500
    assert main(["health", "gateway"]) == 1


def test_no_gateway_is_not_healthy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    monkeypatch.setenv("PDQ_PORT", str(port))
    assert main(["health", "gateway"]) == 1
    assert capsys.readouterr().err == f"error: no gateway answers at http://127.0.0.1:{port}\n"


def test_a_gateway_that_accepts_and_says_nothing_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PDQ_PORT", str(silent.getsockname()[1]))
        assert main(["health", "gateway"]) == 1


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"\xff"])
def test_a_body_that_is_no_object_counts_as_empty(body: bytes, gateway: Gateway) -> None:
    gateway.body = body
    assert health.get("127.0.0.1", gateway.server_address[1], "/ready") == health.Answer(200, {})


def test_the_body_of_an_answer_is_read(gateway: Gateway) -> None:
    gateway.status, gateway.body = 503, json.dumps({"missing": ["decode"]}).encode()
    answer = health.get("127.0.0.1", gateway.server_address[1], "/ready")
    assert answer == health.Answer(503, {"missing": ["decode"]})


def test_a_worker_of_this_host_with_a_heartbeat_is_healthy(pool: Server) -> None:
    beat(pool, f"decode-{socket.gethostname()}-1-abc")
    assert main(["health", "decode"]) == 0


@pytest.mark.parametrize(
    "name",
    [f"prefill-{socket.gethostname()}-1-abc", "decode-other-host-1-abc", f"decode-{socket.gethostname()}2-1-abc"],
)
def test_the_heartbeat_of_another_worker_does_not_count(
    name: str, pool: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(pool, name)
    assert main(["health", "decode"]) == 1
    assert capsys.readouterr().err == "error: no heartbeat of a decode worker on this host\n"


def test_a_heartbeat_that_has_run_out_does_not_count(pool: Server) -> None:
    name = f"decode-{socket.gethostname()}-1-abc"
    beat(pool, name)
    with bulk(pool.url, 1) as client:
        client.delete(Keys("default").worker(name))
    assert main(["health", "decode"]) == 1


def test_a_worker_that_drains_is_healthy(pool: Server) -> None:
    beat(pool, f"decode-{socket.gethostname()}-1-abc", state="draining")
    assert main(["health", "decode"]) == 0


def test_a_worker_that_has_stalled_is_not_healthy(pool: Server, capsys: pytest.CaptureFixture[str]) -> None:
    name = f"decode-{socket.gethostname()}-1-abc"
    beat(pool, name, state="stalled")
    beat(pool, f"decode-{socket.gethostname()}-2-abc")
    beat(pool, "decode-other-host-1-abc")
    assert main(["health", "decode"]) == 1
    assert capsys.readouterr().err == f"error: {name} has stalled: its work does not move\n"


def test_the_stall_of_another_worker_does_not_count(pool: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(pool, "box-1")
    beat(pool, "box-2", state="stalled")
    monkeypatch.setenv("PDQ_NAME", "box-1")
    assert main(["health", "decode"]) == 0


def test_a_named_worker_is_found_by_its_name(pool: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(pool, "box-1")
    beat(pool, f"decode-{socket.gethostname()}-1-abc")
    monkeypatch.setenv("PDQ_NAME", "box-1")
    assert main(["health", "decode"]) == 0
    monkeypatch.setenv("PDQ_NAME", "box-2")
    assert main(["health", "decode"]) == 1


def test_the_heartbeat_of_another_pool_does_not_count(pool: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(pool, f"decode-{socket.gethostname()}-1-abc", pool="other")
    assert main(["health", "decode"]) == 1
    monkeypatch.setenv("PDQ_POOL", "other")
    assert main(["health", "decode"]) == 0


def test_a_worker_without_redis_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDQ_REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert main(["health", "prefill"]) == 1


def test_a_redis_that_accepts_and_says_nothing_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("PDQ_REDIS_URL", f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        assert main(["health", "decode"]) == 1
    assert capsys.readouterr().err == "error: Redis does not answer\n"
