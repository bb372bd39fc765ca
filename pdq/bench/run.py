"""One run: warm-up, load, figures, files. The only module here that prints."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pdq
from pdq.bench import prompts
from pdq.bench.client import Client, Message, connect
from pdq.bench.load import arrivals, closed_loop, open_loop, until
from pdq.bench.picture import check_matplotlib, draw
from pdq.bench.progress import Bar
from pdq.bench.prompts import Conversation, conversations, limited
from pdq.bench.records import Record, clock
from pdq.bench.report import histogram, report
from pdq.bench.settings import INTERFERENCE, MULTI_TURN, ON_TERMINAL, BenchSettings
from pdq.bench.summary import Summary, rounded, summarize
from pdq.errors import PdqError

_FAILED, _INTERRUPTED = 1, 130
_PAUSE_SECONDS = 0.1
Keep = Callable[[Record], None]


def run(settings: BenchSettings) -> int:
    """The whole command; its exit code. Raises PdqError when there is nothing to measure or a file cannot be written.

    Ctrl-C ends the load; what was measured until then is shown.
    """
    if settings.plot not in ("", ON_TERMINAL):
        check_matplotlib()
    bench = Bench(settings)
    asyncio.run(bench.measure())
    bench.show()
    if bench.interrupted:
        return _INTERRUPTED
    return 0 if any(r.ok for r in bench.records) else _FAILED


class Bench:
    """A run and what came of it: `records`, `model`, `seed`, `sent_late` (seconds)."""

    def __init__(self, settings: BenchSettings) -> None:
        self._settings = settings
        self.seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
        self.model = settings.model
        self.records: list[Record] = []
        self.sent_late: list[float] = []
        self.left_out: set[str] = set()
        self.interrupted = False
        self._started = datetime.now(UTC)
        self._deadline: float | None = None

    async def measure(self) -> None:
        """Raises Unavailable if the server is not there."""
        try:
            async with connect(self._settings) as client:
                self.model, self.left_out = client.model, client.left_out
                await self._warm_up(client)
                await self._load(client)
        except asyncio.CancelledError:
            if not self.records:
                raise
            self.interrupted = True

    def show(self) -> None:
        """Print the result and write the files. Raises PdqError."""
        s = self._settings
        summary = summarize(self.records, s.slos, self.sent_late)
        notes = self._notes(summary)
        head = {"url": s.url, "model": self.model, "seed": self.seed, "notes": notes}
        if s.json:
            print(json.dumps(head | summary.as_json(), indent=2))  # noqa: T201  the result is the program's voice
        else:
            print(report(s, self.model, self.seed, summary, notes), end="")  # noqa: T201
        if s.plot == ON_TERMINAL:
            print("\n" + "\n".join(_histograms(self.records)), end="")  # noqa: T201
        sys.stdout.flush()
        if s.save:
            _write("save", s.save, lambda path: _save(path, self._document(head, summary)))
        if s.plot not in ("", ON_TERMINAL):
            _write("plot", s.plot, lambda path: draw(path, f"{self.model}, {s.shape}", self.records))

    async def _warm_up(self, client: Client) -> None:
        """The records are dropped: a server that fails here fails in the run too, where it is counted."""
        dropped: list[Record] = []
        work = limited(conversations(self._settings, self.seed, prompts.WARMUP), self._settings.warmup)
        await closed_loop(work, self._sender(client, dropped.append), self._settings.streams)

    async def _load(self, client: Client) -> None:
        s = self._settings
        self._started = datetime.now(UTC)
        self._deadline = None if s.duration is None else clock() + s.duration
        with Bar(s.most_requests, s.duration, shown=not s.json and sys.stdout.isatty() and sys.stderr.isatty()) as bar:

            def keep(record: Record) -> None:
                self.records.append(record)
                bar.add(record)

            if s.shape != INTERFERENCE:
                await self._steady(client, keep)
                return
            async with asyncio.TaskGroup() as group:
                long = group.create_task(self._long_prompts(group, self._sender(client, self.records.append)))
                await self._steady(client, keep)
                long.cancel()

    async def _steady(self, client: Client, keep: Keep) -> None:
        s = self._settings
        work = limited(conversations(s, self.seed), s.most_requests)
        send = self._sender(client, keep)
        if s.rate is None:
            await closed_loop(until(self._deadline, work), send, s.streams)
            return
        # A conversation brings all its turns, so fewer of them make the same number of requests.
        turns = s.turns if s.shape == MULTI_TURN else 1
        times = arrivals(s.rate / turns, s.burst, self.seed, s.duration)
        await open_loop(work, send, times, self.sent_late)

    async def _long_prompts(self, group: asyncio.TaskGroup, send: Callable[[Conversation], Any]) -> None:
        """By the clock, as the long prompts of other people come; those that run when the others are done, finish."""
        at = clock()
        for one in conversations(self._settings, self.seed, prompts.LONG):
            at += self._settings.long_every
            await asyncio.sleep(at - clock())
            group.create_task(send(one))

    def _sender(self, client: Client, keep: Keep) -> Callable[[Conversation], Any]:
        async def send(one: Conversation) -> None:
            """Turn by turn; a turn that fails is the end of its conversation."""
            messages: list[Message] = []
            for turn, question in enumerate(one.turns):
                if turn and self._deadline is not None and clock() >= self._deadline:
                    return
                messages.append({"role": "user", "content": question})
                record, answer = await client.ask(messages, one.output_tokens, one.series, turn)
                keep(record)
                if not record.ok:
                    # A closed loop would ask a server that refuses at once thousands of times a second.
                    await asyncio.sleep(_PAUSE_SECONDS if self._settings.rate is None else 0)
                    return
                messages.append({"role": "assistant", "content": answer})

        return send

    def _notes(self, summary: Summary) -> list[str]:
        notes = [f"the server does not take {name}; it was left out" for name in sorted(self.left_out)]
        if summary.without_usage:
            notes.append(f"{summary.without_usage} answers without usage: their chunks are counted as tokens")
        if self._settings.shape == INTERFERENCE and summary.interference is None:
            notes.append("the run was over before the first long prompt (--long-every)")
        if self.interrupted:
            notes.append("interrupted; requests that were running are not counted")
        return notes

    def _document(self, head: dict[str, Any], summary: Summary) -> dict[str, Any]:
        origin = min((r.start for r in self.records), default=0.0)
        about = {"pdq": pdq.__version__, "started": self._started.isoformat(timespec="seconds")}
        requests = [_request(r, origin) for r in sorted(self.records, key=lambda r: r.start)]
        settings = self._settings.public() | {"model": self.model, "seed": self.seed}
        return about | {
            "settings": settings,
            "notes": head["notes"],
            "summary": summary.as_json(),
            "requests": requests,
        }


def _request(record: Record, origin: float) -> dict[str, Any]:
    """A record with times in ms: `sent_ms` since the first request, all others since this one was sent."""
    values = {
        "series": record.series,
        "turn": record.turn,
        "sent_ms": (record.start - origin) * 1e3,
        "chunks_ms": [(c - record.start) * 1e3 for c in record.chunks],
        "e2e_ms": record.e2e * 1e3,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "detail": record.detail,
    }
    found: dict[str, Any] = rounded(values)
    return found


def _histograms(records: Sequence[Record]) -> list[str]:
    good = [r for r in records if r.ok]
    bar = "█" if "utf" in (sys.stdout.encoding or "").lower() else "#"
    ttft = histogram("TTFT", [r.chunks[0] - r.start for r in good], bar)
    return ttft + histogram("ITL", [b - a for r in good for a, b in r.gaps], bar)


def _save(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


def _write(option: str, path: str, write: Callable[[Path], None]) -> None:
    try:
        write(Path(path))
    except (OSError, ValueError) as e:
        raise PdqError(f"{option}: {path} could not be written: {e}") from e
