"""The options of `pdq bench`: read and checked before the first request is sent.

Built on config.py, so that they are worded and refused like all others; but they belong to one run of one command, so
only two of them can come from variables. Imports nothing heavy: the command line is made from this.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pdq.config import Settings, setting
from pdq.errors import ConfigError

CHAT, COMPLETIONS = "chat", "completions"
RANDOM, SHARED_PREFIX, MULTI_TURN, INTERFERENCE = "random", "shared-prefix", "multi-turn", "interference"
ON_TERMINAL = "-"
SLO_NAMES = ("ttft", "tpot", "e2e")
_DEFAULT_REQUESTS, _DEFAULT_CONCURRENCY = 100, 8
_ONLY_FOR = {
    "prefix_tokens": SHARED_PREFIX,
    "prefixes": SHARED_PREFIX,
    "turns": MULTI_TURN,
    "long_tokens": INTERFERENCE,
    "long_every": INTERFERENCE,
}
VARIABLES = {"url": "PDQ_URL", "api_key": "OPENAI_API_KEY"}
_MOST_TOKENS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ServerOptions(Settings):
    """Server."""

    url: str = setting("http://127.0.0.1:8000", "Where it listens, with or without /v1.")
    model: str = setting("", "Model name; default: the first the server lists.")
    api_key: str = setting("", "Sent as a bearer token; never saved.", secret=True)
    endpoint: str = setting(CHAT, "/v1/chat/completions or /v1/completions.", choices=(CHAT, COMPLETIONS))
    timeout: float = setting(600.0, "Seconds until a request is given up.", low=0.01, high=86400)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            parts = urlsplit(self.url)
            fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            fine = False
        if not fine:
            raise ConfigError(f"url: expected something like http://127.0.0.1:8000, got {self.url!r}")
        if not self.api_key.isascii() or not self.api_key.isprintable():
            raise ConfigError("api_key: printable ASCII is wanted")

    @property
    def base_url(self) -> str:
        """`url` without /v1 at its end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Settings):
    """Load."""

    concurrency: int | None = setting(
        None, "Closed loop: requests running at any time; default without --rate: 8.", low=1, high=10_000
    )
    rate: float | None = setting(
        None, "Open loop: requests/s, with Poisson arrivals, whatever the server does.", low=0.001, high=100_000
    )
    burst: float | None = setting(
        None, "Gamma shape of the gaps between arrivals: under 1 is burstier than Poisson.", low=0.01, high=1000
    )
    requests: int | None = setting(None, "Requests to send; default without --duration: 100.", low=1)
    duration: float | None = setting(
        None, "Seconds in which requests are started; those running then still count.", low=0.01, high=86400
    )
    warmup: int = setting(0, "Requests sent before, with other prompts; not counted.", low=0, high=100_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("rate: cannot be used together with --concurrency, which is the other kind of load")
        if self.burst is not None and self.rate is None:
            raise ConfigError("burst: needs --rate")

    @property
    def streams(self) -> int:
        """Requests running together in a closed loop."""
        return self.concurrency or _DEFAULT_CONCURRENCY

    @property
    def most_requests(self) -> int | None:
        """Where to stop; None: by time alone."""
        return self.requests or (None if self.duration else _DEFAULT_REQUESTS)


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(Settings):
    """Requests."""

    shape: str = setting(
        RANDOM,
        "What prompts have in common, and what else is sent.",
        choices=(RANDOM, SHARED_PREFIX, MULTI_TURN, INTERFERENCE),
    )
    input_tokens: int = setting(
        128, "Words of a prompt (of each turn; after the prefix), about a token each.", low=1, high=_MOST_TOKENS
    )
    output_tokens: int = setting(128, "max_tokens of a request.", low=1, high=_MOST_TOKENS)
    ignore_eos: bool = setting(True, "Ask for all of --output-tokens, if the server takes ignore_eos.")
    temperature: float = setting(0.0, "0 is always the likeliest token.", low=0, high=2)
    prefix_tokens: int = setting(512, "shared-prefix: words that a group shares.", low=1, high=_MOST_TOKENS)
    prefixes: int = setting(1, "shared-prefix: groups, each with a prefix of its own.", low=1, high=100_000)
    turns: int = setting(4, "multi-turn: questions of a conversation, each with all before it.", low=1, high=1000)
    long_tokens: int = setting(2048, "interference: words of a long prompt.", low=1, high=_MOST_TOKENS)
    long_every: float = setting(5.0, "interference: seconds between long prompts.", low=0.01, high=86400)
    seed: int | None = setting(None, "Makes prompts and arrivals repeatable; default: a new one, shown.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for f in fields(self):
            shape = _ONLY_FOR.get(f.name, self.shape)
            if shape != self.shape and getattr(self, f.name) != f.default:
                raise ConfigError(f"{f.name}: only for --shape {shape}")


@dataclass(frozen=True, kw_only=True)
class ResultOptions(Settings):
    """Results."""

    slo: str = setting("", "Limits in ms for goodput, e.g. ttft:500,tpot:50 (ttft, tpot, e2e).")
    json: bool = setting(False, "Print the summary as JSON.")
    save: str = setting("", "File for settings, summary and every request, as JSON.")
    plot: str = setting("", "File for a picture (needs matplotlib), or - for histograms on the terminal.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.slos
        if self.json and self.plot == ON_TERMINAL:
            raise ConfigError("plot: - cannot be used together with --json")
        for name, path in (("save", self.save), ("plot", self.plot if self.plot != ON_TERMINAL else "")):
            _check_file(name, path)

    @property
    def slos(self) -> dict[str, float]:
        """Limits in ms by name. Raises ConfigError."""
        found: dict[str, float] = {}
        for part in filter(None, self.slo.split(",")):
            name, _, text = part.strip().partition(":")
            limit = _number(text)
            if name not in SLO_NAMES or limit is None:
                raise ConfigError(f"slo: expected something like ttft:500,tpot:50,e2e:10000 (ms), got {part!r}")
            found[name] = limit
        return found


@dataclass(frozen=True, kw_only=True)
class BenchSettings(ResultOptions, ShapeOptions, LoadOptions, ServerOptions):  # fields: the last base's first
    """`pdq bench`."""

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        environ = os.environ if environ is None else environ
        values = {name: found for name, variable in VARIABLES.items() if (found := environ.get(variable))}
        return cls(**values | {k: v for k, v in overrides.items() if v is not None})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape == MULTI_TURN and self.endpoint != CHAT:
            raise ConfigError("endpoint: --shape multi-turn needs chat")

    def public(self) -> dict[str, Any]:
        """All options but the key, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "api_key"}


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _check_file(name: str, path: str) -> None:
    """A run of an hour must not end with a file that cannot be written."""
    if path and Path(path).is_dir():
        raise ConfigError(f"{name}: {path} is a folder")
    if path and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{name}: there is no folder {Path(path).absolute().parent}")
