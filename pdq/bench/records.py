"""One record for each request, and what is measured of it.

Clock readings of one process, in seconds; a *content chunk* is an event of the stream that carries text.

    TTFT   the request is sent (connecting included) to its first content chunk
    ITL    the gap between a content chunk and the one before it. A server that puts several tokens into a chunk has
           fewer and longer gaps; chunks that arrive together have gaps of 0
    TPOT   (last - first content chunk) / (output tokens - 1); none for a single token
    E2E    the request is sent to the end of its stream ([DONE])

Token counts are the server's (usage). Without usage each content chunk counts as one output token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Record:
    """A request that has ended. error: "" for one that succeeded, else the kind of error, with `detail` for people."""

    series: str
    start: float
    end: float
    chunks: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str = ""
    error: str = ""
    detail: str = ""
    turn: int = 0

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def output_tokens(self) -> int:
        return len(self.chunks) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.start if self.chunks else None

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2 or not self.chunks:
            return None
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Beginning and end of each gap between content chunks."""
        return list(pairwise(self.chunks))
