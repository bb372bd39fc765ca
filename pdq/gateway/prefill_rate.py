"""How fast the pool's prefill workers are, from the counters in their heartbeats: what a Retry-After is made of.

Knows nothing of HTTP or Redis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from pdq.messages import WorkerInfo

WINDOW_SECONDS = 60.0
SHORTEST, LONGEST = 1.0, 60.0  # seconds a client is told to wait


@dataclass(frozen=True, slots=True)
class Sample:
    """A heartbeat. at: seconds, our clock; tokens and busy: prompt tokens and seconds of prefill since the start."""

    at: float
    tokens: int
    busy: float

    @classmethod
    def of(cls, worker: WorkerInfo, at: float) -> Sample:
        counters = dict(worker.counters)
        return cls(at, counters.get("prompt_tokens", 0), counters.get("prefill_ms", 0) / 1000)


class PrefillRate:
    """Prompt tokens a second that the live workers do together while they are busy: idle is not slow."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[Sample]] = {}

    def note(self, workers: Iterable[WorkerInfo], at: float) -> None:
        """Take in the heartbeats of all live workers at once; who is not among them is forgotten."""
        before, self._samples = self._samples, {}
        for worker in workers:
            if worker.stage == "prefill" and worker.state == "ready":
                sample, samples = Sample.of(worker, at), before.get(worker.name, deque())
                if samples and sample.tokens < samples[-1].tokens:  # the same name, started anew
                    samples.clear()
                samples.append(sample)
                while len(samples) > 2 and samples[1].at <= at - WINDOW_SECONDS:
                    samples.popleft()
                self._samples[worker.name] = samples

    @property
    def per_second(self) -> float:
        """0 when nothing is known."""
        return sum(map(_rate, self._samples.values()))

    def wait(self, queued_tokens: int) -> float | None:
        """Seconds until as many tokens are prefilled, within SHORTEST and LONGEST; None when nothing is known."""
        rate = self.per_second
        return min(max(queued_tokens / rate, SHORTEST), LONGEST) if rate else None


def _rate(samples: deque[Sample]) -> float:
    """Of one worker: what it did in the window, or, if that is nothing, since it started."""
    first, last = samples[0], samples[-1]
    if last.busy > first.busy:
        return (last.tokens - first.tokens) / (last.busy - first.busy)
    return last.tokens / last.busy if last.busy else 0.0
