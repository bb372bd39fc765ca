"""`pdq chat`: talk to a server over HTTP from a terminal, or answer what comes through a pipe.

The conversation is kept here and sent whole with every turn; the server finds what it has seen before in its prefix
cache. Speaks the OpenAI HTTP API with the standard library alone, so any such server will do.
"""

from __future__ import annotations

import http.client
import io
import json
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pdq.api_keys import is_key
from pdq.errors import ConfigError, InvalidRequest, PdqError, RequestFailed, Unavailable

DEFAULT_URL = "http://127.0.0.1:8000"
_SILENCE_SECONDS = 600.0
_CONTROL = {c: None for c in (*range(32), 127, *range(128, 160)) if chr(c) not in "\n\t"}
_HELP = """\
/reset          forget the conversation
/system TEXT    set the system message and start over
/exit           end (also Ctrl-D); Ctrl-C stops an answer
"""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; None and "" leave a choice to the server."""

    url: str = DEFAULT_URL
    model: str = ""
    api_key: str = field(default="", repr=False)
    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stats: bool = False


@dataclass(slots=True)
class Timing:
    """Clock readings of one answer, in seconds; tokens as the server counts them."""

    sent: float = field(default_factory=time.monotonic)
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    def text(self) -> str:
        if not self.first:
            return "no tokens"
        rate = (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 and self.last > self.first else 0.0
        return f"TTFT {(self.first - self.sent) * 1e3:.0f} ms, {rate:.1f} tokens/s, {self.tokens} tokens"


class Server:
    """One OpenAI-style server. Raises Unavailable when it cannot be reached, else what it answers as an error."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._url = _parse(options.url)
        if options.api_key and not is_key(options.api_key):
            raise ConfigError("api_key: printable ASCII without blanks is wanted")
        self.model = options.model or self._first_model()

    def answer(self, messages: list[dict[str, str]], timing: Timing) -> Generator[str]:
        """Text of the answer, piece by piece. Closing the iterator closes the connection, which cancels the request."""
        o = self._options
        wanted = {"temperature": o.temperature, "max_tokens": o.max_tokens, "seed": o.seed}
        body = {k: v for k, v in wanted.items() if v is not None} | {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        with closing(self._connect()) as connection:
            for event in _events(self._ask(connection, "POST", "/v1/chat/completions", body)):
                if "error" in event:
                    raise RequestFailed(_message(event))
                if usage := event.get("usage"):
                    timing.tokens = usage.get("completion_tokens", 0)
                for choice in event.get("choices") or []:
                    if text := (choice.get("delta") or {}).get("content"):
                        timing.last = time.monotonic()
                        timing.first = timing.first or timing.last
                        yield text

    def _first_model(self) -> str:
        with closing(self._connect()) as connection:
            try:
                return str(json.loads(self._ask(connection, "GET", "/v1/models").read())["data"][0]["id"])
            except (ValueError, LookupError, TypeError) as e:
                raise Unavailable(f"{self._options.url} lists no model yet") from e

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port, timeout=_SILENCE_SECONDS)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"} if body else {}
        if self._options.api_key:
            headers["Authorization"] = f"Bearer {self._options.api_key}"
        try:
            connection.request(method, self._url.path + path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            if response.status == http.HTTPStatus.OK:
                return response
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as e:
            hint = "; start one with: pdq serve" if self._options.url == DEFAULT_URL else f" ({e})"
            raise Unavailable(f"no server answers at {self._options.url}{hint}") from e
        kind = InvalidRequest if response.status < http.HTTPStatus.INTERNAL_SERVER_ERROR else Unavailable
        raise kind(f"{response.status} from {self._options.url}: {_message(text)}")


class Conversation:
    """The turns so far and the server that answers them."""

    def __init__(self, server: Server, system: str = "") -> None:
        self.server = server
        self.start(system)

    def start(self, system: str) -> None:
        """Forget all turns."""
        self.system = system
        self._turns: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    def say(self, text: str, timing: Timing) -> bool:
        """Print the answer as it comes; False if Ctrl-C cut it short. A turn without any answer is forgotten."""
        turn = {"role": "user", "content": text}
        pieces: list[str] = []
        complete = False
        try:
            with closing(self.server.answer([*self._turns, turn], timing)) as answer:
                for piece in answer:
                    pieces.append(piece)
                    _show(piece)
            complete = True
        except KeyboardInterrupt:
            pass
        finally:
            _show("\n")
            if pieces:
                self._turns += [turn, {"role": "assistant", "content": "".join(pieces)}]
        return complete


def run(options: Options) -> int:
    """The whole command; its exit code. Raises PdqError."""
    conversation = Conversation(Server(options), options.system)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # neither odd input nor an odd answer is worth a traceback
    return _talk(conversation, options) if sys.stdin.isatty() else _answer_once(conversation, options)


def _answer_once(conversation: Conversation, options: Options) -> int:
    text = sys.stdin.read().strip()
    if not text:
        raise ConfigError("nothing came through the pipe")
    timing = Timing()
    complete = conversation.say(text, timing)
    _statistics(options, timing)
    return 0 if complete else 130


def _talk(conversation: Conversation, options: Options) -> int:
    with suppress(ImportError):
        import readline  # noqa: F401  importing it gives input() line editing and history
    _show(f"Talking to {conversation.server.model}. /reset, /system TEXT, /exit.\n")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            _show("\n")
            return 0
        except KeyboardInterrupt:
            _show("\n(Ctrl-D or /exit ends)\n")
            continue
        word, _, rest = text.partition(" ")
        if word == "/exit":
            return 0
        if word.startswith("/"):
            _command(conversation, word, rest)
        elif text:
            _turn(conversation, options, text)


def _turn(conversation: Conversation, options: Options, text: str) -> None:
    timing = Timing()
    try:
        conversation.say(text, timing)
    except PdqError as e:
        _note(f"error: {e.message}")
    else:
        _statistics(options, timing)


def _command(conversation: Conversation, word: str, rest: str) -> None:
    if word == "/reset":
        conversation.start(conversation.system)
    elif word == "/system":
        conversation.start(rest.strip())
    else:
        _show(_HELP)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON events of a server-sent stream. Raises Unavailable if it breaks off."""
    try:
        for line in response:
            name, _, data = line.strip().partition(b":")
            if name == b"data" and data.strip() == b"[DONE]":
                return
            if name == b"data":
                yield json.loads(data)
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise Unavailable(f"the answer broke off: {e}") from e
    raise Unavailable("the answer broke off")


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    except ValueError:
        pass
    raise ConfigError(f"url: expected something like {DEFAULT_URL}, got {url!r}")


def _message(error: str | dict[str, Any]) -> str:
    """The sentence in an error body, whatever its shape."""
    found: Any = error
    if isinstance(error, str):
        with suppress(ValueError):
            found = json.loads(error)
    for key in ("error", "message"):
        if isinstance(found, dict):
            found = found.get(key, found)
    return " ".join(str(found).split())[:500]


def _show(text: str) -> None:
    """To stdout; a terminal gets no control characters, which a model could use to change what the screen shows."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")


def _statistics(options: Options, timing: Timing) -> None:
    if options.stats:
        _note(timing.text())
