"""Makes a `Request` from what a caller passed: every mistake is an InvalidRequest that names the field.

The SDK, the gateway and (again, cheaply) the workers rest on the same checks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from pdq.errors import InvalidRequest
from pdq.messages import LANES, Message, Request, SamplingParams
from pdq.prefix import salt
from pdq.wire import plain

MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_ID_CHARS = 128
MAX_SALT_CHARS = 1024
CACHE = ("on", "off")
SPECULATION = ("ngram", "off")
MAX_SEED = 2**63 - 1
MAX_TOKEN_ID = 2**31 - 1
MAX_LISTED = 1024  # entries of logit_bias, allowed_token_ids and stop_token_ids: each costs time in every step
MAX_BIAS = 100.0
MAX_LOGPROBS = 20

# name: (lowest, highest, is the lowest itself allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "top_k": (0, 2**31 - 1, True),
    "seed": (-(2**63), MAX_SEED, True),
    "max_tokens": (1, 2**31 - 1, True),
    "repetition_penalty": (0.0, 10.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "min_tokens": (0, 2**31 - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
}
_DEFAULTS = {f.name: f.default for f in fields(SamplingParams)}
_INTEGERS = {"top_k", "seed", "max_tokens", "min_tokens", "logprobs"}


def make_request(
    *,
    id: str,  # noqa: A002
    prompt: str | None,
    messages: Sequence[Message | Mapping[str, Any]] | None,
    token_ids: Sequence[int] | None,
    model: str,
    lane: str,
    timeout: float,
    queue_timeout: float,
    tenant: str,
    cache: str,
    cache_salt: str,
    speculation: str | None,
    sampling: Mapping[str, Any],
) -> Request:
    """A checked request. Raises InvalidRequest."""
    for name, value in (("id", id), ("model", model), ("tenant", tenant), ("cache_salt", cache_salt)):
        _text(name, value)
    if len(cache_salt) > MAX_SALT_CHARS:
        raise _wrong("cache_salt", f"at most {MAX_SALT_CHARS} characters are allowed")
    if cache not in CACHE:
        raise _wrong("cache", f"one of {', '.join(CACHE)} is wanted, got {cache!r}")
    if speculation is not None and speculation not in SPECULATION:
        raise _wrong("speculation", f"one of {', '.join(SPECULATION)} is wanted, got {speculation!r}")
    if not 0 < len(id) <= MAX_ID_CHARS or not id.isascii() or not id.isprintable() or set(id) & set("{} "):
        raise _wrong("id", f"1 to {MAX_ID_CHARS} printable ASCII characters other than space and braces are allowed")
    if lane not in LANES:
        raise _wrong("lane", f"one of {', '.join(LANES)} is wanted, got {lane!r}")
    for name, seconds, low in (("timeout", timeout, 0.001), ("queue_timeout", queue_timeout, 0)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not low <= seconds <= 86400 * 7:
            raise _wrong(name, f"seconds of at least {low} and at most a week are allowed, got {seconds!r}")
    if sum(x is not None for x in (prompt, messages, token_ids)) != 1:
        raise _wrong("prompt", "exactly one of prompt, messages and token_ids is wanted")
    if prompt is not None:
        _text("prompt", prompt)
        if not prompt:
            raise _wrong("prompt", "must not be empty")
    return Request(
        id=id, sampling=make_sampling(_seeded(sampling, id)), prompt=prompt, messages=_messages(messages),
        token_ids=_token_ids(token_ids), model=model, lane=lane, timeout=float(timeout),
        tenant=salt(tenant, cache_salt), queue_timeout=float(queue_timeout), cache=cache, speculation=speculation,
    )  # fmt: skip


def _seeded(sampling: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    """With a seed, if none is given: as good as drawn, and the same if the request has to run again."""
    if sampling.get("seed") is not None:
        return sampling
    digest = hashlib.sha256(request_id.encode()).digest()
    return {**sampling, "seed": int.from_bytes(digest[:8], "big") >> 1}


def make_sampling(given: Mapping[str, Any]) -> SamplingParams:
    """Checked parameters. Raises InvalidRequest."""
    return SamplingParams(**_checked(given))


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(given.keys() - _DEFAULTS.keys()):
        raise _wrong(unknown[0], "unknown option")
    values = {k: v for k, v in given.items() if v is not None}
    for name in _RANGES.keys() & values.keys():
        values[name] = _number(name, values[name])
    if not isinstance(values.get("ignore_eos", False), bool):
        raise _wrong("ignore_eos", "true or false is wanted")
    values["stop"] = _stops(values.get("stop", ()))
    values["logit_bias"] = _biases(values.get("logit_bias", ()))
    for name in {"allowed_token_ids", "stop_token_ids"} & values.keys():
        values[name] = _listed(name, values[name])
    if values.get("min_tokens", 0) > values.get("max_tokens", MAX_TOKEN_ID):
        raise _wrong("min_tokens", f"must be at most max_tokens, {values['max_tokens']}, got {values['min_tokens']}")
    return values


def check_sampling(params: SamplingParams, vocab_size: int, eos_ids: Collection[int]) -> None:
    """For workers: everything again, since Redis takes requests from anybody, and against the model. InvalidRequest."""
    _checked({name: v for (name, usual), v in zip(_DEFAULTS.items(), plain(params), strict=True) if v != usual})
    listed = {
        "logit_bias": [token for token, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "stop_token_ids": params.stop_token_ids,
    }
    for name, ids in listed.items():
        if ids and max(ids) >= vocab_size:
            raise _wrong(name, f"token ids must be below {vocab_size}, got {max(ids)}")
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    if params.min_tokens and params.allowed_token_ids is not None and ends.issuperset(params.allowed_token_ids):
        raise _wrong("allowed_token_ids", "holds nothing but ends of the text, which min_tokens does not allow yet")


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """From a mapping with token ids as keys, which in JSON are strings, or from pairs, as it is on the wire."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise _wrong("logit_bias", "a mapping of token ids to numbers is wanted")
    if len(pairs) > MAX_LISTED:
        raise _wrong("logit_bias", f"at most {MAX_LISTED} entries are allowed, got {len(pairs)}")
    found: dict[int, float] = {}
    for key, bias in pairs:
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID or token in found:
            raise _wrong("logit_bias", f"keys are token ids of at least 0, each once, got {_shown(key)}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _wrong("logit_bias", f"biases from -100 to 100 are allowed, got {_shown(bias)} for token {token}")
        found[token] = float(bias)
    return tuple(sorted(found.items()))


def _listed(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > MAX_LISTED:
        raise _wrong(name, f"a list of at most {MAX_LISTED} token ids is wanted")
    if not all(type(t) is int and 0 <= t <= MAX_TOKEN_ID for t in value):
        raise _wrong(name, "token ids are integers of at least 0")
    if not value and name == "allowed_token_ids":
        raise _wrong(name, "must not be empty: some token has to be allowed")
    return tuple(sorted(set(value)))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 50 else text[:50] + "…"


def _number(name: str, value: Any) -> float:
    low, high, closed = _RANGES[name]
    wanted = int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, wanted) or not math.isfinite(value):
        raise _wrong(name, f"{'an integer' if name in _INTEGERS else 'a number'} is wanted, got {value!r}")
    if value > high or value < low or (value == low and not closed):
        raise _wrong(name, f"must be {'at least' if closed else 'above'} {low} and at most {high}, got {value!r}")
    return value if name in _INTEGERS else float(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, list | tuple) or len(stops) > MAX_STOPS:
        raise _wrong("stop", f"a string or at most {MAX_STOPS} strings are wanted")
    for s in stops:
        _text("stop", s)
        if not 0 < len(s) <= MAX_STOP_CHARS:
            raise _wrong("stop", f"1 to {MAX_STOP_CHARS} characters are allowed in a stop string")
    return tuple(stops)


def _messages(value: Sequence[Message | Mapping[str, Any]] | None) -> tuple[Message, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise _wrong("messages", "a list of at least one message is wanted")
    return tuple(_message(f"messages.{i}", m) for i, m in enumerate(value))


def _message(where: str, value: Any) -> Message:
    if isinstance(value, Message):
        value = {"role": value.role, "content": value.content, "name": value.name}
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object with role and content is wanted")
    if unknown := sorted(map(str, set(value) - {"role", "content", "name"})):
        raise _wrong(f"{where}.{unknown[0]}", "unknown field")
    for name in ("role", "content"):
        _text(f"{where}.{name}", value.get(name))
    if not value["role"]:
        raise _wrong(f"{where}.role", "must not be empty")
    if value.get("name") is not None:
        _text(f"{where}.name", value["name"])
    return Message(value["role"], value["content"], value.get("name"))


def _token_ids(value: Sequence[int] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        raise _wrong("token_ids", "a list of at least one token id is wanted")
    if not all(type(t) is int and 0 <= t < 2**31 for t in value):
        raise _wrong("token_ids", "token ids are integers of at least 0")
    return tuple(value)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise _wrong(name, f"a string is wanted, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise _wrong(name, "holds half of a surrogate pair, which is no text") from e


def _wrong(name: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {text}", param=name)
