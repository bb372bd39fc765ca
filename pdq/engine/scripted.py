"""An engine without torch: for tests of the pipeline, and for measuring what the pipeline itself costs.

    --engine scripted                                    tokens depend on everything before them
    --engine scripted:text=Hello world.,step_ms=20       a fixed answer, over and over, 20 ms a forward
    --engine scripted:prefill_us=500,token_bytes=23040   500 us a prompt token, KV as large as a real model's
    --engine scripted:crash_on=35,hang_on=36,hang_ms=9e3 a sequence that holds token 35 ends the process, one with
                                                         token 36 makes its forwards hang for 9 s

Of the sampling options, a changed token shows penalties (by all tokens before), and allowed_token_ids, min_tokens and
logprobs hold; the rest changes nothing.

KV of a token is its id and a running checksum of all tokens up to it, repeated to `token_bytes`. The next token follows
from the last checksum, so a lost, swapped or foreign block changes the text or is refused: tests see wrong KV at once.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from pdq.engine import drafted
from pdq.engine.base import EngineSpec, NoRoom, Scores, Segment, Slot
from pdq.errors import ConfigError
from pdq.messages import SamplingParams
from pdq.text import ByteTokenizer

_RECORD = struct.Struct("<II")
_KINDS: dict[str, type[str | float | int]] = {"str": str, "float": float, "int": int}


@dataclass(frozen=True, slots=True)
class Script:
    """What a scripted engine does. Times add up: a forward takes step_ms and prefill_us for each further token."""

    text: str = ""
    step_ms: float = 0.0
    prefill_us: float = 0.0
    load_ms: float = 0.0  # to fill a slot from the store
    token_bytes: int = 8
    eos_every: int = 0  # without text: about one token in this many ends the answer; 0 is never
    crash_on: int = -1  # a token; a forward over a sequence that holds it is the end of the process
    hang_on: int = -1  # a token; a forward over a sequence that holds it takes hang_ms
    hang_ms: float = 0.0

    @classmethod
    def parse(cls, engine: str) -> Script:
        """From "scripted" or "scripted:key=value,...". Raises ConfigError."""
        kinds = {f.name: _KINDS[str(f.type)] for f in fields(cls)}
        values: dict[str, str | float | int] = {}
        for part in filter(None, engine.partition(":")[2].split(",")):
            name, _, value = part.partition("=")
            try:
                values[name] = kinds[name](value)
            except (KeyError, ValueError) as e:
                raise ConfigError(f"engine: bad part {part!r} of a scripted engine") from e
        script = cls(**values)  # type: ignore[arg-type]
        times = (script.step_ms, script.prefill_us, script.load_ms, script.hang_ms)
        if script.token_bytes < 8 or script.token_bytes % 8 or not all(0 <= t < math.inf for t in times):
            raise ConfigError("engine: token_bytes is a multiple of 8, times are not negative")
        return script


@dataclass(eq=False)
class ScriptedSlot:
    capacity: int
    length: int = 0
    tokens: list[int] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int]) -> None:
        state, packed = self.sums[-1] if self.sums else 0, struct.pack(f"<{len(token_ids)}I", *token_ids)
        for at in range(0, len(packed), 4):
            state = zlib.crc32(packed[at : at + 4], state)
            self.sums.append(state)
        self.tokens += token_ids
        self.length += len(token_ids)

    def forget(self, count: int) -> None:
        self.length -= count
        del self.tokens[self.length :], self.sums[self.length :]


class ScriptedEngine:
    """See the module's docstring; implements `engine.base.Engine`. memory: KV budget in bytes."""

    def __init__(self, script: Script, *, block_size: int, max_model_len: int, memory: int) -> None:
        self._script = script
        self._answer = script.text.encode()
        self._free = memory
        self._lock = threading.Lock()
        self._open: set[ScriptedSlot] = set()
        self.more_threads = 0
        self.forwards = 0
        self.computed = 0
        identity = f"scripted {script.token_bytes} {script.text} {script.eos_every} {block_size}"
        self._spec = EngineSpec(
            fingerprint=hashlib.sha256(identity.encode()).digest(),
            dtype="float32",
            layout=f"scripted-{script.token_bytes}",
            token_bytes=script.token_bytes,
            vocab_size=ByteTokenizer.vocab_size,
            eos_ids=frozenset({ByteTokenizer.eos_id}),
            max_model_len=max_model_len,
            numerics="scripted",
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def can_open(self, capacity: int) -> bool:
        return capacity * self._script.token_bytes <= self._free

    def open(self, capacity: int) -> Slot:
        with self._lock:
            if not self.can_open(capacity):
                raise NoRoom(f"{capacity} tokens do not fit into {self._free} bytes")
            slot = ScriptedSlot(capacity)
            self._open.add(slot)
            self._free -= capacity * self._script.token_bytes
        return slot

    def close(self, slot: Slot) -> None:
        with self._lock:
            if slot in self._open:
                self._open.remove(_own(slot))
                self._free += slot.capacity * self._script.token_bytes

    def forward(self, segments: Sequence[Segment]) -> list[int | None]:
        tokens = sum(len(s.token_ids) for s in segments)
        self.forwards += 1
        self.computed += tokens
        if self._holds(self._script.crash_on, segments):
            os._exit(137)  # as the kernel's OOM killer would end it
        if self._holds(self._script.hang_on, segments):
            time.sleep(self._script.hang_ms / 1e3)
        pause = self._script.step_ms / 1e3 + max(tokens - len(segments), 0) * self._script.prefill_us / 1e6
        if pause:
            time.sleep(pause)
        return [self._forward(s) for s in segments]

    @staticmethod
    def _holds(token: int, segments: Sequence[Segment]) -> bool:
        def known(s: Segment) -> Sequence[int]:
            return s.token_ids[: len(s.token_ids) - s.drafts]

        return token >= 0 and any(token in known(s) or token in _own(s.slot).tokens for s in segments)

    def _forward(self, segment: Segment) -> int | None:
        slot = _own(segment.slot)
        drafted.check(segment)
        if slot.length + len(segment.token_ids) > slot.capacity:
            raise ValueError("the slot is full")
        slot.extend(segment.token_ids)
        if segment.sample is None:
            return None
        rows = drafted.rows(segment)
        states = slot.sums[slot.length - len(rows) :]
        tokens = [self._sampled(row, segment.sample, state) for row, state in zip(rows, states, strict=True)]
        token = drafted.settle(segment, rows, tokens)
        slot.forget(drafted.dropped(segment, token))
        return token

    def _sampled(self, row: Segment, params: SamplingParams, state: int) -> int:
        token = self._token(row, params, state)
        if params.logprobs is not None and row.scores is not None:
            row.scores.append(_scores(token, params.logprobs, state))
        return token

    def _token(self, segment: Segment, params: SamplingParams, state: int) -> int:
        if self._answer:
            return self._answer[segment.position % len(self._answer)]
        seed = params.seed if params.temperature > 0 else 0
        draw = zlib.crc32(struct.pack("<Qq", segment.position, seed), state)
        if params.counts_tokens:
            draw = zlib.crc32(array("q", segment.history or ()), draw)
        if params.allowed_token_ids is not None:
            return params.allowed_token_ids[draw % len(params.allowed_token_ids)]
        may_end = segment.position >= params.min_tokens or params.ignore_eos
        if may_end and self._script.eos_every and draw % self._script.eos_every == 0:
            return ByteTokenizer.eos_id
        return 97 + draw % 26

    def export(self, slot: Slot, start: int, stop: int, size: int, headroom: int) -> list[memoryview]:
        own, repeat = _own(slot), self._script.token_bytes // 8
        out = []
        for at in range(start, stop, size):
            end = min(at + size, stop)
            records = map(_RECORD.pack, own.tokens[at:end], own.sums[at:end])
            payload = b"".join(records if repeat == 1 else (record * repeat for record in records))
            out.append(memoryview(bytearray(bytes(headroom) + payload)))
        return out

    def load(self, slot: Slot, start: int, runs: Sequence[tuple[int, memoryview]]) -> None:
        own, step = _own(slot), self._script.token_bytes
        if start != own.length or any(len(data) != n * step for n, data in runs):
            raise ValueError("the sizes of the KV runs do not fit")
        if start + sum(n for n, _ in runs) > own.capacity:
            raise ValueError("the slot is too small")
        if self._script.load_ms and start == 0:
            time.sleep(self._script.load_ms / 1e3)
        for n, data in runs:
            records = [_RECORD.unpack_from(data, at) for at in range(0, n * step, step)]
            own.extend([token for token, _ in records])
            if own.sums[own.length - n :] != [checksum for _, checksum in records]:
                raise ValueError("KV of other tokens was loaded")


def _scores(token: int, count: int, state: int) -> Scores:
    """Made up, but the same for the same tokens before."""
    best = [(token + i) % ByteTokenizer.vocab_size for i in range(count)]
    first = state % 1000 / 1000
    return Scores(token, -first, tuple((t, -first - i) for i, t in enumerate(best)))


def _own(slot: Slot) -> ScriptedSlot:
    if not isinstance(slot, ScriptedSlot):
        raise TypeError("a slot of another engine")
    return slot
