"""The answer to one request, put together from the bytes of its event stream. No network, no clock.

Believes nothing: whatever a server sends becomes either part of an answer or a Fault with the kind of error.
"""

from __future__ import annotations

from typing import Any

import orjson

from pdq.errors import PdqError

_LONGEST_LINE = 16 * 2**20
_LONGEST_DETAIL = 300
_FAILED = ("error", "abort")


class Fault(PdqError):
    """A request failed. `kind`: one word for counting, `refused`: an optional field that the server does not take."""

    def __init__(self, kind: str, message: str = "", *, refused: str = "") -> None:
        super().__init__(" ".join(message.split())[:_LONGEST_DETAIL])
        self.kind = kind
        self.refused = refused


class Lines:
    """Cuts bytes into the data of events. A `data:` line is an event: OpenAI's are never longer than one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Raises Fault if a line has no end."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise Fault("bad_event", f"an event of more than {_LONGEST_LINE} bytes")
        return [found for line in lines if (found := _data(line))]

    def close(self) -> list[bytes]:
        """What came without a newline at the end."""
        return self.feed(b"\n") if self._rest else []


class Answer:
    """What has come so far: when text came, and the text. `take` events in their order, then `check`."""

    def __init__(self) -> None:
        self.chunks: list[float] = []
        self.texts: list[str] = []
        self.finish_reason = ""
        self.ended: float | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None

    def take(self, data: bytes, now: float) -> None:
        """One event, which arrived at `now`. Raises Fault for an error event and for what is no event."""
        if data == b"[DONE]":
            self.ended = now
            return
        event = _parsed(data)
        if event.get("error") or event.get("object") == "error":
            raise Fault("error_event", error_text(event))
        self._take_usage(event.get("usage"))
        for choice in _list(event.get("choices")):
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
            text, thought = _texts(choice)
            if text or thought:
                self.chunks.append(now)
                self.texts.append(text)

    def check(self) -> None:
        """The stream is over. Raises Fault if the answer is not whole."""
        if not self.done:
            raise Fault("no_done", "the stream ended without [DONE]")
        if not self.finish_reason:
            raise Fault("no_finish_reason", "the stream ended without a finish_reason")
        if self.finish_reason in _FAILED:
            raise Fault(f"finish_{self.finish_reason}", f"finish_reason is {self.finish_reason}")
        if not self.chunks:
            raise Fault("no_content", "the stream ended without any text")

    def _take_usage(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        self.cached_tokens = _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def error_text(body: object) -> str:
    """The sentence in an error body, whatever its shape."""
    found = body
    for key in ("error", "message", "detail"):
        if isinstance(found, dict):
            found = found.get(key) or found
    return str(found)


def _data(line: bytes) -> bytes:
    name, _, value = line.partition(b":")
    return value.strip() if name == b"data" else b""


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError as e:
        raise Fault("bad_event", f"an event is no JSON: {data[:100]!r}") from e
    if not isinstance(event, dict):
        raise Fault("bad_event", f"an event is no object: {data[:100]!r}")
    return event


def _list(choices: object) -> list[dict[str, Any]]:
    return [c for c in choices if isinstance(c, dict)] if isinstance(choices, list) else []


def _texts(choice: dict[str, Any]) -> tuple[str, str]:
    """Text of a choice of a chat or completion, and of its thinking: tokens too, but no part of a conversation."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return _string(choice.get("text")), ""
    return _string(delta.get("content")), _string(delta.get("reasoning_content") or delta.get("reasoning"))


def _string(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
