"""Every setting of pdq in one place: keyword = `PDQ_*` variable = command-line option, checked once.

A settings class is a frozen dataclass whose fields carry their help text; the command line is built from them
(cli.py), `load()` fills one from the environment and keyword overrides. Precedence: keyword or option, variable,
default. An unknown `PDQ_*` variable is an error: a typing mistake must not become a default.

Imports nothing heavy.
"""

from __future__ import annotations

import difflib
import math
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from pdq.api_keys import is_key
from pdq.errors import ConfigError

T = TypeVar("T")
S = TypeVar("S", bound="Settings")
ENV_PREFIX = "PDQ_"


def setting(
    default: T,
    text: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
) -> T:
    """A dataclass field with its help text and its limits (both inclusive). secret: never shown with the others."""
    meta = {"help": text, "low": low, "high": high, "choices": choices}
    found: T = field(default=default, metadata=meta, repr=not secret)
    return found


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base: typed fields, checked on construction."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for f in fields(self):
            object.__setattr__(self, f.name, _checked(f.name, hints[f.name], getattr(self, f.name), f.metadata))

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """From `environ` (default: the process's), `overrides` on top (None: not given). Raises ConfigError."""
        environ = os.environ if environ is None else environ
        _refuse_unknown(environ)
        names = {f.name for f in fields(cls)}
        if wrong := sorted(set(overrides) - names):
            raise ConfigError(f"unknown setting {wrong[0]}")
        values: dict[str, Any] = {n: environ[env_name(n)] for n in names if environ.get(env_name(n), "") != ""}
        values |= {k: v for k, v in overrides.items() if v is not None}
        return cls(**values)

    def environ(self) -> dict[str, str]:
        """These settings as variables; those at their default are left out."""
        return {
            env_name(f.name): str(v)
            for f in fields(self)
            if (v := getattr(self, f.name)) is not None and v != f.default
        }

    def environ_of_child(self, environ: Mapping[str, str] | None = None) -> dict[str, str]:
        """The whole environment of a program that is to run with exactly these settings.

        The settings in `environ` (default: the process's) are dropped first: an option given back to its default
        must not be overruled by a variable that the child inherits.
        """
        environ = os.environ if environ is None else environ
        return {k: v for k, v in environ.items() if k not in _setting_variables()} | self.environ()

    def part(self, cls: type[S]) -> S:
        """The settings of one program out of those of all (`pdq serve`)."""
        return cls(**{f.name: getattr(self, f.name) for f in fields(cls)})


