"""`pdq serve` as a user runs it, with a scripted engine: banner, restarts, drain, kill, and what survives."""

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.servers import Server, free_port

SLOW = "scripted:text=0123456789,step_ms=20"


class Serve:
    """One `pdq serve` in a session of its own, its output, and its children as found by their parent."""

    def __init__(self, cache: Path, *options: str, engine: str = "scripted:text=0123456789", port: int = 0) -> None:
        self.port = port or free_port()
        self.lines: list[str] = []
        self._deaf = False
        words = [sys.executable, "-m", "pdq", "serve", "--engine", engine, "--port", str(self.port), *options]
        # As a script's background job, which shells start with Ctrl-C ignored.
        words = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words]
        env = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
        self.process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=env | {"PDQ_CACHE": str(cache)},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))  # one by one: others look while the process runs
                if self._deaf:
                    return

    def __enter__(self) -> "Serve":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()

    def end(self, seconds: float = 20.0) -> int:
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def deafen(self) -> None:
        """Stop reading its output, from the next line on."""
        self._deaf = True

    def read(self, pattern: str, seconds: float = 30.0) -> str:
        """The first line that matches, now or later."""
        found = None

        def look() -> bool:
            nonlocal found
            found = next((line for line in self.lines if re.search(pattern, line)), None)
            return found is not None

        assert until(look, seconds), self.lines
        assert found is not None
        return found

    def row(self, name: str) -> str:
        return self.read(rf"^  {name} ").strip().partition(" ")[2].strip()

    def ready(self) -> "Serve":
        self.row("try")
        return self

    def children(self) -> dict[str, int]:
        """Process ids by a word that tells what they are."""
        found: dict[str, int] = {}
        for pid in children_of(self.process.pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # one may end meanwhile
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                for word in ("valkey", "gateway", "prefill", "decode"):
                    if word in line and "tied.py" not in line:
                        blocks = word == "valkey" and Path(f"/proc/{pid}/cwd").readlink().name == "kv"
                        found["valkey-kv" if blocks else word] = pid
        return found

    def post(self, body: dict[str, Any] | None = None, **values: Any) -> tuple[int, Any]:
        return post(self.port, body or chat(**values))

    def log(self, cache: Path, pool: str = "default") -> str:
        return (cache / "valkey" / f"{pool}-{self.port}" / "valkey.log").read_text()


def chat(text: str = "hi", max_tokens: int = 8) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "scripted", "messages": messages, "max_tokens": max_tokens, "temperature": 0}


