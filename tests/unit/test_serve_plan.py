"""What `pdq serve` decides before it starts anything: threads, settings of each child, the words of the banner."""

import shlex
import socket
from pathlib import Path

import pytest

from pdq.config import DecodeSettings, GatewaySettings, PrefillSettings, ServeSettings
from pdq.errors import ConfigError
from pdq.serve import machine
from pdq.serve.embedded import Embedded
from pdq.serve.health import reachable, url
from pdq.serve.run import Pool, banner, gateway_program, worker_programs, worker_threads
from pdq.serve.screen import Screen

MODEL = {"id": "it's/tiny", "max_model_len": 2048}


def settings(**values: object) -> ServeSettings:
    return ServeSettings.load({}, **{"redis_url": "redis://h:1/0", "engine": "scripted", **values})


@pytest.mark.parametrize(
    ("cores", "prefill", "decode", "threads"),
    [
        (2, 1, 1, [1, 1]),
        (8, 1, 1, [4, 4]),
        (7, 1, 1, [4, 3]),
        (7, 2, 1, [3, 2, 2]),
        (4, 2, 2, [1, 1, 1, 1]),
        (16, 1, 2, [6, 5, 5]),
        (1, 1, 1, [1, 1]),
        (2, 2, 2, [1, 1, 1, 1]),
    ],
)
def test_workers_share_the_cores(cores: int, prefill: int, decode: int, threads: list[int]) -> None:
    assert worker_threads(settings(prefill=prefill, decode=decode), cores) == threads


def test_the_sum_of_threads_never_exceeds_the_cores_while_there_is_a_core_for_each_worker() -> None:
    for cores in range(1, 40):
        for workers in range(1, cores + 1):
            threads = machine.divide(cores, workers)
            assert sum(threads) == cores
            assert max(threads) - min(threads) <= 1


def test_given_threads_are_each_workers() -> None:
    assert worker_threads(settings(threads=3, prefill=1, decode=2), cores=2) == [3, 3, 3]


def test_workers_get_their_settings_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDQ_MAX_BATCH", "3")
    programs = worker_programs(settings(prefill=2, decode=1, max_batch=5, chunk_tokens=64), cores=8)
    assert [p.name for p in programs] == ["prefill-1", "prefill-2", "decode-1"]
    assert [p.argv[-1] for p in programs] == ["pdq.workers.prefill", "pdq.workers.prefill", "pdq.workers.decode"]
    assert [p.env["PDQ_THREADS"] for p in programs] == ["3", "3", "2"]
    prefill, decode = PrefillSettings.load(programs[0].env), DecodeSettings.load(programs[2].env)
    assert (prefill.chunk_tokens, prefill.redis_url, prefill.engine) == (64, "redis://h:1/0", "scripted")
    assert (decode.max_batch, decode.name) == (5, None)


def test_a_given_name_stays_unique_among_the_workers() -> None:
    programs = worker_programs(settings(name="box", prefill=2, decode=1), cores=2)
    assert [p.env["PDQ_NAME"] for p in programs] == ["box-prefill-1", "box-prefill-2", "box-decode-1"]


def test_the_gateway_gets_its_settings() -> None:
    program = gateway_program(settings(port=8001, host="::1", max_queued=7))
    own = GatewaySettings.load(program.env)
    assert (own.port, own.host, own.max_queued, own.redis_url) == (8001, "::1", 7, "redis://h:1/0")
    assert program.argv[-1] == "pdq.gateway"


def test_the_banner_tells_where_what_and_how_to_try() -> None:
    rows = dict(banner(settings(prefill=2), MODEL, cores=4))
    assert rows["URL"] == "http://127.0.0.1:8000/v1"
    assert (rows["model"], rows["context"], rows["Redis"]) == ("it's/tiny", "2048 tokens", "redis://h:1/0")
    assert rows["workers"] == "2 prefill x 1-2 threads, 1 decode x 1 thread"
    assert shlex.split(rows["try"]) == [
        "curl", "http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json", "-d",
        '{"model": "it\'s/tiny", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}',
    ]  # fmt: skip


