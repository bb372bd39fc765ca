"""An in-memory stand-in for `pdq.client.AsyncClient`: what a pool answers is a script, what it was asked is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdq.client import Result
from pdq.errors import InvalidRequest, PdqError, Unavailable
from pdq.messages import Event, Message, SamplingParams, Timings, Usage, WorkerInfo
from pdq.text import ByteTokenizer
from pdq.validate import make_sampling

MODEL = "org/test-model"
CONTEXT = 512
TIMINGS = Timings(queue_ms=1.5, prefill_ms=20.0, handoff_ms=3.0, decode_ms=40.25)
PIECES = ("Hel", "lo, ", "", "wörld 👋", ' "quoted"\n')
TEXT = "".join(PIECES)

# An Event is sent, an exception raised, an asyncio.Event waited for.
Step = Event | PdqError | asyncio.Event


def spoken(
    pieces: Sequence[str] = PIECES,
    prompt_tokens: int = 0,
    *,
    reason: str = "stop",
    cached: int = 0,
    last: str = "",
) -> list[Event]:
    """The events of an answer: one a piece, then the terminal one with `last`."""
    events = [Event(n, (n,), text, timings=TIMINGS if n == 0 else None) for n, text in enumerate(pieces)]
    usage = Usage(prompt_tokens, len(pieces) + bool(last), cached)
    return [*events, Event(len(pieces), text=last, finish_reason=reason, usage=usage, timings=TIMINGS)]


@dataclass(eq=False)
class Asked:
    """One submit."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    options: dict[str, Any]
    given: dict[str, Any]

    @property
    def prompt(self) -> str:
        return ByteTokenizer().decode(self.token_ids)


class FakeHandle:
    def __init__(self, request_id: str, steps: list[Step], linger: float = 0.0) -> None:
        self.id = request_id
        self._linger = linger
        self.cancelled = asyncio.Event()
        self.reading = asyncio.Event()
        self.closed = asyncio.Event()
        self._steps = steps

    async def stream(self, after: int = 0) -> AsyncGenerator[Event, None]:
        self.reading.set()
        try:
            for step in self._steps:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            await asyncio.sleep(self._linger)
            self.closed.set()

    async def result(self, timeout: float | None = None) -> Result:
        text, ids, logprobs = "", (), ()
        async for event in self.stream():
            text += event.text
            ids += event.token_ids
            logprobs += event.logprobs
        return Result(self.id, text, ids, event.finish_reason, event.usage, event.timings, logprobs)

    async def cancel(self) -> bool:
        self.cancelled.set()
        return True


@dataclass(eq=False)
class FakeClient:
    """script: the steps of the answer to a request; refuse: what submit raises; gate: what submit waits for.

    linger: seconds it takes to stop reading a reply.
    """

    script: Callable[[Asked], list[Step]] = lambda asked: spoken(prompt_tokens=len(asked.token_ids))
    workers_now: list[WorkerInfo] = field(default_factory=list)
    refuse: PdqError | None = None
    down: Unavailable | None = None
    gate: asyncio.Event | None = None
    asked: list[Asked] = field(default_factory=list)
    handles: list[FakeHandle] = field(default_factory=list)
    looks: int = 0
    linger: float = 0.0

    async def submit(self, **given: Any) -> FakeHandle:
        if self.gate is not None:
            await self.gate.wait()
        if self.refuse is not None:
            raise self.refuse
        named = ("model", "timeout", "queue_timeout", "idempotency_key", "tenant", "cache", "cache_salt", "speculation")
        options = {f: given[f] for f in named if f in given}
        sampling = make_sampling({k: v for k, v in given.items() if k not in options and k != "token_ids"})
        asked = Asked(tuple(given["token_ids"]), sampling, options, given)
        self.asked.append(asked)
        handle = FakeHandle(f"r{len(self.asked) - 1}", self.script(asked), self.linger)
        self.handles.append(handle)
        return handle

    async def workers(self) -> list[WorkerInfo]:
        self.looks += 1
        if self.down is not None:
            raise self.down
        return list(self.workers_now)


class RefusingTokenizer(ByteTokenizer):
    """A template that wants a strict user/assistant order, as Mistral's."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if [m.role for m in messages] != ["user", "assistant"] * (len(messages) // 2) + ["user"]:
            raise InvalidRequest(
                "Conversation roles must alternate user/assistant/user/assistant/...", param="messages"
            )
        return super().encode_chat(messages)


def worker(stage: str, *, model: str = MODEL, context: int = CONTEXT, state: str = "ready") -> WorkerInfo:
    return WorkerInfo(f"{stage}-1", stage, model, b"f" * 32, context, state, numerics="fused avx2")


def both() -> list[WorkerInfo]:
    return [worker("prefill"), worker("decode")]
