"""`pdq chat` against a small server that records what it is asked and answers what the test says."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdq.cli import main
from tests.servers import free_port

DONE = b"data: [DONE]\n\n"


def delta(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}\n\n'


class FakeServer(ThreadingHTTPServer):
    """Answers /v1/models, and each chat completion with the next of `answers`: an HTTP status and the body's parts."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, list[bytes]]] = []
        self.asked: list[dict[str, object]] = []
        self.keys: list[str | None] = []
        self.models: object = {"data": [{"id": "tiny"}]}
        self.hold = threading.Event()  # an empty part waits for it, or for the client to go away
        self.left = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def says(self, *parts: bytes, status: int = 200) -> None:
        self.answers.append((status, list(parts)))

    def turns(self) -> list[list[tuple[str, str]]]:
        return [[(m["role"], m["content"]) for m in body["messages"]] for body in self.asked]  # type: ignore[attr-defined]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        pass

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.server.keys.append(self.headers["Authorization"])
        body = json.dumps(self.server.models).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        self.server.keys.append(self.headers["Authorization"])
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, parts = self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        for part in parts:
            if not part:
                self._wait()
                continue
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if parts[-1:] != [b""]:
            self.wfile.write(b"0\r\n\r\n")

    def _wait(self) -> None:
        while not self.server.hold.is_set():
            readable, _, _ = select.select([self.connection], [], [], 0.01)
            if readable and not self.connection.recv(1):
                self.server.left.set()
                return


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.hold.set()
        server.shutdown()
        thread.join()


def pipe(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))


