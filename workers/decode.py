"""The decode worker: one batch of running completions, one token each a step, or several where drafts come true.

    handoff -> KV blocks and tail into a slot -> joins the batch at the next step -> tokens to the reply stream, in
    events written about every `flush_ms` -> terminal event

Jobs join and leave at every step. The batch loop never waits for Redis: loading happens beside it, and one writer sends
all jobs' events in a single round trip.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from pdq.config import DecodeSettings
from pdq.connection import RedisError, is_outage
from pdq.drafts import Drafter
from pdq.engine.base import Segment
from pdq.errors import PdqError, RequestFailed
from pdq.generation import Generation, max_new_tokens
from pdq.kv_transfer import in_thread
from pdq.lease import Running
from pdq.messages import Event, Handoff, Request
from pdq.program import Parts, run_program
from pdq.queue import Job
from pdq.sequence import REPLAY_CHUNK, Sequence
from pdq.tasks import finished
from pdq.worker import RETRY_SECONDS, retried
from pdq.write_back import WriteBack

log = logging.getLogger(__name__)

BORROWING = 8  # sequences in a batch that gain more from prefill's idle cores than their threads' meetings cost
LEAVING = 1  # of those cores for the gateway and Redis: a step's threads all wait for one that has lost its core


class DecodeStage:
    """The batch, its step loop and its writer."""

    name = "decode"

    def __init__(self, settings: DecodeSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._batch: list[Sequence] = []
        self._finished: list[Sequence] = []  # out of the batch, terminal event not written yet
        self._work_to_do = asyncio.Event()
        self._to_write = asyncio.Event()
        self._overdue = asyncio.Event()  # an end, or a token of somebody silent for long, waits for no flush
        self._stepping = asyncio.Lock()
        self._counters: Counter[str] = Counter()
        self._write_back = WriteBack(
            settings.publish_decode, parts.transfer, parts.slots, parts.engine.spec.token_bytes
        )

    @property
    def capacity(self) -> int:
        """No more jobs than already run while one waits for KV memory: another worker may have room."""
        return 0 if self._parts.slots.waiting else self._settings.max_batch

    def counters(self) -> Counter[str]:
        return self._counters + self._write_back.counters + self._parts.transfer.store.counters

    @property
    def waits(self) -> bool:
        return True

    async def ready(self) -> bool:
        """Decode takes what it has room for; nothing comes after it that could be overrun."""
        return True

    async def work(self, running: Running) -> None:
        handoff = running.job.handoff
        if handoff is None:
            raise RequestFailed("the handoff is missing")
        self._check_model(handoff)
        sequence = await self._load(running, handoff)
        if sequence is None:
            return
        try:
            running.check()
            self._batch.append(sequence)
            self._work_to_do.set()
            await sequence.outcome
        finally:
            if sequence.finish_reason is None:
                await finished(self._leave(sequence))
            elif sequence in self._finished:
                self._finished.remove(sequence)  # the slot is the write-back's
        await self.ended(running.job)

    async def ended(self, job: Job) -> None:
        if job.handoff is not None:
            await self.drop_tail(job.handoff.tail_key)

    async def drop_tail(self, key: str) -> None:
        with suppress(RedisError):
            await self._parts.transfer.drop_tail(key)

    def _check_model(self, handoff: Handoff) -> None:
        spec = self._parts.engine.spec
        if handoff.fingerprint != spec.fingerprint or handoff.block_size != self._settings.block_size:
            raise RuntimeError(
                f"the prefill worker's model {handoff.fingerprint.hex()[:16]} with blocks of {handoff.block_size} "
                f"is not this worker's {spec.fingerprint.hex()[:16]} with blocks of {self._settings.block_size}"
            )

    async def _load(self, running: Running, handoff: Handoff) -> Sequence | None:
        """A sequence ready to join; None if its KV is gone and it went back to prefill."""
        job, parts = running.job, self._parts
        emitted = await parts.worker.queue.emitted(job)
        tokens = [*handoff.prompt, *emitted]
        if handoff.kv_length >= len(tokens):
            raise RuntimeError(f"KV of {handoff.kv_length} tokens does not go with {len(tokens)} known tokens")
        sampling, spec = job.request.sampling, parts.engine.spec
        generation = Generation(
            parts.tokenizer, sampling, spec.eos_ids, max_new_tokens(sampling, len(handoff.prompt), spec.max_model_len)
        )
        generation.replay(emitted)
        slot = await parts.slots.open(len(handoff.prompt) + generation.max_new, running)
        try:
            running.check()
            chain = parts.transfer.prefix(tokens[: handoff.kv_length], job.request)
            found = await parts.transfer.load(slot, chain, handoff, running.remaining)
            if found < handoff.kv_length and await self._sent_back(running, handoff.kv_length - found):
                parts.slots.close(slot)
                return None
            sequence = Sequence(running, handoff, slot, generation, tokens, chain)
            sequence.history = array("q", tokens) if sampling.counts_tokens else None
            sequence.drafter = self._drafter(job.request, tokens)
            return sequence
        except BaseException:
            parts.slots.close(slot)
            raise

    def _drafter(self, request: Request, tokens: list[int]) -> Drafter | None:
        wanted = self._settings.speculation if request.speculation is None else request.speculation
        return Drafter(tokens, self._settings.draft_tokens) if wanted == "ngram" else None

    async def _sent_back(self, running: Running, missing: int) -> bool:
        """KV of `missing` tokens is gone: is the job back in prefill (True), or to be gone on with here (False)?

        Raises RequestFailed if neither may be done.
        """
        self._counters["kv_missing"] += 1
        queue, policy = self._parts.worker.queue, self._settings.kv_miss
        short = policy != "fail" and missing <= self._settings.recompute_tokens
        if policy == "recompute" and short:
            self._counters["kv_recomputed"] += 1
            return False
        if policy != "fail" and await retried(running, lambda: queue.requeue(running.job)):
            self._counters["kv_requeued"] += 1
            await self.ended(running.job)  # for this handoff; there will be another with a tail of its own
            return True
        if short:
            self._counters["kv_recomputed"] += 1
            return False
        raise RequestFailed(f"the KV of {missing} tokens is gone, and --kv-miss {policy} leaves no other way")

    async def _leave(self, sequence: Sequence) -> None:
        """Out of the batch, between two steps: a slot is not closed under a running forward."""
        async with self._stepping:
            if sequence in self._batch:
                self._batch.remove(sequence)
            if sequence.finish_reason is None:  # else it has finished meanwhile
                self._parts.slots.close(sequence.slot)
            elif sequence in self._finished:
                self._finished.remove(sequence)

    async def close(self) -> None:
        await self._write_back.close()
        await self._parts.transfer.aclose()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._steps(), self._writes()]

    async def _steps(self) -> None:
        while True:
            if not self._batch:
                self._work_to_do.clear()
                await self._work_to_do.wait()
            async with self._stepping:
                await self._step()
            await asyncio.sleep(0)  # let those who wait to leave do so

    async def _step(self) -> None:
        for sequence in self._batch:
            try:
                sequence.running.check()
            except PdqError as e:
                sequence.end(e)
        self._batch = [s for s in self._batch if not s.outcome.done()]
        batch = list(self._batch)  # others join meanwhile
        segments = self._segments(batch)
        if not segments:
            return
        try:
            tokens = await self._forward(segments)
        except Exception:
            log.exception("a step over %d sequences failed; trying them one by one", len(batch))
            await self._step_alone(batch)
        else:
            for sequence, segment, token in zip(batch, segments, tokens, strict=True):
                self._advance(sequence, segment, token)
        if any(s.tokens for s in batch):
            self._to_write.set()
            if not self._patience():
                self._overdue.set()

    def _segments(self, batch: list[Sequence]) -> list[Segment]:
        """With drafts in the rows that the sequences leave free: more of them would slow everybody down."""
        left = self._settings.max_batch - sum(min(len(s.feed), REPLAY_CHUNK) for s in batch)
        if len(batch) == 1:
            left = self._settings.draft_tokens  # there is nobody else
        drafting, segments = sum(s.drafter is not None for s in batch), []
        for sequence in batch:
            room = 0
            if sequence.drafter is not None:
                room, drafting = -(-max(left, 0) // drafting), drafting - 1
            segments.append(sequence.segment(room))
            left -= segments[-1].drafts
        return segments

    async def _step_alone(self, batch: list[Sequence]) -> None:
        """A failed forward has changed no slot's length: whoever fails again, alone and without drafts, was the cause.

        Drafts end here for all of them: what a guess breaks must not be broken again.
        """
        for sequence in batch:
            sequence.drafter = None
            segment = sequence.segment()
            try:
                (token,) = await self._forward([segment])
            except Exception as e:
                log.exception("%s: its step fails", sequence.running.job.id)
                sequence.end(e)
            else:
                self._advance(sequence, segment, token)

    async def _forward(self, segments: list[Segment]) -> list[int | None]:
        """A step that is cancelled holds `_stepping` until its forward returns: the slots are closed after it."""
        forward = partial(self._parts.forward, segments, BORROWING, LEAVING)
        tokens = await in_thread(self._parts.compute, forward)
        drafted, accepted = sum(s.drafts for s in segments), sum(len(s.further or ()) for s in segments)
        self._counters.update(
            steps=1, tokens=len(segments) + accepted, drafted_tokens=drafted, accepted_tokens=accepted
        )
        self._parts.worker.leases.progress()
        return tokens

    def _advance(self, sequence: Sequence, segment: Segment, token: int | None) -> None:
        try:
            sequence.advance(segment, token)
        except Exception as e:
            log.exception("%s: its step failed", sequence.running.job.id)
            sequence.end(e)
            return
        if sequence.finish_reason is not None:
            self._batch.remove(sequence)
            self._finished.append(sequence)
            self._overdue.set()
            known = sequence.known[: sequence.slot.length]
            self._write_back.take(sequence.slot, known, sequence.chain, sequence.running.job.request)

    async def _writes(self) -> None:
        while True:
            await self._to_write.wait()
            self._to_write.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience()):
                    await self._overdue.wait()
            self._overdue.clear()
            await self._write([(s, s.event()) for s in self._due()])
            if _telling(self._batch):
                self._to_write.set()

    def _patience(self) -> float:
        """Seconds until somebody's tokens have to be written: at once if nobody has any but those that end."""
        oldest = min((s.silent_since for s in _telling(self._batch)), default=-math.inf)
        return max(oldest + self._settings.flush_ms / 1000 - time.monotonic(), 0.0)

    def _due(self) -> list[Sequence]:
        """Who has something to tell and has been silent for at least half the time between two flushes, or ends.

        Half, so that all who run are soon written together.
        """
        late = time.monotonic() - self._settings.flush_ms / 2000
        return [s for s in _telling(self._batch) if s.silent_since <= late] + _telling(self._finished)

    async def _write(self, writes: list[tuple[Sequence, Event]]) -> None:
        """Send events until Redis has them or refuses them, each job by its own outcome.

        Those that met an outage are sent again as they are: a token must not be cut into two events.
        """
        queue = self._parts.worker.queue
        while writes := [(s, e) for s, e in writes if not s.outcome.done()]:
            outcomes: list[str | RedisError]
            try:
                outcomes = await queue.write([(s.running.job, event) for s, event in writes])
            except RedisError as e:
                outcomes = [e] * len(writes)
            writes = [
                (sequence, event)
                for (sequence, event), outcome in zip(writes, outcomes, strict=True)
                if not _settled(sequence, event, outcome)
            ]
            if writes:
                await asyncio.sleep(RETRY_SECONDS)


def _settled(sequence: Sequence, event: Event, outcome: str | RedisError) -> bool:
    """Take in what became of an event; False if it has to be sent again."""
    running = sequence.running
    if isinstance(outcome, RedisError):
        if not is_outage(outcome):
            sequence.end(outcome)  # it would be refused again: the attempt has failed
        elif running.lapsed:
            running.note("lost")
            sequence.end(running.error())
        return sequence.outcome.done()
    running.note(outcome)
    if outcome in ("lost", "gap", "expired"):  # not written
        sequence.end(running.error())
    elif event.terminal:
        sequence.end(None)
    return True


def _telling(sequences: list[Sequence]) -> list[Sequence]:
    """Those that have something to tell."""
    return [s for s in sequences if s.tokens and not s.outcome.done()]


def main() -> None:
    run_program("decode", DecodeSettings, DecodeStage)


if __name__ == "__main__":
    main()
