"""Keeps the leases of a worker's running jobs, from a thread and a connection of its own.

A torch step, a long tokenization or a busy event loop must not cost a lease. The thread learns on the way whether a job
was cancelled, is past its deadline, or belongs to somebody else by now, and says so in `Running.ended`; whoever works
on the job looks there between chunks or steps.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from pdq.connection import RedisError, SyncRedis
from pdq.errors import DeadlineExceeded, LostLease, PdqError, RequestCancelled
from pdq.keys import Keys
from pdq.queue import Job, renew

log = logging.getLogger(__name__)

_ENDS: dict[str, type[PdqError]] = {"cancel": RequestCancelled, "expired": DeadlineExceeded, "lost": LostLease}
_TEXTS = {
    "cancel": "the request was cancelled",
    "expired": "the request's deadline has passed",
    "lost": "the lease was lost",
}


@dataclass(eq=False, slots=True)
class Running:
    """A job in work. ended: "" or why the work should stop ("cancel", "expired", "lost"); set from other threads."""

    job: Job
    lease_seconds: float
    ended: str = ""
    claimed: float = field(default_factory=time.monotonic)
    renewed: float = field(default_factory=time.monotonic)

    @property
    def remaining(self) -> float:
        """Seconds to the request's deadline, now."""
        return max(self.job.remaining - (time.monotonic() - self.claimed), 0.0)

    @property
    def lapsed(self) -> bool:
        """Has the lease run out without a renewal? Then somebody else may have the job."""
        return time.monotonic() > self.renewed + self.lease_seconds

    def note(self, verdict: str) -> None:
        """Take in what a fenced write answered ("ok", "cancel", "expired", "lost", "gap")."""
        if verdict != "ok" and self.ended != "lost":
            self.ended = "lost" if verdict == "gap" else verdict

    def error(self) -> PdqError:
        """Why the work should stop, as RequestCancelled, DeadlineExceeded or LostLease."""
        return _ENDS[self.ended](_TEXTS[self.ended])

    def check(self) -> None:
        """Raise `error()` if the work should stop."""
        if self.lapsed:
            self.note("lost")
        if self.ended:
            raise self.error()


class Leases:
    """The thread. Use as a context manager; `add` and `remove` from the event loop."""

    def __init__(self, redis: SyncRedis, keys: Keys, lease_seconds: float, stall_seconds: float) -> None:
        self._redis = redis
        self._keys = keys
        self._seconds = lease_seconds
        self._stall_seconds = stall_seconds
        self._progress = time.monotonic()
        self._running: dict[str, Running] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="pdq-leases", daemon=True)

    def __enter__(self) -> Leases:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)
        self._redis.close()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, job: Job) -> Running:
        running = Running(job, self._seconds)
        if not self._running:  # else a worker that hangs and still claims would never look stalled
            self.progress()
        self._running[job.id] = running
        return running

    def progress(self) -> None:
        """The work has moved: a forward is done, or the first job has begun."""
        self._progress = time.monotonic()

    @property
    def stalled(self) -> bool:
        """Are there jobs, but has nothing moved for `stall_seconds`? Then no lease is renewed: others may do better."""
        return bool(self._running) and time.monotonic() - self._progress > self._stall_seconds

    def remove(self, running: Running) -> None:
        if self._running.get(running.job.id) is running:
            del self._running[running.job.id]

    def cancel(self, request_id: str) -> None:
        """A hint that this request was cancelled; ignored if it is not in work here."""
        if running := self._running.get(request_id):
            running.note("cancel")

    def _loop(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            if self.stalled:
                log.error("nothing has moved for %g s: the leases are left to run out", self._stall_seconds)
                continue
            for running in list(self._running.values()):
                self._renew(running)

    def _renew(self, running: Running) -> None:
        if running.ended == "lost":
            return
        asked = time.monotonic()
        try:
            verdict = renew(self._redis, self._keys, running.job)
        except RedisError as e:
            log.warning("%s: cannot renew the lease: %s", running.job.id, e)  # not lost until a lease has passed
            return
        if verdict != "lost":
            running.renewed = asked
        running.note(verdict)
