"""A stage's queue, as its workers see it: take a job, keep it, write its tokens, hand it on, end it.

Sits between `worker` and the scripts. Redis hands out stream entries, and only the claim script looks at the requests:
what waits is read and claimed by that script, in one round trip; what a blocking XREADGROUP brings, or XAUTOCLAIM
(entries whose owner has been silent for a lease), is claimed in a second one. No torch here.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import ResponseError

from pdq import scripts
from pdq.connection import BLOCK_SECONDS, AsyncRedis, RedisError, SyncRedis
from pdq.end_events import CANCELLED, EXPIRED, WAITED, end_event
from pdq.errors import DeadlineExceeded, LostLease, PdqError, RequestCancelled, RequestFailed
from pdq.keys import DEAD_LETTERS, GROUP, Keys
from pdq.messages import LANES, VERSION, BadMessage, Event, Handoff, Request, Timings, Usage, decode, encode

Entry = tuple[str, str, str]  # stream, entry id, request id
Fence = tuple[int, str, str, str]  # attempt, owner, group, entry id


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed request: the right to work on it while the lease holds.

    visible: tokens already in the reply stream. remaining: seconds to the deadline. timings: so far.
    claimed_ms: server time of the claim. events: the first of those that are visible.
    """

    id: str
    stream: str
    entry: str
    attempt: int
    owner: str
    request: Request
    handoff: Handoff | None
    visible: int
    remaining: float
    claimed_ms: int
    timings: Timings
    requeues: int
    events: tuple[bytes, ...] = ()

    def fence(self) -> Fence:
        """The leading arguments of the fenced scripts: attempt, owner, group, entry."""
        return (self.attempt, self.owner, GROUP, self.entry)


