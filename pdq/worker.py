"""What both worker programs share: the claim loop, heartbeats, cancel hints, drain.

A stage is a `Stage`: it says how many more jobs it can take and works on one. The worker turns each way a job can end
into exactly one transition: done by the stage, an error event, another attempt (also if Redis refuses a write of this
job), given back (Redis was away), or nothing at all (the job is somebody else's, Redis is away for so long that the
lease lapses, or Redis refuses the transition itself). No torch here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from redis.exceptions import OutOfMemoryError

from pdq import connection, heartbeats
from pdq.config import WorkerSettings
from pdq.connection import RedisError, is_outage
from pdq.cores import Cores, OwnCores
from pdq.errors import LostLease, PdqError
from pdq.keys import Keys
from pdq.lease import Leases, Running
from pdq.messages import WorkerInfo, encode
from pdq.queue import Entry, Job, Queue
from pdq.suspects import Suspects
from pdq.tasks import cancelled

log = logging.getLogger(__name__)
T = TypeVar("T")

BEAT_SECONDS = 2.0
JOIN_SECONDS = 0.2  # between two tries of the first heartbeat
CHECK_SECONDS = 1.0  # for the look at the blocks' Redis: a heartbeat does not wait for it
STALE_MS = 60_000
SWEEP_SECONDS = 60.0
READ_SECONDS = 1.0  # one blocking read; a drain waits for it, since giving up a read may lose what it has just taken
GATHER_SECONDS = 0.001  # in which jobs gather that follow several others: each time they are taken costs all sides
OOM_DELAY = 2.0
OUTAGE_DELAY = 1.0  # before a job is given back: if only the blocks' Redis is away, it will be claimed again at once
UNWIND_SECONDS = 3.0  # for the chunk or step that runs when the drain's time is over
RETRY_SECONDS = 0.1  # between two tries of a write that Redis did not take


class Stage(Protocol):
    """The work of one stage. capacity: jobs it can have in work at once, now.

    waits: does it wait for the next job? If not, it takes one only if no other worker does.
    """

    name: str

    @property
    def capacity(self) -> int: ...

    @property
    def waits(self) -> bool: ...

    async def work(self, running: Running) -> None:
        """Carry the job through this stage: hand it off or end it. Errors are the worker's to turn into transitions."""
        ...

    async def ended(self, job: Job) -> None:
        """The worker has ended the request in this stage: drop what was kept for it alone. Best effort."""
        ...

    async def drop_tail(self, key: str) -> None:
        """Delete a tail that nobody will want again. Best effort: it has a TTL."""
        ...

    async def ready(self) -> bool:
        """May another job be claimed now (back-pressure)? Takes a moment if not. Raises RedisError."""
        ...

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """Whatever must go on beside the jobs (a batch loop); cancelled at the end, an exception ends the worker."""
        ...

    def counters(self) -> Counter[str]: ...

    async def close(self) -> None:
        """Let go of what is held outside this process; nothing is asked of the stage afterwards."""
        ...


