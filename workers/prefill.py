"""The prefill worker: prompts in, KV blocks and first tokens out.

    request -> tokens -> longest stored prefix -> chunked forward of the rest -> blocks to Redis (one chunk behind the
    forward) -> token 0 to the reply stream -> handoff to decode; both at once if no KV is on its way any more

Each job is a task of its own; what they share is the forward, which takes chunks of several (`pdq.prefill_forwards`).
A request that ends with its first token (max_tokens 1, end of text, a stop string) never sees decode.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pdq import keys
from pdq.config import PrefillSettings
from pdq.connection import RedisError
from pdq.engine.base import Segment
from pdq.errors import ContextTooLong, InvalidRequest, ModelNotFound
from pdq.generation import Generation, max_new_tokens
from pdq.lease import Running
from pdq.messages import Event, Handoff, Request, Timings
from pdq.prefill_forwards import Chunk, Forwards, Prompt, work_of
from pdq.prefill_schedule import Work, room_for, usual_after
from pdq.program import Parts, run_program
from pdq.queue import Job
from pdq.short_path import ShortPath
from pdq.tasks import settled
from pdq.validate import check_sampling
from pdq.worker import retried

JOBS = 64  # in work at once: short prompts share forwards
UNSTORED = 8  # forwards' worth of tokens on their way to the store, at most, before the next job is taken
LEAST_PAUSE, LONGEST_PAUSE = 0.01, 0.1  # seconds between two looks for a job beside those in work
SHORT = 256  # estimated tokens of a prompt that is tokenized at once; a thread costs more than that
HELD_SECONDS = 0.05  # between two looks at what waits for decode


class PrefillStage:
    """Takes as many jobs as the next forward has room for, and tells each one's story from tokens to handoff."""

    name = "prefill"

    def __init__(self, settings: PrefillSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._forwards = Forwards(
            self._forward, parts.compute, parts.transfer, settings.chunk_tokens, parts.worker.more_room, self._known
        )
        self._works: dict[Running, Work] = {}  # of the jobs whose chunks are not all computed
        self._idle = asyncio.Event()  # when there are none
        self._idle.set()
        self._jobs: dict[Running, int] = {}  # all in work, with their tokens
        self._coming: dict[bytes, asyncio.Task[None]] = {}  # blocks on their way to the store
        self._short = ShortPath(settings.local_prefill_tokens, parts.worker.neighbours)
        self._usual = settings.chunk_tokens  # tokens of a prompt
        self._next_look = 0.0
        self._held = 0  # KV tokens that waited for decode after our last handoff
        self._most_held = settings.max_handoff_bytes // parts.engine.spec.token_bytes
        self._counters: Counter[str] = Counter()

    @property
    def capacity(self) -> int:
        """As many jobs more as would start with the next forward: none should wait here while others are idle."""
        budget = self._settings.chunk_tokens
        room = room_for((work.remaining for work in self._works.values()), budget, self._usual)
        unstored = len(self._coming) * self._settings.block_size
        if not room or self._parts.slots.waiting or unstored >= UNSTORED * budget:
            return len(self._jobs)
        return min(len(self._jobs) + room, JOBS)

    @property
    def waits(self) -> bool:
        return self._idle.is_set()

    async def ready(self) -> bool:
        """Not while decode has more handed-over KV to take than the limit allows; beside other jobs not at once."""
        coming = sum(self._jobs.values())
        if self._held + coming > self._most_held:
            await asyncio.sleep(HELD_SECONDS)
            self._held = await self._parts.worker.queue.held()
            return self._held + coming <= self._most_held
        pause = self._next_look - time.monotonic()
        if not self._idle.is_set() and pause > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._idle.wait()
            return False
        self._next_look = time.monotonic() + min(max(self._forwards.latest / 4, LEAST_PAUSE), LONGEST_PAUSE)
        return True

    async def close(self) -> None:
        await self._parts.transfer.aclose()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        return [self._forwards.run()]

    async def ended(self, job: Job) -> None:
        await self.drop_tail(keys.tail(job.id, job.attempt))

    async def drop_tail(self, key: str) -> None:
        with suppress(RedisError):
            await self._parts.transfer.drop_tail(key)

    def counters(self) -> Counter[str]:
        """Among them: prompt_tokens, cached_tokens, computed_tokens, forwards, and prefill_ms spent in forwards."""
        busy = Counter(prefill_ms=round(self._forwards.seconds * 1000))
        return self._counters + self._forwards.counters + busy + self._parts.transfer.store.counters

    async def work(self, running: Running) -> None:
        self._works[running] = work = work_of(running)
        self._jobs[running] = work.remaining
        self._usual = usual_after(self._usual, work.remaining)
        self._idle.clear()
        self._looked(work)
        try:
            await self._work(running, work)
        finally:
            del self._jobs[running]
            self._computed(running)

    def _looked(self, work: Work) -> None:
        """What was found may have room for more beside it; with long prompts others shall look before we do."""
        if work.remaining <= self._settings.chunk_tokens:
            self._next_look = 0.0
        self._parts.worker.more_room()

    def _computed(self, running: Running) -> None:
        self._works.pop(running, None)
        if not self._works:
            self._idle.set()
        self._parts.worker.more_room()

    async def _work(self, running: Running, work: Work) -> None:
        job, parts = running.job, self._parts
        tokens = await self._tokens(job.request)
        emitted = await parts.worker.queue.emitted(job)
        # Emitted tokens: an earlier attempt got so far, or decode lost the KV. All but the last have KV to be made.
        sequence = [*tokens, *emitted[:-1]]
        work.remaining = self._jobs[running] = len(sequence)
        chain = parts.transfer.prefix(sequence, job.request)
        slot = await parts.slots.open(len(sequence), running)
        prompt = Prompt(running, work, tokens, sequence, chain, slot, None if emitted else job.request.sampling)
        try:
            prompt.earlier = parts.worker.queue.first_usage(job)
            await self._load(prompt)
            if prompt.sampling is not None and await self._short.takes(prompt.work.remaining):
                await self._leave_to_decode(prompt)
            else:
                token = await self._compute(prompt)
                await self._deliver(prompt, token, _timings(prompt))
        finally:
            if prompt.storing is not None:
                prompt.storing.cancel()
            try:
                if prompt.exporting is not None:
                    await settled(prompt.exporting)
            finally:
                parts.slots.close(slot)

    async def _deliver(self, prompt: Prompt, token: int | None, timings: Timings) -> None:
        """First token out, blocks stored, job handed on; meanwhile others compute."""
        self._computed(prompt.running)
        self._counters.update(prompt_tokens=len(prompt.tokens), cached_tokens=prompt.cached)
        event = None if token is None else self._first_event(prompt, token, timings)
        if event is not None and (event.terminal or not self._hands_off_at_once(prompt)):
            ended = await self._show(prompt.running, event)
            await prompt.stored()
            if ended:
                await self._parts.transfer.end(prompt.chain)
                return
            event = None
        await prompt.stored()
        await self._hand_off(prompt, timings, event)

    def _hands_off_at_once(self, prompt: Prompt) -> bool:
        """Is there no KV for whose way to the store token 0 would have to wait?"""
        done = prompt.storing is None or prompt.storing.done()
        return done and self._parts.transfer.is_small(prompt.chain)

    async def _leave_to_decode(self, prompt: Prompt) -> None:
        """Hand the job on without token 0, and with no KV but what the store had."""
        self._computed(prompt.running)
        self._counters.update(prompt_tokens=len(prompt.tokens), cached_tokens=prompt.cached, short_paths=1)
        prompt.began = time.monotonic()
        await self._hand_off(prompt, _timings(prompt))

    async def _tokens(self, request: Request) -> list[int]:
        if request.cost <= SHORT:
            return self._tokenize(request)
        return await asyncio.to_thread(self._tokenize, request)

    def _tokenize(self, request: Request) -> list[int]:
        """The prompt's token ids, checked against the model: the SDK submits without the gateway."""
        spec, tokenizer = self._parts.engine.spec, self._parts.tokenizer
        if request.model and request.model != self._parts.worker.model:
            raise ModelNotFound(f"model: this pool serves {self._parts.worker.model!r}", param="model")
        if request.token_ids is not None:
            tokens, field = list(request.token_ids), "token_ids"
        elif request.messages is not None:
            tokens, field = tokenizer.encode_chat(request.messages), "messages"
        else:
            tokens, field = tokenizer.encode(request.prompt or ""), "prompt"
        if not tokens:
            raise InvalidRequest(f"{field}: holds no tokens", param=field)
        if max(tokens) >= spec.vocab_size or min(tokens) < 0:
            raise InvalidRequest(f"{field}: token ids must be below {spec.vocab_size}", param=field)
        check_sampling(request.sampling, spec.vocab_size, spec.eos_ids)
        wanted = request.sampling.max_tokens or max(request.sampling.min_tokens, 1)
        if len(tokens) + wanted > spec.max_model_len:
            raise ContextTooLong(
                f"{field}: {len(tokens)} prompt tokens and {wanted} new ones are over the context of "
                f"{spec.max_model_len} tokens",
                param=field,
            )
        return tokens

    async def _compute(self, prompt: Prompt) -> int | None:
        """Forward what the store does not have, chunk by chunk, storing chunk i while chunk i+1 computes.

        The token that follows, if it is wanted. The last chunk may still be on its way to the store.
        """
        token: int | None = None
        while prompt.slot.length < len(prompt.sequence):
            prompt.running.check()
            chunk = await self._forwards.next_chunk(prompt)
            if chunk is None:
                await self._look_again(prompt)
                continue
            token, prompt.exporting = chunk.token, chunk.blocks
            if prompt.slot.length < len(prompt.sequence):
                await prompt.stored()  # one chunk's bytes at a time: a slow Redis slows prefill and fills no memory
            size = self._settings.block_size
            hashes = prompt.chain.hashes[chunk.start // size : prompt.slot.length // size]
            if not hashes:
                continue
            prompt.storing = asyncio.create_task(self._store(prompt, chunk, prompt.storing))
            self._coming |= dict.fromkeys(hashes, prompt.storing)
            prompt.storing.add_done_callback(partial(self._stored, hashes))
        return token

    def _forward(self, segments: Sequence[Segment]) -> list[int | None]:
        handing_over = len(self._jobs) > len(self._works)  # decode will want its cores in a moment
        tokens = self._parts.forward(segments, len(segments) + handing_over)
        self._parts.worker.leases.progress()
        return tokens

    def _known(self, block_hash: bytes) -> bool:
        return block_hash in self._coming or self._parts.transfer.store.holds(block_hash)

    async def _look_again(self, prompt: Prompt) -> None:
        """Take what another prompt with the same beginning has computed, as soon as it is stored."""
        prompt.sought = prompt.chain.stored
        if coming := self._coming.get(prompt.chain.hashes[prompt.sought]):
            await asyncio.wait([coming])
        await self._load(prompt)

    async def _load(self, prompt: Prompt) -> None:
        """Take the longest stored prefix, as far as the slot does not hold it."""
        most = len(prompt.sequence) - 1
        found = await self._parts.transfer.load_prefix(prompt.slot, prompt.chain, most, prompt.running.remaining)
        prompt.cached = min(found, len(prompt.tokens))
        prompt.work.remaining = len(prompt.sequence) - found
        self._parts.worker.more_room()

    async def _store(self, prompt: Prompt, chunk: Chunk, before: asyncio.Task[None] | None) -> None:
        """Publish a chunk's blocks after those before them."""
        if before is not None:
            await before
        first = chunk.start // self._settings.block_size * self._settings.block_size
        blocks = await asyncio.shield(chunk.blocks)  # which others wait for too
        await self._parts.transfer.publish(blocks, first, prompt.chain, prompt.running.remaining)

    def _stored(self, hashes: Sequence[bytes], _task: asyncio.Task[None]) -> None:
        for block_hash in hashes:
            self._coming.pop(block_hash, None)
        self._parts.worker.more_room()

    def _first_event(self, prompt: Prompt, token: int, timings: Timings) -> Event:
        """Token 0, as clients see it."""
        sampling, spec = prompt.running.job.request.sampling, self._parts.engine.spec
        most = max_new_tokens(sampling, len(prompt.tokens), spec.max_model_len)
        generation = Generation(self._parts.tokenizer, sampling, spec.eos_ids, most)
        step = generation.push(token)
        logprobs = generation.logprobs(prompt.scores)
        return Event(0, (token,), step.text, step.finish_reason, prompt.usage, timings, logprobs=logprobs)

    async def _show(self, running: Running, event: Event) -> bool:
        """Make token 0 visible; True if it also ended the request."""
        verdict = await retried(running, lambda: self._parts.worker.queue.write_one(running.job, event))
        running.note(verdict)
        running.check()
        return event.terminal

    async def _hand_off(self, prompt: Prompt, timings: Timings, event: Event | None = None) -> None:
        """event: token 0, if it is not visible yet."""
        job, spec = prompt.running.job, self._parts.engine.spec
        key, tail, stored = await self._store_tail(prompt)
        handoff = Handoff(
            prompt=tuple(prompt.tokens), kv_length=stored, fingerprint=spec.fingerprint,
            block_size=self._settings.block_size, tail_key=key,
            cached_tokens=prompt.usage.cached_tokens, timings=timings, tail=tail,
        )  # fmt: skip
        self._held = await retried(prompt.running, lambda: self._parts.worker.queue.hand_off(job, handoff, event))

    async def _store_tail(self, prompt: Prompt) -> tuple[str, bytes, int]:
        """The tail's key, or the tail, and how many tokens have KV in all: fewer than all if Redis had no room."""
        chain, transfer, job = prompt.chain, self._parts.transfer, prompt.running.job
        if prompt.slot.length < chain.length or chain.stored < len(chain.hashes):
            return "", b"", chain.stored * self._settings.block_size
        if chain.length == chain.full:
            return "", b"", chain.length
        if transfer.is_small(chain):
            return "", bytes(transfer.tail(prompt.slot, chain)), chain.length
        key = keys.tail(job.id, job.attempt)
        if await transfer.publish_tail(key, prompt.slot, chain, prompt.running.remaining):
            return key, b"", chain.length
        return "", b"", chain.full


def _timings(prompt: Prompt) -> Timings:
    """Of a prompt whose last chunk has just been computed: from its first chunk on it was in prefill."""
    running, now = prompt.running, time.monotonic()
    waited = running.job.timings.queue_ms + (prompt.began - running.claimed) * 1000
    return replace(running.job.timings, queue_ms=waited, prefill_ms=(now - prompt.began) * 1000)


def main() -> None:
    run_program("prefill", PrefillSettings, PrefillStage)


if __name__ == "__main__":
    main()