@dataclass(frozen=True, kw_only=True)
class RedisSettings(Settings):
    """Where the pool lives."""

    redis_url: str = setting("redis://127.0.0.1:6379/0", "Redis or Valkey for queues, requests and replies.")
    kv_url: str | None = setting(None, "Redis or Valkey for KV blocks; default: the same as --redis-url.")
    pool: str = setting("default", "Name of the pool: all processes that serve one model on one Redis.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pool.isascii() or not self.pool.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"pool: letters, digits, - and _ are wanted, got {self.pool!r}")
        for f in fields(self):
            url = getattr(self, f.name)
            if f.name in ("redis_url", "kv_url") and url != f.default and not url.startswith(_REDIS_SCHEMES):
                raise ConfigError(f"{f.name}: expected a URL such as redis://127.0.0.1:6379/0, got {url!r}")

    @property
    def blocks_url(self) -> str:
        return self.kv_url or self.redis_url


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Which model, and how it computes."""

    model: str = setting("smollm2-135m-instruct", "Model folder, .gguf file, hub id, or the built-in default.")
    served_model_name: str | None = setting(None, "Name clients use; default: derived from --model.")
    engine: str = setting("torch", "torch, or scripted:... (no model; see the README) to measure the pipeline itself.")
    dtype: str = setting("bfloat16", "Weights and KV.", choices=("bfloat16", "float16", "float32"))
    quantization: str = setting(
        "none",
        "int8: linear layers in 8 bits, on CPUs with VNNI or AMX; the same for the whole pool.",
        choices=("none", "int8"),
    )
    device: str = setting("cpu", "Torch device, e.g. cpu or cuda.")
    max_model_len: int | None = setting(None, "Context limit in tokens; default: the model's own.", low=1)
    block_size: int = setting(32, "Tokens in one KV block; the same for the whole pool.", low=1, high=1024)
    trust_remote_code: bool = setting(False, "Run Python code that comes with a model; only for models you trust.")
    kv_codec: str = setting(
        "raw",
        "KV in Redis; the same for the whole pool: raw is --dtype, int8 is half the bytes of 16 bits.",
        choices=("raw", "bfloat16", "float16", "float32", "int8"),
    )


@dataclass(frozen=True, kw_only=True)
class ProcessSettings(RedisSettings, ModelSettings):
    """What every process of a pool has."""

    drain_seconds: float = setting(30.0, "Time for what runs after the first SIGTERM or Ctrl-C.", low=0, high=86400)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    """What both stages share."""

    name: str | None = setting(None, "Worker name, unique in the pool; default: stage, host, pid and a random part.")
    threads: int | None = setting(None, "Compute threads; default: all cores. pdq serve divides the cores.", low=1)
    cores: str | None = setting(
        None, "FOLDER/NAME: workers with this folder lend each other idle cores, --threads each."
    )
    compile: str = setting(
        "auto",
        "auto: code made for this CPU, and kept, where it is the fastest; off: torch's kernels only.",
        choices=("auto", "off"),
    )
    lease_seconds: float = setting(20.0, "A worker silent for this long loses its jobs to others.", low=0.5, high=3600)
    stall_seconds: float = setting(120.0, "A worker whose work stands still for this long lets its jobs go.", low=1)
    max_attempts: int = setting(3, "Times a stage of a request is tried before it is a dead letter.", low=1, high=100)
    result_ttl: float = setting(600.0, "Seconds a finished request can still be read.", low=1, high=86400 * 7)
    kv_ttl: float = setting(3600.0, "Seconds an unused KV block stays in Redis.", low=1, high=86400 * 30)
    kv_budget: str | None = setting(None, "Most bytes of KV blocks in Redis, e.g. 8GiB; default: what Redis allows.")
    kv_memory: str = setting("4GiB", "KV slots in this process, e.g. 512MiB or 4GiB.")
    local_cache_bytes: str = setting("256MiB", "Hot KV blocks kept in this process, in front of Redis; 0: none.")

    @property
    def kv_memory_bytes(self) -> int:
        return parse_bytes("kv_memory", self.kv_memory)

    @property
    def kv_budget_bytes(self) -> int | None:
        return None if self.kv_budget is None else parse_bytes("kv_budget", self.kv_budget)

    @property
    def local_cache_size(self) -> int:
        return parse_bytes("local_cache_bytes", self.local_cache_bytes, least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.kv_memory_bytes, self.kv_budget_bytes, self.local_cache_size
        if self.name is not None and not (self.name.isascii() and self.name.isprintable() and self.name.split()):
            raise ConfigError(f"name: printable ASCII is wanted, got {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings):
    """`pdq worker prefill`."""

    chunk_tokens: int = setting(512, "Prompt tokens in one forward.", low=1, high=65536)
    local_prefill_tokens: int = setting(
        0, "A prompt that lacks KV of no more tokens may be left to a decode worker with little to do.", low=0
    )
    max_handoff: str = setting("4GiB", "Prefill pauses while more KV than this waits for decode workers.")

    @property
    def max_handoff_bytes(self) -> int:
        return parse_bytes("max_handoff", self.max_handoff)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.max_handoff_bytes


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """`pdq worker decode`."""

    max_batch: int = setting(16, "Sequences decoded together.", low=1, high=1024)
    speculation: str = setting(
        "off",
        "Requests that do not say: ngram guesses tokens from repetitions in the text and checks them together.",
        choices=("off", "ngram"),
    )
    draft_tokens: int = setting(4, "Most guessed tokens of a sequence in a step.", low=1, high=64)
    flush_ms: float = setting(20.0, "A stream's tokens are gathered for so long, then written.", low=0, high=1000)
    publish_decode: str = setting(
        "always", "Whose finished blocks decode stores for the next turn.", choices=("always", "chat", "off")
    )
    kv_miss: str = setting(
        "requeue",
        "When KV blocks are gone: once back to prefill, then compute here; compute here; or fail.",
        choices=("requeue", "recompute", "fail"),
    )
    recompute_tokens: int = setting(2048, "Most tokens of lost KV that decode computes itself.", low=0)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ProcessSettings):
    """`pdq gateway`."""

    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", low=0, high=65535)
    api_key: str | None = setting(None, "A key that clients must send; as a variable no `ps` shows it.", secret=True)
    api_keys_file: str | None = setting(None, "File with a key, or a tenant and a key, a line; read again if changed.")
    max_body: str = setting("32MiB", "Largest request body.")
    request_timeout: float = setting(600.0, "Seconds from submit to the last token.", low=0.1, high=86400)
    queue_timeout: float = setting(0.0, "Seconds a request may wait for a prefill worker; 0: no limit.", low=0)
    max_queued: int = setting(1024, "Requests waiting for prefill before new ones get 429.", low=1)
    max_queued_tokens: int = setting(1_000_000, "Prompt tokens waiting for prefill before new ones get 429.", low=1)

    @property
    def max_body_bytes(self) -> int:
        return parse_bytes("max_body", self.max_body)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.max_body_bytes
        if self.api_key is not None and not is_key(self.api_key):
            raise ConfigError("api_key: printable ASCII without blanks is wanted")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(GatewaySettings, PrefillSettings, DecodeSettings):
    """`pdq serve`: everything at once."""

    redis_url: str = setting("", "Redis or Valkey to use; default: an embedded Valkey.")
    prefill: int = setting(1, "Prefill workers.", low=1, high=64)
    decode: int = setting(1, "Decode workers.", low=1, high=64)
    lend_cores: bool = setting(True, "Without --threads: an idle stage's cores compute for the other one.")
    valkey_memory: str | None = setting(None, "Most memory of the embedded Valkey; default: a quarter of all.")

    @property
    def valkey_memory_bytes(self) -> int | None:
        return None if self.valkey_memory is None else parse_bytes("valkey_memory", self.valkey_memory)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.valkey_memory_bytes


def known_variables() -> frozenset[str]:
    """Every `PDQ_*` variable that means something: the settings, and three that are not options of every program."""
    return _setting_variables() | {"PDQ_URL", "PDQ_CACHE", "PDQ_LOG_LEVEL"}


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Where pdq keeps what can be made again: PDQ_CACHE, XDG_CACHE_HOME/pdq, or ~/.cache/pdq. Not created here."""
    environ = os.environ if environ is None else environ
    if own := environ.get("PDQ_CACHE"):
        return Path(own).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return Path(base or "~/.cache").expanduser().absolute() / "pdq"


def _setting_variables() -> frozenset[str]:
    return frozenset(env_name(f.name) for f in fields(ServeSettings))


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = known_variables()
    unknown = sorted(k for k in environ if k.startswith(ENV_PREFIX) and k not in known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise ConfigError(f"unknown variable {unknown[0]}" + (f"; did you mean {near[0]}?" if near else ""))


_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_REDIS_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_bytes(name: str, text: str, least: int = 1) -> int:
    """ "512MiB" -> 536870912. Raises ConfigError that names the setting."""
    digits = text.strip().lower()
    unit = digits.lstrip("0123456789.")
    try:
        number = float(digits[: len(digits) - len(unit)])
        size = int(number * _UNITS[unit.strip()])
    except (ValueError, KeyError, OverflowError) as e:
        raise ConfigError(f"{name}: expected a size such as 512MiB, got {text!r}") from e
    if size < least:
        raise ConfigError(f"{name}: must be at least one byte, got {text!r}")
    return size


def number(value: float) -> str:
    """For people: 3600.0 is 3600, and a large limit has all its digits."""
    return str(int(value)) if value == int(value) else str(value)


def _checked(name: str, hint: Any, value: Any, meta: Mapping[str, Any]) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(a for a in get_args(hint) if a is not type(None))
    try:
        if hint is float and isinstance(value, str | int) and not isinstance(value, bool):
            value = float(value)
        elif hint is int and isinstance(value, str):
            value = int(value)
        elif hint is bool and isinstance(value, str):
            value = _FLAGS[value.strip().lower()]
    except (ValueError, OverflowError, KeyError) as e:
        raise ConfigError(f"{name}: expected {hint.__name__}, got {value!r}") from e
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise ConfigError(f"{name}: expected {hint.__name__}, got {value!r}")
    low, high, choices = meta.get("low"), meta.get("high"), meta.get("choices")
    if low is not None and value < low:
        raise ConfigError(f"{name}: must be at least {number(low)}, got {value!r}")
    if high is not None and value > high:
        raise ConfigError(f"{name}: must be at most {number(high)}, got {value!r}")
    if choices and value not in choices:
        raise ConfigError(f"{name}: one of {', '.join(choices)} is wanted, got {value!r}")
    return value