class Worker:
    """One worker process of one stage. model: the served name, for heartbeats."""

    def __init__(
        self,
        settings: WorkerSettings,
        stage_name: str,
        *,
        model: str,
        fingerprint: bytes,
        context: int,
        numerics: str = "",
        cores: Cores | None = None,
    ) -> None:
        self.settings = settings
        self.keys = Keys(settings.pool)
        self.name = settings.name or f"{stage_name}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.model = model
        self._fingerprint, self._context, self._numerics = fingerprint, context, numerics
        self._cores = cores or OwnCores()
        url, home = settings.redis_url, self.keys.home
        self._redis = connection.command(url, home=home)
        self._waiting = connection.blocking(url, home)
        self._hints = connection.blocking(url, home)
        self.queue = Queue(
            self._redis, self._waiting, keys=self.keys, stage=stage_name, owner=self.name,
            lease_seconds=settings.lease_seconds, max_attempts=settings.max_attempts, result_ttl=settings.result_ttl,
        )  # fmt: skip
        self._suspects = Suspects(self._redis, self.keys, self.name, settings.lease_seconds, settings.max_attempts)
        self.leases = Leases(connection.lease(url, home), self.keys, settings.lease_seconds, settings.stall_seconds)
        self._jobs: dict[asyncio.Task[None], Running] = {}
        self._changed = asyncio.Event()
        self._draining = asyncio.Event()
        self._joined = False
        self._blocks_url = settings.kv_url  # to be looked at
        self._next_reclaim = self._next_sweep = 0.0
        self.counters: Counter[str] = Counter()

    async def run(self, stage: Stage) -> None:
        """Work until told to stop; then drain. Raises what ended one of the stage's loops."""
        self._listen_to_signals()
        loops = (self._claims(stage), self._beats(stage), self._cancels(stage), self._draining.wait(), *stage.loops())
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(loop) for loop in loops]
        try:
            with self.leases:
                try:
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                    await self._drain(tasks[0])
                finally:
                    await self._end([*tasks, *self._jobs])
            await self._close()
        finally:
            await stage.close()

    async def neighbours(self) -> list[WorkerInfo]:
        """The pool's live workers, this one included. Raises RedisError."""
        return await heartbeats.live(self._redis, self.keys)

    def more_room(self) -> None:
        """The stage's capacity may have grown."""
        self._changed.set()

    def drain(self) -> None:
        """Claim nothing more and finish what runs; a second call stops at once."""
        if self._draining.is_set():
            log.warning("%s: stopping at once", self.name)
            os._exit(130)
        log.info("%s: draining %d jobs", self.name, len(self._jobs))
        self._draining.set()
        self._changed.set()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)

    async def _drain(self, claims: asyncio.Task[None]) -> None:
        await asyncio.wait([claims], timeout=2 * READ_SECONDS + connection.COMMAND_TIMEOUT)
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=self.settings.drain_seconds)
        left = dict(self._jobs)
        for task, running in left.items():
            task.cancel()
            running.note("lost")  # should the cancel be lost (see tasks.py), the work ends at its next look
        await asyncio.gather(*(self._give_back(running.job) for running in left.values()))
        if left and (await asyncio.wait(left, timeout=UNWIND_SECONDS))[1]:
            log.error("%s: a forward does not return; the process ends without it", self.name)
            await self._sign_off()
            os._exit(1)

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait until they have ended. Those in a forward end after it: their slots are closed then.

        A forward that does not return within `stall_seconds` hangs, and would keep the process for ever.
        """
        try:
            async with asyncio.timeout(self.settings.stall_seconds):
                await cancelled(tasks)
        except TimeoutError:
            log.exception("%s: a forward does not return; the process ends without it", self.name)
            os._exit(1)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _give_back(self, job: Job) -> None:
        try:
            await self.queue.release(job)
        except (LostLease, RedisError) as e:
            log.warning("%s: cannot give back: %s", job.id, e)

    async def _close(self) -> None:
        await self._sign_off()
        for client in (self._redis, self._waiting, self._hints):
            await client.aclose()

    async def _sign_off(self) -> None:
        try:
            await self.queue.leave()
            await self._redis.zrem(self.keys.workers, self.name)
            await self._redis.delete(self.keys.worker(self.name))
        except RedisError as e:
            log.warning("%s: cannot sign off: %s", self.name, e)

    async def _claims(self, stage: Stage) -> None:
        """Take jobs while there is room for them. A Redis outage is waited out."""
        delay = 0.1
        while not self._draining.is_set():
            free = stage.capacity - len(self._jobs)
            if free <= 0 or self.leases.stalled or not self._joined:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(READ_SECONDS):
                        await self._changed.wait()
                continue
            try:
                if not await stage.ready():
                    continue
                await self._take(stage, free)
                delay = 0.1
            except RedisError as e:
                log.warning("%s: Redis does not answer: %s", self.name, e)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 2.0)

    async def _take(self, stage: Stage, free: int) -> None:
        reclaimed = await self._reclaim(free)
        if reclaimed:
            jobs, failed = await self.queue.claim_all(reclaimed)
        else:
            jobs, failed = await self.queue.take(free, READ_SECONDS if stage.waits else 0.0)
        for job in jobs:
            self._start(stage, job)
        if jobs and reclaimed:
            self._next_reclaim = 0.0  # there may be more, left by many or by one too old for them
        elif len(jobs) > 1:
            await asyncio.sleep(GATHER_SECONDS)
        if failed is not None:
            raise failed

    async def _reclaim(self, free: int) -> list[Entry]:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_SECONDS
            await self.queue.sweep(idle=max(SWEEP_SECONDS, 3 * self.settings.lease_seconds))
        if now >= self._next_reclaim:
            self._next_reclaim = now + min(self.settings.lease_seconds / 4, 1.0)
            found = await self.queue.reclaim(free)
            if found := await self._suspects.sift(found, {running.job.id for running in self._jobs.values()}):
                log.info("%s: took over %d entries of silent workers", self.name, len(found))
                self.counters["reclaimed"] += len(found)
                return found
        return []

    def _start(self, stage: Stage, job: Job) -> None:
        running = self.leases.add(job)
        task = asyncio.create_task(self._job(stage, running), name=f"pdq-job-{job.id}")
        self._jobs[task] = running
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.leases.remove(self._jobs.pop(task))
        self._changed.set()

    async def _job(self, stage: Stage, running: Running) -> None:
        job = running.job
        self.counters["claimed"] += 1
        try:
            try:
                with self._cores.working():
                    await stage.work(running)
            except LostLease:
                raise
            except PdqError as e:
                log.info("%s: ended: %s", job.id, e)
                await retried(running, partial(self.queue.end, job, e))
                await stage.ended(job)
            except RedisError as e:
                await self._after(e, running)
            except Exception as e:
                log.exception("%s: attempt %d failed", job.id, job.attempt)
                self.counters["failed"] += 1
                await retried(running, partial(self.queue.fail, job, f"{type(e).__name__}: {e}"))
        except LostLease as e:
            self.counters["fenced"] += 1
            log.warning("%s: attempt %d is not ours any more: %s", job.id, job.attempt, e)
        except RedisError as e:
            log.warning("%s: left to its lease, Redis refuses a command: %s", job.id, e)

    async def _after(self, error: RedisError, running: Running) -> None:
        """Give the job back if Redis was away; another attempt, charged, if Redis has refused a write of this job."""
        job = running.job
        if is_outage(error):
            log.warning("%s: given back when Redis answers: %s", job.id, error)
            await asyncio.sleep(OUTAGE_DELAY)
            await retried(running, partial(self.queue.release, job))
        elif isinstance(error, OutOfMemoryError):  # later there may be room
            await retried(running, partial(self.queue.fail, job, f"Redis is out of memory: {error}", OOM_DELAY))
        else:
            log.warning("%s: attempt %d failed, Redis refuses a write: %s", job.id, job.attempt, error)
            self.counters["failed"] += 1
            await retried(running, partial(self.queue.fail, job, f"Redis refuses a write: {error}"))

    async def _beats(self, stage: Stage) -> None:
        """Heartbeats. Raises ConfigError if a server is of no use, or the pool has workers of other KV."""
        while True:
            counters = self.counters + stage.counters()
            info = WorkerInfo(
                name=self.name, stage=stage.name, model=self.model, fingerprint=self._fingerprint,
                max_model_len=self._context, state=self._state(),
                running=len(self._jobs), capacity=stage.capacity, counters=tuple(sorted(counters.items())),
                numerics=self._numerics,
            )  # fmt: skip
            try:
                if not self._joined:
                    await connection.check_server(self._redis, "queue")
                    await heartbeats.join(self._redis, self.keys, self._fingerprint)
                    self._joined = True
                    self._changed.set()
                seconds, _ = await self._redis.time()
                await self._redis.execute_all(
                    ("SET", self.keys.worker(self.name), encode(info), "PX", heartbeats.TTL_MS),
                    ("ZADD", self.keys.workers, seconds * 1000, self.name),
                    ("ZREMRANGEBYSCORE", self.keys.workers, "-inf", seconds * 1000 - STALE_MS),
                )
            except RedisError as e:
                log.debug("%s: no heartbeat: %s", self.name, e)
            await self._check_blocks()
            await asyncio.sleep(BEAT_SECONDS if self._joined else JOIN_SECONDS)

    async def _check_blocks(self) -> None:
        """Look at the blocks' Redis once, if it is another. Raises ConfigError."""
        if not self._blocks_url:
            return
        with suppress(RedisError, TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS), connection.command(self._blocks_url, 1) as redis:
                await connection.check_server(redis, "kv")
                self._blocks_url = None

    def _state(self) -> str:
        if self._draining.is_set():
            return "draining"
        return "stalled" if self.leases.stalled else "ready"

    async def _cancels(self, stage: Stage) -> None:
        """Follow the stream of cancelled ids, so that a cancel is heard before the next lease renewal.

        It also names the tails of those that were cancelled between the stages, where no worker had them.
        """
        last = "$"
        while True:
            try:
                reply: Any = await self._hints.xread(
                    {self.keys.cancels: last}, block=int(connection.BLOCK_SECONDS * 1000)
                )
            except RedisError:
                await asyncio.sleep(1.0)  # the flag in the request is the truth; renewals see it
                continue
            found = [entry for _, entries in reply or [] for entry in entries]
            for entry, data in found:
                last = entry.decode()
                self.leases.cancel(data.get(b"id", b"").decode(errors="replace"))
            for _, data in found:  # only now: a hint does not wait for the Redis of the blocks
                if tail := data.get(b"tail"):
                    await stage.drop_tail(tail.decode(errors="replace"))


async def retried(running: Running, write: Callable[[], Awaitable[T]]) -> T:
    """Do an idempotent write, again and again while Redis is away and the lease lasts.

    Raises LostLease, and RedisError if Redis refuses this write: it would refuse it again.
    """
    while True:
        try:
            return await write()
        except RedisError as e:
            if not is_outage(e):
                raise
            log.warning("%s: Redis did not take a write, trying again: %s", running.job.id, e)
            await asyncio.sleep(RETRY_SECONDS)
            if running.lapsed:
                raise LostLease("Redis was away for a lease") from e
