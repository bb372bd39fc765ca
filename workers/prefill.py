"""The prefill worker: prompts in, KV blocks and first tokens out.

    request -> tokens -> longest stored prefix -> chunked forward of the rest -> blocks to Redis (one chunk behind the
    forward) -> token 0 to the reply stream -> handoff to decode

A request that ends with its first token (max_tokens 1, end of text, a stop string) never sees decode.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pdq import keys
from pdq.config import PrefillSettings
from pdq.connection import RedisError
from pdq.engine.base import Scores, Segment, Slot
from pdq.errors import ContextTooLong, InvalidRequest, ModelNotFound
from pdq.generation import Generation, max_new_tokens
from pdq.kv_transfer import Prefix, in_thread
from pdq.lease import Running
from pdq.messages import Event, Handoff, Request, SamplingParams, Timings, Usage
from pdq.program import Parts, run_program
from pdq.queue import Job
from pdq.validate import check_sampling
from pdq.worker import retried

T = TypeVar("T")
JOBS = 8  # one computes; the others still store their last blocks and hand off
HELD_SECONDS = 0.05  # between two looks at what waits for decode


@dataclass(slots=True)
class Prompt:
    """A prompt in work. sequence: the tokens whose KV is to be there in the end, `chain` their hashes."""

    running: Running
    tokens: list[int]
    sequence: list[int]
    chain: Prefix
    slot: Slot
    sampling: SamplingParams | None  # how to sample the token that follows; None if it is known already
    cached: int = 0  # prompt tokens whose KV was in the store
    earlier: Usage | None = None  # as the attempt that made token 0 visible counted
    storing: asyncio.Task[None] | None = None  # of the latest chunk's blocks
    scores: list[Scores] = field(default_factory=list)  # of that token, if they are wanted

    @property
    def usage(self) -> Usage:
        """As of token 0. A later attempt finds the blocks of the first one, which were no hits."""
        return self.earlier or Usage(len(self.tokens), 1, self.cached)

    async def stored(self) -> None:
        """Wait until the blocks exported so far are in the store. Raises RedisError."""
        if self.storing is not None:
            await self.storing


class PrefillStage:
    """Computes one prompt at a time."""

    name = "prefill"

    def __init__(self, settings: PrefillSettings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._turn = asyncio.Lock()
        self._computed = 0  # jobs in work whose forwards are done
        self._held = 0  # KV tokens that waited for decode after our last handoff
        self._most_held = settings.max_handoff_bytes // parts.engine.spec.token_bytes
        self._counters: Counter[str] = Counter()

    @property
    def capacity(self) -> int:
        """One job to compute, no more: a job claimed here would wait while another worker may be idle."""
        return min(1 + self._computed, JOBS)

    async def ready(self) -> bool:
        """Not while decode has more handed-over KV to take than the limit allows."""
        if self._held > self._most_held:
            await asyncio.sleep(HELD_SECONDS)
            self._held = await self._parts.worker.queue.held()
        return self._held <= self._most_held

    async def close(self) -> None:
        self._parts.transfer.close()

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        return []

    async def ended(self, job: Job) -> None:
        await self.drop_tail(keys.tail(job.id, job.attempt))

    async def drop_tail(self, key: str) -> None:
        with suppress(RedisError):
            await self._parts.transfer.drop_tail(key)

    def counters(self) -> Counter[str]:
        return self._counters + self._parts.transfer.store.counters

    async def work(self, running: Running) -> None:
        job, parts = running.job, self._parts
        tokens = await asyncio.to_thread(self._tokenize, job.request)
        emitted = await parts.worker.queue.emitted(job)
        # Emitted tokens: an earlier attempt got so far, or decode lost the KV. All but the last have KV to be made.
        sequence = [*tokens, *emitted[:-1]]
        chain = parts.transfer.prefix(sequence, job.request)
        slot = await parts.slots.open(len(sequence), running)
        prompt = Prompt(running, tokens, sequence, chain, slot, None if emitted else job.request.sampling)
        try:
            prompt.earlier = await parts.worker.queue.first_usage(job)
            async with self._turn:
                started = time.monotonic()
                token = await self._compute(prompt)
            await self._deliver(prompt, token, replace(job.timings, prefill_ms=(time.monotonic() - started) * 1000))
        finally:
            if prompt.storing is not None:
                prompt.storing.cancel()
            parts.slots.close(slot)

    async def _deliver(self, prompt: Prompt, token: int | None, timings: Timings) -> None:
        """First token out, blocks stored, job handed on; meanwhile the next prompt may compute."""
        self._computed += 1
        self._parts.worker.more_room()
        busy = round(timings.prefill_ms)
        self._counters.update(prompt_tokens=len(prompt.tokens), cached_tokens=prompt.cached, prefill_ms=busy)
        try:
            ended = token is not None and await self._first_token(prompt, token, timings)
            await prompt.stored()
            if ended:
                await self._parts.transfer.end(prompt.chain)
            else:
                await self._hand_off(prompt, timings)
        finally:
            self._computed -= 1

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
        slot, length, transfer = prompt.slot, len(prompt.sequence), self._parts.transfer
        found = await transfer.load_prefix(slot, prompt.chain, length - 1, prompt.running.remaining)
        prompt.cached = min(found, len(prompt.tokens))
        token: int | None = None
        while slot.length < length:
            prompt.running.check()
            at = slot.length
            chunk = prompt.sequence[at : at + self._settings.chunk_tokens]
            sampling = prompt.sampling if at + len(chunk) == length else None
            segment = Segment(slot, chunk, sampling, 0, prompt.tokens, prompt.scores)
            token, blocks = await self._on_engine(partial(self._forward, segment, prompt.chain, at))
            if segment.sample is not None and token is None:
                raise RuntimeError("the model's logits are not finite")  # and its KV is not to be stored
            await prompt.stored()  # one chunk's bytes at a time: a slow Redis slows prefill and fills no memory
            first = at // self._settings.block_size * self._settings.block_size
            prompt.storing = asyncio.create_task(
                transfer.publish(blocks, first, prompt.chain, prompt.running.remaining)
            )
        return token

    def _forward(self, segment: Segment, chain: Prefix, at: int) -> tuple[int | None, list[tuple[bytes, memoryview]]]:
        (token,) = self._parts.forward([segment])
        self._parts.worker.leases.progress()
        return token, self._parts.transfer.export(segment.slot, chain, at, segment.slot.length)

    async def _first_token(self, prompt: Prompt, token: int, timings: Timings) -> bool:
        """Make token 0 visible; True if it also ended the request."""
        running, spec = prompt.running, self._parts.engine.spec
        sampling = running.job.request.sampling
        most = max_new_tokens(sampling, len(prompt.tokens), spec.max_model_len)
        generation = Generation(self._parts.tokenizer, sampling, spec.eos_ids, most)
        step = generation.push(token)
        logprobs = generation.logprobs(prompt.scores)
        event = Event(0, (token,), step.text, step.finish_reason, prompt.usage, timings, logprobs=logprobs)
        (verdict,) = await retried(running, lambda: self._parts.worker.queue.write([(running.job, event)]))
        running.note(verdict)
        running.check()
        return event.terminal

    async def _hand_off(self, prompt: Prompt, timings: Timings) -> None:
        job, spec = prompt.running.job, self._parts.engine.spec
        key, stored = await self._store_tail(prompt)
        handoff = Handoff(
            prompt=tuple(prompt.tokens), kv_length=stored, fingerprint=spec.fingerprint,
            block_size=self._settings.block_size, tail_key=key,
            cached_tokens=prompt.usage.cached_tokens, timings=timings,
        )  # fmt: skip
        self._held = await retried(prompt.running, lambda: self._parts.worker.queue.hand_off(job, handoff))

    async def _store_tail(self, prompt: Prompt) -> tuple[str, int]:
        """The tail's key, and how many tokens have KV in the store: fewer than all if Redis had no room."""
        chain, transfer, job = prompt.chain, self._parts.transfer, prompt.running.job
        if chain.stored < len(chain.hashes):
            return "", chain.stored * self._settings.block_size
        tail = await self._on_engine(partial(transfer.export_tail, prompt.slot, chain))
        if tail is None:
            return "", chain.length
        key = keys.tail(job.id, job.attempt)
        if await transfer.publish_tail(key, tail, chain, prompt.running.remaining):
            return key, chain.length
        return "", chain.full

    async def _on_engine(self, call: partial[T]) -> T:
        return await in_thread(self._parts.compute, call)


def main() -> None:
    run_program("prefill", PrefillSettings, PrefillStage)


if __name__ == "__main__":
    main()
