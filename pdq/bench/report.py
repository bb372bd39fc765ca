"""A run in words, for people: what was asked for, what came of it, histograms of text. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Sequence

from pdq.bench.settings import INTERFERENCE, MULTI_TURN, SHARED_PREFIX, BenchSettings
from pdq.bench.summary import Stats, Summary, percentile

_COLUMNS = ("mean", "p50", "p90", "p99", "max")
_BAR_WIDTH = 50


def report(settings: BenchSettings, model: str, seed: int, summary: Summary, notes: Sequence[str]) -> str:
    """The whole result, with a newline at its end."""
    rows = [("requests", _requests(summary)), ("duration", f"{summary.duration_s:.2f} s"), *_throughput(summary)]
    if summary.interference:
        rows.append(("long", _counted(summary.interference.long_requests, summary.interference.long_errors)))
    rows += [(kind, said) for kind, said in summary.examples.items() if said]
    rows += [("note", note) for note in notes]
    lines = [f"{settings.url}, model {model}, seed {seed}", f"{_asked(settings)}; {_load(settings)}", ""]
    lines += [f"{name:<12}{text}" for name, text in rows]
    return "\n".join([*lines, "", *_table(summary), ""])


def histogram(title: str, seconds: Sequence[float], bar: str = "█", bins: int = 12) -> list[str]:
    """Lines: equal steps in ms from the least to p99, and one row for what is above. [] of nothing."""
    if not seconds:
        return []
    ms = sorted(s * 1e3 for s in seconds)
    low, top = ms[0], percentile(ms, 99)
    step = (top - low) / bins
    counts = [0] * (bins + 1)
    for value in ms:
        counts[bins if value > top else min(int((value - low) / step), bins - 1) if step else 0] += 1
    labels = [f"{low + step * i:10.2f}" for i in range(bins)] + [f"> {top:8.2f}"]
    shown = range(bins + 1 if step else 1)
    widest = max(counts)
    rows = [f"{labels[i]} {bar * round(counts[i] / widest * _BAR_WIDTH):<{_BAR_WIDTH}} {counts[i]:>7}" for i in shown]
    return [f"{title} (ms, {len(ms)} values)", *rows, ""]


def _asked(settings: BenchSettings) -> str:
    text = f"{settings.shape}: {settings.input_tokens} words in, {settings.output_tokens} tokens out"
    more = {
        SHARED_PREFIX: f", after a prefix of {settings.prefix_tokens} words ({settings.prefixes} different)",
        MULTI_TURN: f" a turn, {settings.turns} turns",
        INTERFERENCE: f", a prompt of {settings.long_tokens} words every {settings.long_every:g} s",
    }
    return text + more.get(settings.shape, "")


def _load(settings: BenchSettings) -> str:
    if settings.rate is None:
        return f"{settings.streams} at a time"
    kind = "Poisson" if settings.burst is None else f"gamma {settings.burst:g}"
    return f"{settings.rate:g} requests/s ({kind})"


def _requests(summary: Summary) -> str:
    return _counted(summary.requests, summary.errors)


def _counted(requests: int, errors: dict[str, int]) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in errors.items())
    return f"{requests}, {sum(errors.values())} failed ({kinds})" if errors else f"{requests}, none failed"


def _throughput(summary: Summary) -> list[tuple[str, str]]:
    s = summary
    rates = f"{s.requests_per_s:.2f} requests/s, {s.output_tokens_per_s:.1f} output tokens/s"
    rows = [("throughput", f"{rates}, {s.input_tokens_per_s:.1f} input tokens/s")]
    rows.append(("tokens", f"{s.output_tokens} out, {s.input_tokens} in"))
    if s.hit_ratio is not None:
        rows.append(("cache hits", f"{s.hit_ratio:.1%} of the input tokens"))
    if s.goodput:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in s.goodput.limits.items())
        rows.append(("goodput", f"{s.goodput.share:.1%} of the requests, {s.goodput.rate:.2f}/s, within {limits}"))
    if s.sent_late_ms:
        rows.append(("sent late", f"by {s.sent_late_ms.p50:.1f} ms (p50), {s.sent_late_ms.max:.1f} ms (max)"))
    return rows


def _table(summary: Summary) -> list[str]:
    rows = [
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("E2E", summary.e2e_ms),
    ]
    rows += [(f"TTFT turn {turn}", ms) for turn, ms in summary.ttft_by_turn_ms.items()]
    if found := summary.interference:
        rows += [("ITL quiet", found.itl_quiet_ms), ("ITL loaded", found.itl_loaded_ms)]
        rows += [("TTFT long", found.long_ttft_ms)]
    head = f"{'ms':<12}" + "".join(f"{name:>11}" for name in _COLUMNS)
    return [head, *(f"{name:<12}{_cells(stats)}" for name, stats in rows)]


def _cells(stats: Stats | None) -> str:
    if stats is None:
        return "".join(f"{'-':>11}" for _ in _COLUMNS)
    return "".join(f"{getattr(stats, name):>11.2f}" for name in _COLUMNS)