class Queue:
    """The queue of one stage ("prefill" or "decode") for one worker.

    redis: a command client; waiting: a blocking client. result_ttl: seconds a finished request stays readable.
    """

    def __init__(
        self,
        redis: AsyncRedis,
        waiting: AsyncRedis,
        *,
        keys: Keys,
        stage: str,
        owner: str,
        lease_seconds: float,
        max_attempts: int,
        result_ttl: float,
    ) -> None:
        self._redis = redis
        self._waiting = waiting
        self.keys = keys
        self.stage = stage
        self.owner = owner
        self.streams = [keys.prefill(lane) for lane in LANES] if stage == "prefill" else [keys.decode]
        self._lease_ms = int(lease_seconds * 1000)
        self._max_attempts = max_attempts
        self._ttl_ms = int(result_ttl * 1000)
        self._dead_event = encode(
            end_event(RequestFailed(f"{stage} was tried {max_attempts} times; the worker died each time"))
        )
        self._flowing = False  # did several jobs come at once? Then there are more
        self._cursor = dict.fromkeys(self.streams, "0-0")

    async def make_groups(self) -> None:
        """Make streams and groups where they are missing; a group starts at 0, so that it sees what is queued."""
        for stream in self.streams:
            try:
                await self._redis.xgroup_create(stream, GROUP, id="0", mkstream=True)
            except ResponseError as e:
                if "BUSYGROUP" not in str(e):
                    raise

    async def read(self, count: int, wait: float) -> list[Entry]:
        """Wait up to `wait` seconds (at most BLOCK_SECONDS) for new entries, and read up to `count` of each stream.

        Raises RedisError; a NOGROUP answer makes the groups again and reads nothing. An entry whose delivery was lost
        on the way is ours without our knowing; `reclaim` finds it a lease later.
        """
        try:
            block = max(int(min(wait, BLOCK_SECONDS) * 1000), 1)
            streams: dict[Any, Any] = dict.fromkeys(self.streams, ">")
            return _entries(await self._waiting.xreadgroup(GROUP, self.owner, streams, count=count, block=block))
        except ResponseError as e:
            if not _no_group(e):
                raise
            await self.make_groups()
            return []

    async def reclaim(self, count: int) -> list[Entry]:
        """Up to `count` entries whose owner has not renewed for a lease; a bounded look at each stream."""
        found: list[Entry] = []
        for stream in self.streams:
            if len(found) >= count:
                break
            try:
                reply = await self._redis.xautoclaim(
                    stream, GROUP, self.owner, self._lease_ms, self._cursor[stream], count=count - len(found)
                )
            except ResponseError as e:
                if not _no_group(e):
                    raise
                await self.make_groups()
                continue
            self._cursor[stream] = _text(reply[0])
            found += _entries([[stream, reply[1]]])
        return found

    async def take(self, count: int, wait: float) -> tuple[list[Job], Exception | None]:
        """Up to `count` new jobs, the best lane's first; if there are none, wait up to `wait` seconds for one.

        wait: 0 takes only what nobody waits for, since a new entry goes to whoever waits at once. After a wait there
        may be one more of each further lane. Answers and raises as `claim_all`.
        """
        found: tuple[list[Job], Exception | None] = [], None
        if self._flowing or len(self.streams) > 1 or not wait:
            found = await self.claim_all((), more=count)
        if wait and not any(found):
            entries = await self.read(1, wait)
            if entries:
                found = await self.claim_all(entries, more=max(count - len(entries), 0))
        self._flowing = len(found[0]) > 1
        return found

    async def claim(self, entry: Entry) -> Job | None:
        """Become the owner of the entry's request. None if there is nothing to do: it ended, or somebody else has it.

        A request whose message cannot be read is failed for good; one of a newer protocol is left to newer workers.
        """
        jobs, failed = await self.claim_all([entry])
        if failed is not None:
            raise failed
        return jobs[0] if jobs else None

    async def claim_all(self, entries: Sequence[Entry], more: int = 0) -> tuple[list[Job], Exception | None]:
        """`claim` for several entries, and for up to `more` new ones, in one round trip.

        The jobs, and why the first claim that failed did. Raises RedisError if Redis does not answer.
        """
        call = self._claims(entries, more)
        try:
            answers = await call.run(self._redis)
        except ResponseError as e:
            if not _no_group(e):
                raise
            await self.make_groups()
            answers = await call.run(self._redis)
        jobs: list[Job] = []
        failed: Exception | None = None
        for number, entry_id, request_id, answer in answers:
            if answer[0] == b"error":
                failed = failed or ResponseError(_text(answer[1]))
            elif answer[0] == b"ok":
                entry = self.streams[number - 1], _text(entry_id), _text(request_id)
                try:
                    if job := await self._claimed(entry, answer):
                        jobs.append(job)
                except RedisError as e:
                    failed = failed or e
        return jobs, failed

    def _claims(self, entries: Sequence[Entry], more: int) -> scripts.Call:
        keys = self.keys
        numbers = {stream: n for n, stream in enumerate(self.streams, 1)}
        read: list[scripts.Arg] = []
        for stream, entry_id, request_id in entries:
            read += (numbers[stream], entry_id, request_id)
        return scripts.claim(
            [keys.load, keys.dead, keys.took(self.owner), *self.streams],
            *(VERSION, GROUP, self.owner, self.stage, self._max_attempts, self._lease_ms, self._ttl_ms, DEAD_LETTERS),
            *(CANCELLED, EXPIRED, WAITED, self._dead_event),
            *(secrets.token_bytes(8), keys.request(""), keys.out(""), more, *read),
        )

    async def _claimed(self, entry: Entry, reply: Any) -> Job | None:
        """The job of a claim that succeeded; None if its message cannot be read. Raises RedisError."""
        stream, entry_id, request_id = entry
        attempt, message, handoff, visible, remaining, *times, requeues, events = reply[1:]
        try:
            request = decode(Request, message)
            state = decode(Handoff, handoff) if handoff and self.stage == "decode" else None
            if self.stage == "decode" and state is None:
                raise BadMessage("the handoff is missing")
        except BadMessage as e:
            with suppress(LostLease):  # a lease passed meanwhile: it is somebody else's to refuse
                await self._refuse(stream, request_id, (int(attempt), self.owner, GROUP, entry_id), e)
            return None
        return Job(
            id=request_id, stream=stream, entry=entry_id, attempt=int(attempt), owner=self.owner, request=request,
            handoff=state, visible=int(visible), remaining=int(remaining) / 1000, claimed_ms=int(times[3]),
            timings=_timings(state, int(times[0]), int(times[3])), requeues=int(requeues),
            events=tuple(events),
        )  # fmt: skip

    async def _refuse(self, stream: str, request_id: str, fence: Fence, why: BadMessage) -> None:
        if why.newer:
            await self._release(stream, request_id, fence, newer=True)
            return
        event = encode(end_event(RequestFailed(f"the queued request cannot be read: {why}")))
        await self._fail(stream, request_id, fence, event, str(why), max_attempts=0)

    async def write(self, writes: Sequence[tuple[Job, Event]]) -> list[str | RedisError]:
        """Make events visible, one a job, all in one round trip; a terminal event ends its request.

        Per job "ok", "cancel" (written, but the client wants an end), "expired" (not written, the deadline has passed;
        an end still counts), "lost", "gap", or the error with which Redis has refused this job's event, and no other's.
        Raises RedisError if Redis does not answer; the same events may be sent again, but not their tokens cut anew.
        """
        results = await scripts.run_many(self._redis, [self._write(job, event) for job, event in writes])
        return [r if isinstance(r, RedisError) else _text(r) for r in results]

    async def write_one(self, job: Job, event: Event) -> str:
        """`write` for one job. Raises RedisError, also if Redis has refused the event."""
        return _text(await self._write(job, event).run(self._redis))

    def _write(self, job: Job, event: Event) -> scripts.Call:
        keys = [self.keys.request(job.id), self.keys.out(job.id)]
        span = _span(event)
        if event.finish_reason is None:
            return scripts.append(keys, job.attempt, job.owner, *span, VERSION)
        attempt, owner, *place = job.fence()
        return scripts.finish(
            [*keys, self.keys.load, job.stream], attempt, owner, *span, *place, event.finish_reason, self._ttl_ms
        )

    async def emitted(self, job: Job) -> list[int]:
        """The tokens an earlier attempt or stage made visible. Raises BadMessage if they are not there any more."""
        tokens = [token for event in job.events for token in decode(Event, event).token_ids]
        last = f"0-{len(tokens)}"
        while len(tokens) < job.visible:
            found: Any = await self._redis.xrange(self.keys.out(job.id), min=f"({last}", count=256)
            if not found:
                break
            last = _text(found[-1][0])
            tokens += [token for _, data in found for token in decode(Event, data[b"e"]).token_ids]
        if len(tokens) != job.visible:
            raise BadMessage(f"{job.visible} tokens are visible, {len(tokens)} were found")
        return tokens

    @staticmethod
    def first_usage(job: Job) -> Usage | None:
        """What an earlier attempt said with token 0, if that is visible."""
        return decode(Event, job.events[0]).usage if job.events else None

    async def hand_off(self, job: Job, handoff: Handoff, event: Event | None = None) -> int:
        """Put the request into the decode stage; returns the KV tokens that wait there now.

        event: becomes visible with it. Raises LostLease, RequestCancelled, DeadlineExceeded.
        """
        keys = [self.keys.request(job.id), job.stream, self.keys.decode, self.keys.load, self.keys.out(job.id)]
        call = scripts.handoff(
            keys, *job.fence(), job.id, encode(handoff), handoff.kv_length, VERSION, handoff.tail_key,
            *((0, 0, b"") if event is None else _span(event)),
        )  # fmt: skip
        verdict, held = await call.run(self._redis)
        _check(_text(verdict))
        return int(held)

    async def held(self) -> int:
        """KV tokens that were handed over and wait for a decode worker.

        None with an empty stream, whatever the sum says: requests whose keys were lost are never taken off it.
        """
        held, waiting = await self._redis.execute_all(("HGET", self.keys.load, "held"), ("XLEN", self.keys.decode))
        return int(held or 0) if waiting else 0

    async def end(self, job: Job, error: PdqError) -> None:
        """End the request with an error that no retry would change. Raises LostLease."""
        _check(await self.write_one(job, end_event(error)))

    async def fail(self, job: Job, why: str, delay: float = 0.5) -> str:
        """The attempt failed: try again after about `delay` seconds, or dead-letter it ("retry", "dead")."""
        # `why` goes to the dead letter only: what broke inside is no business of a client.
        event = encode(end_event(RequestFailed(f"{self.stage} failed {self._max_attempts} times")))
        return await self._fail(job.stream, job.id, job.fence(), event, why, self._max_attempts, delay)

    async def _fail(
        self,
        stream: str,
        request_id: str,
        fence: Fence,
        event: bytes,
        why: str,
        max_attempts: int,
        delay: float = 0.5,
    ) -> str:
        delay_ms = min(int(delay * 1000), self._lease_ms)
        call = scripts.fail(
            [self.keys.request(request_id), self.keys.out(request_id), stream, self.keys.dead, self.keys.load],
            *(*fence, request_id, self.stage, max_attempts, delay_ms, self._lease_ms),
            *(event, why[:500], self._ttl_ms, DEAD_LETTERS),
        )
        return await self._transition(call)

    async def release(self, job: Job) -> None:
        """Give the job back at once, without charging the attempt (drain). Raises LostLease."""
        await self._release(job.stream, job.id, job.fence())

    async def _release(self, stream: str, request_id: str, fence: Fence, *, newer: bool = False) -> None:
        """newer: not to whoever reads next, but left for workers whose version is above ours."""
        least = VERSION + 1 if newer else ""
        call = scripts.release([self.keys.request(request_id), stream], *fence, request_id, self._lease_ms, least)
        await self._transition(call)

    async def requeue(self, job: Job, most: int = 1) -> bool:
        """Send a decode job back to prefill since its KV is gone; False if that happened `most` times before."""
        keys = [self.keys.request(job.id), job.stream, self.keys.prefill(job.request.lane), self.keys.load]
        return await self._transition(scripts.requeue(keys, *job.fence(), job.id, most)) == "ok"

    async def sweep(self, idle: float, most: int = 100) -> int:
        """Forget up to `most` consumers with nothing pending that were silent for `idle` seconds; how many."""
        return int(await scripts.sweep(self.streams, GROUP, int(idle * 1000), most).run(self._redis))

    async def leave(self) -> None:
        """Remove this worker's consumers, as far as nothing is pending for them."""
        await scripts.leave_group(self.streams, GROUP, self.owner).run(self._redis)

    async def _transition(self, call: scripts.Call) -> str:
        return _check(_text(await call.run(self._redis)))