@pytest.mark.parametrize("locked", [{"api_key": "sk-secret"}, {"api_keys_file": "keys"}])
def test_the_banner_s_command_takes_the_api_key_from_a_variable(locked: dict[str, object]) -> None:
    rows = dict(banner(settings(**locked), MODEL, cores=4))
    assert ' -H "Authorization: Bearer $OPENAI_API_KEY" -d ' in rows["try"]
    assert "sk-secret" not in str(rows)


def test_the_api_key_goes_to_the_gateway_alone() -> None:
    every = settings(api_key="sk-secret", api_keys_file="keys")
    assert gateway_program(every).env["PDQ_API_KEY"] == "sk-secret"
    programs = [gateway_program(every), *worker_programs(every, cores=2)]
    assert not [p.name for p in programs if "sk-secret" in " ".join(p.argv)]
    assert not [p.name for p in programs[1:] if {"PDQ_API_KEY", "PDQ_API_KEYS_FILE"} & p.env.keys()]


def test_the_banner_says_when_there_are_more_workers_than_cores() -> None:
    text = dict(banner(settings(decode=3), MODEL, cores=2))["workers"]
    assert text == "1 prefill x 1 thread, 3 decode x 1 thread (more than the 2 cores: expect them to slow each other)"


class FakeSupervisor:
    """Records what is stopped; `slow` children have to be killed."""

    def __init__(self, slow: str = "") -> None:
        self.slow = slow
        self.stopped: list[tuple[str, float]] = []

    def start(self, program: object) -> None: ...

    async def stop(self, name: str, seconds: float) -> bool:
        self.stopped.append((name, seconds))
        return name != self.slow


@pytest.mark.parametrize(("slow", "clean"), [("", True), ("decode-1", False), ("gateway", False), ("valkey", False)])
async def test_all_is_taken_down_in_the_order_that_loses_nothing(slow: str, clean: bool) -> None:
    supervisor = FakeSupervisor(slow)
    valkeys = [Embedded(Path(), 0, 1, 1), Embedded(Path(), 0, 1, 1, "valkey-kv")]
    pool = Pool(settings(prefill=1, decode=2), valkeys, supervisor, Screen())  # type: ignore[arg-type]
    pool.start_programs()
    assert await pool.down(seconds=10.0) is clean
    names = [name for name, _ in supervisor.stopped]
    assert names == ["gateway", "prefill-1", "decode-1", "decode-2", "valkey", "valkey-kv"]
    assert all(seconds > 10.0 for _, seconds in supervisor.stopped)  # more than the children's own drain


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box.example", "http://box.example:80"),
    ],
)
def test_the_url_is_one_that_this_machine_reaches(host: str, address: str) -> None:
    assert url(host, 80) == address
    assert reachable(host) in address


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            machine.check_port("127.0.0.1", port)
        assert caught.value.message == f"port: {port} on 127.0.0.1 is in use; choose another with --port"
    machine.check_port("127.0.0.1", port)


def test_a_port_whose_last_connections_linger_is_free() -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listening.accept()[0].close()  # closed first: this side goes to TIME_WAIT
    machine.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_told_as_such(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^host: {host} is not an address of this machine"):
        machine.check_port(host, 8000)


def test_a_container_s_limits_count_as_the_machine(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert (machine.cores(tmp_path), machine.memory(tmp_path)) == (1, 1048576)
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert machine.cores(tmp_path) == 1


def test_without_limits_the_machine_is_ours(tmp_path: Path) -> None:
    free = (machine.cores(tmp_path), machine.memory(tmp_path))
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert (machine.cores(tmp_path), machine.memory(tmp_path)) == free
    assert free[0] >= 1
    assert free[1] > 2**28
