"""The interface between the pipeline and whatever computes: prefill and decode workers see only this.

Implemented by `engine.runner` (torch) and `engine.scripted` (no torch; for tests and for measuring the pipeline).
No torch here, so that `pdq.worker` can import it.

An engine is driven by one thread at a time (`forward`); `open`, `close`, `export` and `load` may be called from other
threads for slots that are not part of a running `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdq.messages import SamplingParams

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot hold; as OpenAI and vLLM have it


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What the pipeline has to know of a loaded model.

    fingerprint: 32 bytes, equal exactly if KV may be exchanged (weights, config, rope, quantisation, block layout).
    dtype: of the KV values, "bfloat16", "float16" or "float32". layout: text that names every layer's own shape, e.g.
    "30x3x64+64". token_bytes: KV bytes of one token, all layers. vocab_size: token ids are in [0, vocab_size).
    eos_ids: tokens that end a completion. max_model_len: prompt + completion, in tokens.

    numerics: the numerics id; it names the kernels, the CPU's features, the dtype and the versions of what computes. It
    is not in the fingerprint: workers that differ in it alone may exchange KV.
    """

    fingerprint: bytes
    dtype: str
    layout: str
    token_bytes: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_model_len: int
    numerics: str


class Slot(Protocol):
    """KV memory of one sequence. KV of tokens [0, length) is present; never more than `capacity` tokens."""

    @property
    def capacity(self) -> int: ...

    length: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities at one position, before temperature, penalties and filters; at least LEAST_LOGPROB.

    top: (token id, log probability) of the most likely tokens, best first and equal ones by id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive tokens of one sequence in a forward: the tokens go to positions slot.length and up.

    sample: None if no token is wanted after this segment (a prefill chunk that is not the last); else how to choose it.
    position: index in the completion of the token that will be sampled, from 0 (with the seed, the key of its random
    number).
    history: all tokens before that one, prompt and `position` of the completion; wanted where `sample.counts_tokens`.
    An array("q") is read fastest. scores: a list that gets the Scores of the sampled token, where `sample.logprobs`
    wants them; nothing is added where no token was sampled.
    drafts: that many of the last `token_ids` are guesses at the tokens that will be sampled. further: an empty list,
    wanted with drafts, that gets the tokens after the first one: as many as drafts came true. They, and their scores,
    are what single steps would have given; position and history are those of the first one.
    """

    slot: Slot
    token_ids: Sequence[int]
    sample: SamplingParams | None = None
    position: int = 0
    history: Sequence[int] | None = None
    scores: list[Scores] | None = None
    drafts: int = 0
    further: list[int] | None = None


class NoRoom(Exception):
    """The KV memory has no room for another slot of the wanted capacity now."""


class Engine(Protocol):
    """A loaded model with KV memory for a number of sequences.

    more_threads: that `forward` may use beside its own, set before each call; engines without threads ignore it.
    """

    more_threads: int

    @property
    def spec(self) -> EngineSpec: ...

    def open(self, capacity: int) -> Slot:
        """A new empty slot for up to `capacity` tokens. Raises NoRoom."""
        ...

    def close(self, slot: Slot) -> None:
        """Give the slot's memory back. Closing twice is allowed."""
        ...

    def can_open(self, capacity: int) -> bool:
        """Would `open(capacity)` succeed now?"""
        ...

    def forward(self, segments: Sequence[Segment]) -> list[int | None]:
        """Compute all segments in one pass, append their KV, advance each slot's length; the sampled tokens in order.

        Segments are ragged: prefill chunks and decode steps (one token) may be mixed; a slot occurs at most once.
        The result for a segment does not depend on its neighbours (up to float rounding of the backend). None where a
        token was wanted: the logits of that segment are not numbers, and its KV is worth nothing.

        A slot's length ends before the KV of drafts that did not come true; where a segment with drafts gives None it
        is as it was, since the guesses may have spoilt it. Raises ValueError for segments that cannot be computed.
        """
        ...

    def export(self, slot: Slot, start: int, stop: int, size: int, headroom: int) -> list[memoryview]:
        """Copy KV of tokens [start, stop) out, as runs of `size` tokens (the last may be shorter).

        Each result is `headroom` zero bytes for the caller's header, then `[layer][k|v][kv_head][token][dim]` raw bytes
        (little endian, the spec's dtype), writable and contiguous; run i covers [start + i*size, ...).
        """
        ...

    def load(self, slot: Slot, start: int, runs: Sequence[tuple[int, memoryview]]) -> None:
        """Copy runs of (tokens, raw bytes as made by `export`, without headroom) to positions `start` and up.

        Sets slot.length to the end of the last run. `start` must equal slot.length. Raises ValueError when sizes
        do not fit: the bytes of a run must be exactly tokens * token_bytes.
        """
        ...
