"""A run as a picture: histograms of TTFT and ITL, and every request over time. matplotlib is imported when drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from pdq.bench.records import Record
from pdq.errors import ConfigError

_BINS = 40


def check_matplotlib() -> None:
    """Raises ConfigError if it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plot: matplotlib is not installed: pip install 'pdq[plot]' (or --plot - for text)")


def draw(path: Path, title: str, records: Sequence[Record]) -> None:
    """Writes the file; its suffix is the format. Raises OSError, and ValueError for a format that is not known."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(title)
    ttft, itl, course = figure.subplots(1, 3)
    good = [r for r in records if r.ok]
    for axes, name, values in (
        (ttft, "TTFT", [r.chunks[0] - r.start for r in good]),
        (itl, "ITL", [b - a for r in good for a, b in r.gaps]),
    ):
        axes.hist([v * 1e3 for v in values], bins=_BINS)
        axes.set(xlabel=f"{name} (ms)", ylabel="count")
    origin = min((r.start for r in records), default=0.0)
    for kind, chosen in (("succeeded", good), ("failed", [r for r in records if not r.ok])):
        if chosen:
            course.plot([r.start - origin for r in chosen], [r.e2e for r in chosen], ".", label=kind)
    course.set(xlabel="sent at (s)", ylabel="E2E (s)")
    if records:
        course.legend()
    figure.savefig(path, dpi=120)
