"""Everything that travels through Redis except KV bytes: frozen dataclasses and their msgpack codec.

On the wire a message is a msgpack array `[version, kind, fields...]` in the order of the dataclass fields, nested
messages as plain arrays. Decoding checks version, kind, arity, types and size, and raises `BadMessage` for anything
else: values in Redis are not trusted. Fields are only ever appended, with a default, so that an older message
decodes; a newer *version* does not decode here, and the reader leaves it alone.

Knows nothing of Redis, keys or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from pdq.wire import Mismatch, check_of, plain

VERSION = 2  # rises with every change; appended fields included
OLDEST_VERSION = 1  # that still decodes
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a request is bounded by the gateway's body limit, an event by its tokens
LANES = ("high", "normal", "batch")
BYTES_PER_TOKEN = 4  # a guess, for the cost of a prompt that is still text


class BadMessage(ValueError):
    """A wire value that is not the message it should be. newer: its version is above ours."""

    def __init__(self, text: str, *, newer: bool = False) -> None:
        super().__init__(text)
        self.newer = newer


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. On the wire `seed` is always concrete.

    temperature 0 is argmax. top_k 0, top_p 1, min_p 0 switch the filter off. max_tokens None means "until the
    context is full". The token at position k of request seed s depends on (s, k), the logits and, with penalties, the
    tokens before it alone.

    repetition_penalty (1: none) divides positive and multiplies negative logits of tokens of prompt and completion;
    presence_penalty and frequency_penalty (0: none) are taken off those of the completion's tokens, once and per
    occurrence. logit_bias: (token id, what is added to its logit). allowed_token_ids: no others are chosen (None: all).
    stop_token_ids end the text like the model's own end-of-text token, which ignore_eos makes an ordinary one; before
    min_tokens tokens neither can be chosen and no stop string counts. logprobs: None for none, 0 for those of the
    chosen tokens, n for those of the n most likely tokens as well.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    @property
    def counts_tokens(self) -> bool:
        """Does the choice depend on the tokens before?"""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def edits_logits(self, position: int) -> bool:
        """Are the logits for the token at `position` changed before the filters see them?"""
        return (
            self.counts_tokens
            or position < self.min_tokens
            or self.allowed_token_ids is not None
            or len(self.logit_bias) > 0
        )


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked. Exactly one of `token_ids`, `prompt`, `messages` is set.

    timeout: seconds from submit to the last token. queue_timeout: seconds until a worker takes it, 0 for no limit.
    tenant: separates prefix caches: the salt of the hash chain, which names nobody (prefix.salt).
    cache: "off": the prompt's KV is neither looked for nor left for others.
    speculation: "ngram" or "off", how decode may guess ahead, which changes no token; None: as the worker is set.
    model: served model name; "" means the one the pool serves.
    """

    id: str
    sampling: SamplingParams
    token_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[Message, ...] | None = None
    model: str = ""
    lane: str = "normal"
    timeout: float = 600.0
    tenant: str = ""
    queue_timeout: float = 0.0
    cache: str = "on"
    speculation: str | None = None

    @property
    def cost(self) -> int:
        """Prompt tokens, counted or guessed."""
        if self.token_ids is not None:
            return len(self.token_ids)
        texts = [self.prompt or "", *(m.content for m in self.messages or ())]
        return sum(len(t.encode()) for t in texts) // BYTES_PER_TOKEN + 1


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds by Redis time: waiting for prefill, prefilling, waiting and loading for decode, decoding."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_ms: float = 0.0
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Handoff:
    """Private state that travels from prefill to decode, beside the shared blocks.

    prompt: token ids of the whole prompt. kv_length: tokens of prompt + emitted whose KV is stored, as full blocks
    and a tail of `kv_length % block_size` tokens: `tail` itself if that is small, else under `tail_key` ("" if there is
    none). Block keys are not listed: they follow from the tokens (see prefix.py), the fingerprint and the block size.
    """

    prompt: tuple[int, ...]
    kv_length: int
    fingerprint: bytes
    block_size: int
    tail_key: str = ""
    cached_tokens: int = 0
    timings: Timings = Timings()
    tail: bytes = b""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. cached_tokens: prompt tokens whose KV came from the cache when token 0 was computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error on the wire; `pdq.errors.from_wire` turns it back into an exception."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A token that could have been chosen. raw: its bytes, which may be a part of a character.

    logprob: natural logarithm of its probability by the model alone, before temperature, penalties and filters;
    at least -9999.
    """

    token_id: int
    logprob: float
    raw: bytes

    @property
    def text(self) -> str:
        """The bytes as text, U+FFFD for what is no character by itself."""
        return self.raw.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token, as in `TopLogprob`, and the most likely ones, which may include it, best first."""

    token_id: int
    logprob: float
    raw: bytes
    top: tuple[TopLogprob, ...] = ()

    @property
    def text(self) -> str:
        """As of `TopLogprob`."""
        return self.raw.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of a reply stream.

    index: position of the first of `token_ids` in the completion, from 0. text: valid UTF-8, stop strings already
    applied; may be empty while a character or a possible stop string is incomplete. finish_reason ("stop", "length",
    "cancelled", "error") is set on the terminal event only, `error` only with "error" and "cancelled". usage: with
    token 0, as of then, and with the last one. logprobs: one for each of `token_ids` if they were asked for, whether or
    not its text shows yet.
    """

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: ErrorInfo | None = None
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def terminal(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself in its heartbeat. numerics: its engine's numerics id; "" from an older pdq."""

    name: str
    stage: str
    model: str
    fingerprint: bytes
    max_model_len: int
    state: str = "ready"
    running: int = 0
    capacity: int = 0
    counters: tuple[tuple[str, int], ...] = ()
    numerics: str = ""


M = TypeVar("M", Request, Handoff, Event, WorkerInfo)
_KINDS: dict[type[Any], int] = {Request: 1, Handoff: 2, Event: 3, WorkerInfo: 4}


def encode(message: Request | Handoff | Event | WorkerInfo) -> bytes:
    """`message` as bytes. Raises BadMessage if it is over MAX_MESSAGE_BYTES or holds what msgpack cannot."""
    try:
        data: bytes = msgpack.packb((VERSION, _KINDS[type(message)], *plain(message)), use_bin_type=True, default=plain)
    except (ValueError, TypeError, OverflowError) as e:  # half a surrogate pair, an integer above 64 bits, ...
        raise BadMessage(f"{type(message).__name__}: {e}") from e
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{type(message).__name__} of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return data


def decode(cls: type[M], data: bytes) -> M:
    """The message in `data`. Raises BadMessage for anything that is not exactly a `cls` of a known version."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as e:
        raise BadMessage(f"not msgpack: {e}") from e
    if not isinstance(raw, list) or len(raw) < 2 or not all(type(x) is int for x in raw[:2]):
        raise BadMessage("not a pdq message")
    if not OLDEST_VERSION <= raw[0] <= VERSION:
        raise BadMessage(f"version {raw[0]}, expected {OLDEST_VERSION} to {VERSION}", newer=raw[0] > VERSION)
    if raw[1] != _KINDS[cls]:
        raise BadMessage(f"kind {raw[1]} is not {cls.__name__}")
    built: M = _typed(cls, raw[2:])
    return built


def _typed(cls: type[Any], values: list[Any]) -> Any:
    try:
        return check_of(cls)(values)
    except Mismatch as e:
        raise BadMessage(f"{'.'.join([cls.__name__, *e.path])}: {e}") from e