def type_in(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    """Stdin is a terminal where somebody types `lines`, then Ctrl-D; an exception class is a key such as Ctrl-C."""
    rest = iter([*lines, EOFError])

    def type_line(prompt: str) -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", type_line)


def test_what_comes_through_a_pipe_is_answered_once(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.says(b": ping\n\n", delta("Hel"), delta("lo"), b'data: {"choices": [{"delta": {}}]}\n\n', USAGE, DONE)
    pipe(monkeypatch, b"  Say hello.\n")
    assert main(["chat", "--url", fake.url]) == 0
    assert capsys.readouterr() == ("Hello\n", "")
    assert fake.asked == [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Say hello."}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_options_reach_the_server(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.says(DONE)
    pipe(monkeypatch, b"hi")
    options = ["--model", "m", "--system", "S", "--temperature", "0", "--max-tokens", "7", "--seed", "3"]
    assert main(["chat", "--url", f"{fake.url}/v1/", *options]) == 0
    [body] = fake.asked
    assert {k: body[k] for k in ("model", "temperature", "max_tokens", "seed")} == {
        "model": "m", "temperature": 0.0, "max_tokens": 7, "seed": 3,
    }  # fmt: skip
    assert fake.turns() == [[("system", "S"), ("user", "hi")]]


def test_the_url_may_be_a_variable(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.says(DONE)
    pipe(monkeypatch, b"hi")
    monkeypatch.setenv("PDQ_URL", fake.url)
    assert main(["chat"]) == 0


@pytest.mark.parametrize(
    ("words", "variable", "sent"),
    [
        ([], None, None),
        (["--api-key", "sk-1"], None, "Bearer sk-1"),
        ([], "sk-2", "Bearer sk-2"),
        (["--api-key", "sk-1"], "sk-2", "Bearer sk-1"),
    ],
)
def test_the_api_key_is_sent_with_every_request(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, words: list[str], variable: str | None, sent: str | None
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("OPENAI_API_KEY", variable)
    fake.says(DONE)
    pipe(monkeypatch, b"hi")
    assert main(["chat", "--url", fake.url, *words]) == 0
    assert fake.keys == [sent, sent]


def test_an_api_key_that_cannot_be_sent_is_not_shown(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\n")
    assert main(["chat", "--url", fake.url]) == 2
    assert capsys.readouterr().err == "error: api_key: printable ASCII without blanks is wanted\n"


def test_statistics_are_told_on_request(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.says(delta("a"), delta("b"), USAGE, DONE)
    pipe(monkeypatch, b"hi")
    assert main(["chat", "--url", fake.url, "--stats"]) == 0
    assert re.fullmatch(r"TTFT \d+ ms, \d+\.\d tokens/s, 3 tokens\n", capsys.readouterr().err)


def test_the_conversation_is_kept_until_it_is_reset(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("A1", "A2", "A3", "A4"):
        fake.says(delta(text), DONE)
    type_in(monkeypatch, "Q1", "", "Q2", "/reset", "Q3", "/system Be brief.", "Q4", "/exit", "Q5")
    assert main(["chat", "--url", fake.url]) == 0
    assert fake.turns() == [
        [("user", "Q1")],
        [("user", "Q1"), ("assistant", "A1"), ("user", "Q2")],
        [("user", "Q3")],
        [("system", "Be brief."), ("user", "Q4")],
    ]


def test_an_unknown_command_shows_the_commands(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    type_in(monkeypatch, "/rest")
    assert main(["chat", "--url", fake.url]) == 0
    assert "/reset " in capsys.readouterr().out
    assert fake.asked == []


def test_a_refused_turn_is_told_and_forgotten(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.says(b'{"error": {"message": "Too long.", "type": "t", "param": null, "code": null}}', status=400)
    fake.says(delta("A2"), DONE)
    type_in(monkeypatch, "Q1", "Q2")
    assert main(["chat", "--url", fake.url]) == 0
    assert capsys.readouterr().err == f"error: 400 from {fake.url}: Too long.\n"
    assert fake.turns()[1] == [("user", "Q2")]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([delta("He"), b'data: {"error": {"message": "The worker died."}}\n\n'], "error: The worker died.\n"),
        ([delta("He")], "error: the answer broke off\n"),
        ([delta("He"), b"data: {oops\n\n"], "error: the answer broke off: "),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(
    parts: list[bytes],
    message: str,
    fake: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake.says(*parts)
    pipe(monkeypatch, b"hi")
    assert main(["chat", "--url", fake.url]) == 1
    out, err = capsys.readouterr()
    assert out == "He\n"
    assert err.startswith(message)


def test_nobody_listening_at_the_usual_place_is_a_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr("pdq.cli.chat.DEFAULT_URL", url)
    pipe(monkeypatch, b"hi")
    assert main(["chat", "--url", url]) == 1
    assert capsys.readouterr().err == f"error: no server answers at {url}; start one with: pdq serve\n"


def test_nobody_listening_elsewhere_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, b"hi")
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["chat", "--url", url]) == 1
    assert re.fullmatch(rf"error: no server answers at {url} \(.*refused.*\)\n", capsys.readouterr().err)


@pytest.mark.parametrize("models", [{"data": []}, {}, {"data": [{}]}, []])
def test_a_server_without_a_model_is_one_line(
    models: object, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.models = models
    pipe(monkeypatch, b"hi")
    assert main(["chat", "--url", fake.url]) == 1
    assert capsys.readouterr().err == f"error: {fake.url} lists no model yet\n"


def test_an_empty_pipe_is_a_mistake(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe(monkeypatch, b" \n")
    assert main(["chat", "--url", fake.url]) == 2
    assert capsys.readouterr().err == "error: nothing came through the pipe\n"


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://h", "http://", "http://h:x", "http://[::1"])
def test_a_wrong_url_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == 2
    assert capsys.readouterr().err == f"error: url: expected something like http://127.0.0.1:8000, got {url!r}\n"


def test_bytes_that_are_no_text_do_not_break_it(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.says(DONE)
    pipe(monkeypatch, b"a\xffb")
    assert main(["chat", "--url", fake.url]) == 0
    assert fake.turns() == [[("user", "a\ufffdb")]]


def test_ctrl_c_stops_a_piped_answer_and_the_request_with_it(fake: FakeServer) -> None:
    fake.says(delta("Once"), b"")
    words = [sys.executable, "-m", "pdq", "chat", "--url", fake.url]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"hi")
        chat.stdin.close()
        assert chat.stdout.read(4) == b"Once"
        chat.send_signal(signal.SIGINT)
        assert chat.wait(10) == 130
    assert fake.left.wait(5)


class Terminal:
    """`pdq chat` on a pseudo-terminal of its own."""

    # A session leader without a terminal gets the first one it opens as its controlling one: Ctrl-C is then a signal.
    _START = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"

    def __init__(self, url: str) -> None:
        self.fd, side = pty.openpty()
        words = [sys.executable, "-c", self._START, sys.executable, "-m", "pdq", "chat", "--url", url]
        env = os.environ | {"TERM": "dumb"}
        self.process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, start_new_session=True, env=env)
        os.close(side)
        self.shown = b""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    def shows(self, text: bytes, seconds: float = 15.0) -> bool:
        """Does `text` appear, after what was last typed, within this time?"""
        deadline = time.monotonic() + seconds
        while text not in self.shown:
            if not select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self.shown += os.read(self.fd, 4096)
        return True

    def type(self, text: bytes) -> None:
        self.shown = b""
        os.write(self.fd, text)

    def press_ctrl_c(self) -> None:
        """Up to the next prompt. Pressed again if need be: a signal just ahead of a wait for input is seen late."""
        for _ in range(15):
            self.type(b"\x03")
            if self.shows(b"> ", 1.0):
                return
        raise AssertionError(self.shown)


def test_on_a_terminal_ctrl_c_stops_the_answer_and_keeps_what_was_said(fake: FakeServer) -> None:
    fake.says(delta("Once\x1b[2J\x07 upon"), b"")
    fake.says(delta("Fine."), DONE)
    with Terminal(fake.url) as terminal:
        assert terminal.shows(b"> ")
        terminal.type(b"Tell.\n")
        assert terminal.shows(b"upon")
        assert b"Once[2J upon" in terminal.shown  # no control characters reach the terminal
        terminal.press_ctrl_c()
        assert fake.left.wait(5)
        terminal.press_ctrl_c()  # at the prompt it ends nothing
        terminal.type(b"And?\n")
        assert terminal.shows(b"Fine.\r\n> ")
        terminal.type(b"\x04")
        assert terminal.process.wait(10) == 0
    assert fake.turns()[1] == [("user", "Tell."), ("assistant", "Once\x1b[2J\x07 upon"), ("user", "And?")]
