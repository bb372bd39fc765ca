"""Which workers live: asked from Redis at most once a second, however many requests want to know.

Requests are only queued when both stages have a live worker of the gateway's model; otherwise nobody would answer
them. None is refused for what was seen before it came: a worker may have come since. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdq.errors import Unavailable
from pdq.gateway.errors import NoWorker
from pdq.gateway.prefill_rate import PrefillRate
from pdq.messages import WorkerInfo
from pdq.tasks import cancelled

if TYPE_CHECKING:
    from pdq.client import AsyncClient

FRESH_SECONDS = 1.0
AGAIN_SECONDS = 0.1  # at least, from one look to the next, for requests that would be refused
WAIT_SECONDS = 2.0  # a Redis that swallows packets must not hold a client for the length of its socket timeouts
STAGES = ("prefill", "decode")
Asked = asyncio.Task[list[WorkerInfo] | Unavailable]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Live workers of one model. max_model_len: the smallest context among them, in tokens; None without workers.

    others: names of further models that workers of this pool serve (a mistake in the setup). numerics: the workers'
    numerics ids; with more than one, near ties may end differently, depending on who computes a request.
    """

    prefill: int = 0
    decode: int = 0
    max_model_len: int | None = None
    others: tuple[str, ...] = ()
    numerics: tuple[str, ...] = ()

    @classmethod
    def of(cls, workers: Iterable[WorkerInfo], model: str) -> Snapshot:
        live = [w for w in workers if w.state == "ready"]
        ours = [w for w in live if w.model == model]
        return cls(
            prefill=sum(w.stage == "prefill" for w in ours),
            decode=sum(w.stage == "decode" for w in ours),
            max_model_len=min((w.max_model_len for w in ours), default=None),
            others=tuple(sorted({w.model for w in live} - {model})),
            numerics=tuple(sorted({w.numerics for w in ours} - {""})),
        )

    @property
    def missing(self) -> list[str]:
        """Stages without a live worker."""
        return [stage for stage in STAGES if not getattr(self, stage)]


class PoolView:
    """The pool as this gateway last saw it. rate: of prefill, as of the last look."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._asked: Asked | None = None
        self._asked_at = 0.0
        self.rate = PrefillRate()

    async def look(self, model: str) -> Snapshot:
        """The live workers of `model`, as of FRESH_SECONDS ago at most. Raises Unavailable when Redis does not tell."""
        asked = self._asked
        if asked is None or (asked.done() and self._clock() - self._asked_at >= FRESH_SECONDS):
            asked = self._ask_now()
        return await self._answer(asked, model)

    async def serving(self, model: str) -> Snapshot:
        """As `look`, for a request that is about to be queued. Raises NoWorker when a stage has nobody."""
        came = self._clock()
        snapshot = await self.look(model)
        if snapshot.missing:
            snapshot = await self._look_after(came, model)
        if missing := snapshot.missing:
            text = f"No live {' and no live '.join(missing)} worker serves {model!r}."
            if snapshot.others:
                text += f" This pool's workers serve {', '.join(map(repr, snapshot.others))}."
            raise NoWorker(text)
        return snapshot

    async def aclose(self) -> None:
        if self._asked is not None:
            await cancelled([self._asked])

    async def _look_after(self, moment: float, model: str) -> Snapshot:
        """The live workers as of an answer that was asked for after `moment`; all who wait share one."""
        while (asked := self._asked) is None or self._asked_at < moment:
            early = self._asked_at + AGAIN_SECONDS - self._clock()
            if early > 0:
                await asyncio.sleep(early)
            elif asked is None or asked.done():
                self._ask_now()
            else:
                await asyncio.wait({asked})
        return await self._answer(asked, model)

    def _ask_now(self) -> Asked:
        self._asked_at = self._clock()
        self._asked = asyncio.create_task(self._ask(), name="pdq-pool-view")
        return self._asked

    async def _answer(self, asked: Asked, model: str) -> Snapshot:
        await asyncio.wait({asked})  # not cancelled with us: others wait for the same answer
        found = asked.result()
        if isinstance(found, Unavailable):
            raise Unavailable(found.message, retry_after=found.retry_after)
        return Snapshot.of(found, model)

    async def _ask(self) -> list[WorkerInfo] | Unavailable:
        """An error is a result here: nobody may be left to collect an exception."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                found = await self._client.workers()
            self.rate.note(found, self._clock())
            return found
        except TimeoutError:
            return Unavailable(f"Redis did not answer within {WAIT_SECONDS:g} s")
        except Unavailable as e:
            return e