def post(port: int, body: dict[str, Any]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


class Stream:
    """A streamed chat answer whose first text has arrived."""

    def __init__(self, port: int, **values: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps(chat(**values) | {"stream": True})
        self._connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        assert self._response.status == 200
        self._text = ""
        while not self._text:
            self._text += self._next() or ""

    def rest(self) -> str:
        """The whole text, up to [DONE]; http.client.HTTPException if the stream breaks off."""
        with closing(self._connection), closing(self._response):
            while (text := self._next()) is not None:
                self._text += text
        return self._text

    def _next(self) -> str | None:
        line = self._response.readline()
        if not line:
            raise http.client.IncompleteRead(b"")
        if line.startswith(b"data: [DONE]"):
            return None
        choices = json.loads(line[6:])["choices"] if line.startswith(b"data: ") else []
        return "".join(c["delta"].get("content") or "" for c in choices)


def status(port: int, path: str, key: str) -> int:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(rest[1]) == pid and rest[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def until(done: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def gone(pids: list[int]) -> bool:
    return until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def content(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 200, body
    text: str = body["choices"][0]["message"]["content"]
    return text


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def serve(cache: Path) -> Iterator[Serve]:
    """One for all tests that leave it running."""
    with Serve(cache, "--decode", "2", "--pool", "shared") as running:
        yield running.ready()


def test_the_banner_tells_all_and_its_curl_line_works(serve: Serve) -> None:
    base = f"http://127.0.0.1:{serve.port}"
    assert serve.row("URL") == f"{base}/v1"
    assert (serve.row("model"), serve.row("context")) == ("scripted", "8192 tokens")
    assert re.fullmatch(r"redis://127\.0\.0\.1:\d+/0", serve.row("Redis"))
    assert serve.row("workers").startswith("1 prefill x ")
    assert ", 2 decode x 1 thread" in serve.row("workers")
    words = shlex.split(serve.row("try"))
    assert words[:5] == ["curl", f"{base}/v1/chat/completions", "-H", "Content-Type: application/json", "-d"]
    body = json.loads(words[6 - 1])
    assert content(serve.post(body)) == ("0123456789" * 7)[: body["max_tokens"]]


def test_nothing_that_is_printed_has_colours(serve: Serve) -> None:
    assert not any("\x1b" in line for line in serve.lines)


def test_what_is_still_loading_is_told(serve: Serve) -> None:
    assert serve.read("^pdq +waiting for ")


@pytest.mark.parametrize("who", ["decode", "prefill", "gateway", "valkey", "valkey-kv"])
def test_a_child_that_is_killed_comes_back_and_requests_are_answered(who: str, serve: Serve) -> None:
    pid = serve.children()[who]
    os.kill(pid, signal.SIGKILL)
    serve.read(rf"^{who}(-\d)? +was killed by SIGKILL \(out of memory\?\); starting again in 0\.5 s$")
    assert until(lambda: serve.children().get(who, pid) != pid)
    assert until(lambda: answered(serve, text=who), 20)


def test_a_second_server_on_another_port_runs_beside_it(serve: Serve, cache: Path) -> None:
    with Serve(cache, "--pool", "shared").ready() as other:
        assert other.row("Redis") != serve.row("Redis")
        assert content(other.post()) == content(serve.post()) == "01234567"


def test_a_port_in_use_is_one_line_before_anything_is_started(serve: Serve, tmp_path: Path) -> None:
    with Serve(tmp_path / "cache", port=serve.port) as second:
        assert second.end() == 2
    assert second.lines == [f"error: port: {serve.port} on 127.0.0.1 is in use; choose another with --port"]
    assert not (tmp_path / "cache").exists()


def test_with_a_keys_file_it_gets_ready_asks_for_keys_and_shows_none(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("acme sk-first\n")
    with Serve(tmp_path / "cache", "--api-keys-file", str(file)).ready() as serve:
        assert "$OPENAI_API_KEY" in serve.row("try")
        assert serve.post()[0] == 401
        assert [status(serve.port, "/v1/models", key) for key in ("sk-first", "sk-second")] == [200, 401]
        file.write_text("acme sk-second\n")
        assert until(lambda: status(serve.port, "/v1/models", "sk-second") == 200)
        assert status(serve.port, "/v1/models", "sk-first") == 401
        pids = [serve.process.pid, *serve.children().values()]
        assert not [pid for pid in pids if b"sk-" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        serve.process.send_signal(signal.SIGTERM)
        assert serve.end() == 0
        assert not [line for line in serve.lines if "sk-" in line]


def test_the_first_ctrl_c_drains_and_loses_nothing(tmp_path: Path) -> None:
    with Serve(tmp_path, engine=SLOW).ready() as serve:
        pids = list(serve.children().values())
        assert len(pids) == 5
        answer = Stream(serve.port, max_tokens=60)
        os.killpg(serve.process.pid, signal.SIGINT)  # as a terminal does, to the whole foreground group
        serve.read("finishing what runs")
        assert until(lambda: not connects(serve.port))
        assert answer.rest() == "0123456789" * 6
        assert serve.end() == 0
        assert gone(pids)
        assert "ready to exit, bye bye" in serve.log(tmp_path)
        assert not any("starting again" in line or "Traceback" in line for line in serve.lines)


def test_the_second_signal_kills_at_once(tmp_path: Path) -> None:
    with Serve(tmp_path, engine=SLOW).ready() as serve:
        pids = list(serve.children().values())
        answer = Stream(serve.port, max_tokens=2000)
        serve.process.send_signal(signal.SIGTERM)
        serve.read("finishing what runs")
        began = time.monotonic()
        serve.process.send_signal(signal.SIGINT)
        assert serve.end() == 130
        assert time.monotonic() - began < 5.0
        assert gone(pids)
        with pytest.raises((OSError, http.client.HTTPException)):
            answer.rest()


def test_children_of_a_killed_server_die_and_the_next_one_finds_its_cache(tmp_path: Path) -> None:
    prompt = "a long common prefix " * 20
    with Serve(tmp_path, "--block-size", "16").ready() as serve:
        pids = list(serve.children().values())
        assert serve.post(text=prompt)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        serve.process.kill()
        serve.end()
        assert gone(pids)
    with Serve(tmp_path, "--block-size", "16", port=serve.port).ready() as again:
        with redis.Redis.from_url(again.row("Redis")) as client:  # heartbeats that the killed ones left do not count
            assert client.zcard("{pdq:default}:workers") == 2
        assert again.post(text=prompt)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400
        again.process.send_signal(signal.SIGTERM)
        assert again.end() == 0


def test_nobody_reading_its_output_stops_nothing(tmp_path: Path) -> None:
    with Serve(tmp_path).ready() as serve:
        serve.deafen()
        pid = serve.children()["decode"]
        os.kill(pid, signal.SIGKILL)
        assert until(lambda: serve.children().get("decode", pid) != pid)
        assert until(lambda: answered(serve, "hi"))
        serve.process.send_signal(signal.SIGTERM)
        assert serve.end() == 0


def test_a_given_redis_is_used_and_left_alone(tmp_path: Path, server: Server) -> None:
    with Serve(tmp_path, "--redis-url", server.url, "--pool", "mine").ready() as serve:
        assert serve.row("Redis") == server.url
        assert sorted(serve.children()) == ["decode", "gateway", "prefill"]
        assert content(serve.post()) == "01234567"
        with server.client() as client:
            assert client.zcard("{pdq:mine}:workers") == 2
        serve.process.send_signal(signal.SIGTERM)
        assert serve.end() == 0
    with server.client() as client:
        assert client.ping()
        assert client.zcard("{pdq:mine}:workers") == 0


@pytest.mark.parametrize(
    ("options", "engine", "line"),
    [
        (["--kv-memory", "1KiB"], "scripted", r"error: kv_memory: 1KiB is less than one context of 8192 tokens, .*"),
        ([], "scripted:nonsense=1", r"error: engine: bad part 'nonsense=1' of a scripted engine"),
        (["/nowhere/model.gguf"], "torch", r"error: model: there is no file /nowhere/model.gguf"),
    ],
)
def test_a_child_that_refuses_its_settings_ends_the_start_with_its_words(
    options: list[str], engine: str, line: str, tmp_path: Path
) -> None:
    with Serve(tmp_path, *options, engine=engine) as serve:
        assert serve.end() == 2
    assert re.fullmatch(line, serve.lines[-1])
    assert not any("starting again" in line for line in serve.lines)
    assert children_of(serve.process.pid) == []


def answered(serve: Serve, text: str) -> bool:
    try:
        return serve.post(text=text)[0] == 200
    except OSError:
        return False


def connects(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