def _span(event: Event) -> tuple[int, int, bytes]:
    return event.index, event.index + len(event.token_ids), encode(event)


def _check(verdict: str) -> str:
    if verdict == "lost":
        raise LostLease("the job belongs to another attempt")
    if verdict == "cancel":
        raise RequestCancelled("the request was cancelled")
    if verdict == "expired":
        raise DeadlineExceeded("the request's deadline has passed")
    if verdict == "gap":
        raise LostLease("the reply stream is not where this attempt left it")
    return verdict


async def queued_tokens(redis: AsyncRedis, keys: Keys) -> int:
    """Prompt tokens, counted or estimated, of all requests that wait for prefill or are in it. Raises RedisError."""
    return int(await redis.hget(keys.load, "queued") or 0)


def renew(redis: SyncRedis, keys: Keys, job: Job) -> str:
    """Keep the job for another lease, from the lease thread: "ok", "cancel", "expired", "lost". Raises RedisError."""
    return _text(scripts.renew([keys.request(job.id), job.stream], *job.fence()).run_sync(redis))


def _no_group(error: ResponseError) -> bool:
    """Is a stream or its group missing? The second wording is fakeredis'."""
    return "NOGROUP" in str(error) or "requires the key to exist" in str(error)


def _timings(handoff: Handoff | None, submitted: int, now: int) -> Timings:
    """Up to a claim, by what prefill measured: when a prompt is claimed is not yet when it is computed."""
    passed = max(now - submitted, 0)
    if handoff is None:
        return Timings(queue_ms=passed)
    before = handoff.timings
    return replace(before, handoff_ms=max(passed - before.queue_ms - before.prefill_ms, 0.0))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _entries(reply: Any) -> list[Entry]:
    """A stream read's reply as entries; empty replies come as None, [] or {} by protocol and server version.

    XAUTOCLAIM before Redis 7 answers deleted entries as nil.
    """
    return [
        (_text(stream), _text(entry), _text(data[b"id"]))
        for stream, found in reply or []
        for entry, data in (e for e in found if e and e[0])
        if data and b"id" in data
    ]
