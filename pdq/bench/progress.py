"""The progress bar of a run, on stderr, gone when the run is over."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from pdq.bench.records import Record, clock


class Bar:
    """Counts the records of a run. It fills with the requests or with the time, whichever ends the run first."""

    def __init__(self, requests: int | None, seconds: float | None, *, shown: bool) -> None:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._progress.add_task("", total=1.0)
        self._requests, self._seconds = requests, seconds
        self._begin = clock()
        self._done = self._failed = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def add(self, record: Record) -> None:
        self._done += 1
        self._failed += not record.ok
        wanted = f" of {self._requests}" if self._requests else ""
        failed = f", {self._failed} failed" if self._failed else ""
        by_count = self._done / self._requests if self._requests else 0.0
        by_time = (clock() - self._begin) / self._seconds if self._seconds else 0.0
        text = f"{self._done}{wanted} requests{failed}"
        self._progress.update(self._task, completed=min(1.0, max(by_count, by_time)), description=text)
