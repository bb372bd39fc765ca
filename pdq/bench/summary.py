"""From records to figures. Pure: the same records always give the same summary.

    throughput   successful requests, and their tokens, over the time from the first request sent to the last one ended
    hit ratio    cached tokens / prompt tokens of the requests whose usage tells both
    goodput      requests that succeeded within every limit (SLO): their share of all requests, and their rate
    loaded       the gaps (ITL) of the steady streams that overlap the life of a long prompt's request, from sent to
                 ended; its first token and its handover to decode are part of what it costs. quiet: all others

Percentiles are linear between the two nearest ranks, as numpy's default.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pdq.bench.prompts import LONG
from pdq.bench.records import Record


@dataclass(frozen=True, slots=True)
class Stats:
    """A distribution; in a summary the unit is ms."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """limits in ms; rate in requests/s."""

    limits: Mapping[str, float]
    met: int
    share: float
    rate: float


@dataclass(frozen=True, slots=True)
class Interference:
    """What long prompts did to the steady streams, and how they fared."""

    itl_quiet_ms: Stats | None
    itl_loaded_ms: Stats | None
    long_requests: int
    long_errors: dict[str, int]
    long_ttft_ms: Stats | None


@dataclass(frozen=True, slots=True)
class Summary:
    """Long prompts (--shape interference) are only in `interference`; everything else is about the other requests."""

    requests: int
    succeeded: int
    failed: int
    errors: dict[str, int]
    duration_s: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    hit_ratio: float | None
    without_usage: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft_ms: Stats | None
    tpot_ms: Stats | None
    itl_ms: Stats | None
    e2e_ms: Stats | None
    goodput: Goodput | None = None
    interference: Interference | None = None
    ttft_by_turn_ms: dict[int, Stats] = field(default_factory=dict)  # of conversations with more than one, from 1 on
    sent_late_ms: Stats | None = None
    examples: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = rounded(asdict(self))
        return found


def stats(seconds: Sequence[float]) -> Stats | None:
    """In ms; None of nothing."""
    if not seconds:
        return None
    ms = sorted(s * 1e3 for s in seconds)
    cut = {f"p{p}": percentile(ms, p) for p in (50, 90, 99)}
    return Stats(count=len(ms), mean=math.fsum(ms) / len(ms), max=ms[-1], **cut)


def percentile(values: Sequence[float], percent: float) -> float:
    """Of `values` in rising order, at least one."""
    at = (len(values) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def summarize(records: Sequence[Record], limits: Mapping[str, float], sent_late: Sequence[float] = ()) -> Summary:
    """limits: SLOs in ms by name. sent_late: seconds, of an open loop."""
    steady = [r for r in records if r.series != LONG]
    long = [r for r in records if r.series == LONG]
    good = [r for r in steady if r.ok]
    duration = max((r.end for r in steady), default=0.0) - min((r.start for r in steady), default=0.0)
    told = [r for r in good if r.prompt_tokens and r.cached_tokens is not None]
    cached = sum(r.cached_tokens or 0 for r in told)
    tokens_in = sum(r.prompt_tokens or 0 for r in good)
    tokens_out = sum(r.output_tokens for r in good)
    return Summary(
        requests=len(steady),
        succeeded=len(good),
        failed=len(steady) - len(good),
        errors=_errors(steady),
        duration_s=duration,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        cached_tokens=cached,
        hit_ratio=cached / sum(r.prompt_tokens or 0 for r in told) if told else None,
        without_usage=sum(r.prompt_tokens is None or r.completion_tokens is None for r in good),
        requests_per_s=_per(len(good), duration),
        input_tokens_per_s=_per(tokens_in, duration),
        output_tokens_per_s=_per(tokens_out, duration),
        ttft_ms=stats(_given([r.ttft for r in good])),
        tpot_ms=stats(_given([r.tpot for r in good])),
        itl_ms=stats([b - a for r in good for a, b in r.gaps]),
        e2e_ms=stats([r.e2e for r in good]),
        goodput=_goodput(steady, limits, duration) if limits else None,
        interference=_interference(good, long) if long else None,
        ttft_by_turn_ms=_by_turn(good),
        sent_late_ms=stats(sent_late),
        examples={r.error: r.detail for r in reversed(records) if not r.ok},
    )


def rounded(value: Any) -> Any:
    """For JSON: floats with six digits after the point."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {k: rounded(v) for k, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def _goodput(records: Sequence[Record], limits: Mapping[str, float], duration: float) -> Goodput:
    met = sum(r.ok and all(_within(r, name, ms) for name, ms in limits.items()) for r in records)
    return Goodput(dict(limits), met, met / len(records) if records else 0.0, _per(met, duration))


def _within(record: Record, name: str, ms: float) -> bool:
    value = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}[name]
    return value is None or value * 1e3 <= ms


def _interference(steady: Sequence[Record], long: Sequence[Record]) -> Interference:
    windows = _merged([(r.start, r.end) for r in long])
    ends = [end for _, end in windows]
    quiet: list[float] = []
    loaded: list[float] = []
    for begin, end in (gap for r in steady for gap in r.gaps):
        at = bisect.bisect_right(ends, begin)
        overlaps = at < len(windows) and windows[at][0] < end
        (loaded if overlaps else quiet).append(end - begin)
    return Interference(
        itl_quiet_ms=stats(quiet),
        itl_loaded_ms=stats(loaded),
        long_requests=len(long),
        long_errors=_errors(long),
        long_ttft_ms=stats(_given([r.ttft for r in long if r.ok])),
    )


def _by_turn(records: Sequence[Record]) -> dict[int, Stats]:
    turns = sorted({r.turn for r in records})
    found = {turn + 1: stats(_given([r.ttft for r in records if r.turn == turn])) for turn in turns}
    return {turn: ms for turn, ms in found.items() if ms} if len(turns) > 1 else {}


def _merged(windows: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as windows that rise and do not overlap."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(windows):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _errors(records: Sequence[Record]) -> dict[str, int]:
    return dict(Counter(r.error for r in records if not r.ok).most_common())


def _given(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _per(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
