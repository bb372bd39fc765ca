"""The forwards of a prefill worker: chunks of several prompts in one, each with its own outcome.

A prompt's task asks for its next chunk and sleeps; the loop here takes what `prefill_schedule` puts together, computes
it in the engine's thread and wakes those it belongs to. A forward that fails is tried again prompt by prompt, so that
only the cause fails; whoever is cancelled, late or fenced leaves before the next forward. No torch, no Redis.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from pdq.engine.base import Scores, Segment, Slot
from pdq.errors import PdqError
from pdq.kv_transfer import Blocks, KVTransfer, Prefix, in_thread
from pdq.lease import Running
from pdq.messages import LANES, SamplingParams, Usage
from pdq.prefill_schedule import Schedule, Work
from pdq.tasks import settled

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Prompt:
    """A prompt in work. sequence: the tokens whose KV is to be there in the end, `chain` their hashes."""

    running: Running
    work: Work
    tokens: list[int]
    sequence: list[int]
    chain: Prefix
    slot: Slot
    sampling: SamplingParams | None  # how to sample the token that follows; None if it is known already
    cached: int = 0  # prompt tokens whose KV was in the store
    sought: int = -1  # blocks that were there when more were last looked for
    earlier: Usage | None = None  # as the attempt that made token 0 visible counted
    began: float = 0.0  # when its first chunk did, by time.monotonic()
    exporting: asyncio.Future[Blocks] | None = None  # of the latest chunk
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

    def segment(self, count: int) -> Segment:
        """Its next `count` tokens."""
        start = self.slot.length
        sampling = self.sampling if start + count == len(self.sequence) else None
        return Segment(self.slot, self.sequence[start : start + count], sampling, 0, self.tokens, self.scores)


def work_of(running: Running) -> Work:
    """As far as one can tell before the prompt is tokenized."""
    request = running.job.request
    return Work(LANES.index(request.lane), request.cost)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A computed chunk: where it began, the token after it if that was wanted, and, soon, the blocks that it filled."""

    start: int
    token: int | None
    blocks: asyncio.Future[Blocks]


@dataclass(eq=False, slots=True)
class _Turn:
    """A prompt that waits for its next chunk, or whose chunk is being computed."""

    prompt: Prompt
    done: asyncio.Future[Chunk | None]
    blocks: asyncio.Future[Blocks]
    segment: Segment | None = None
    computing: asyncio.Future[list[Blocks | Exception]] | None = None

    def lacks(self, token: int | None) -> bool:
        return token is None and self.segment is not None and self.segment.sample is not None

    def tell(self, start: int, token: int | None) -> None:
        """What the forward gave, from token `start` on; the blocks come later."""
        if self.lacks(token):
            self.end(RuntimeError("the model's logits are not finite"))
        else:
            self.end(Chunk(start, token, self.blocks))

    def take(self, blocks: Blocks | Exception) -> None:
        if isinstance(blocks, Exception):
            self.blocks.set_exception(blocks)
            self.blocks.exception()  # whoever has gone meanwhile does not miss it
        else:
            self.blocks.set_result(blocks)

    def end(self, outcome: Chunk | Exception | None) -> None:
        if self.done.done():
            return  # cancelled
        if isinstance(outcome, Exception):
            self.done.set_exception(outcome)
        else:
            self.done.set_result(outcome)


class Forwards:
    """forward: computes segments in `thread`, one token or None for each. budget: tokens of one forward.
    begins: called when a forward does: what is in it waits no longer, and there is room for more in the next one.
    known: is this block in the store, or on its way there, as far as this worker knows?

    counters: forwards, tokens computed. seconds: spent computing, exports included. latest: seconds of the last one.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Segment]], list[int | None]],
        thread: ThreadPoolExecutor,
        transfer: KVTransfer,
        budget: int,
        begins: Callable[[], None],
        known: Callable[[bytes], bool],
    ) -> None:
        self._forward = forward
        self._thread = thread
        self._transfer = transfer
        self._budget = budget
        self._begins = begins
        self._known = known
        self._schedule = Schedule()
        self._turns: dict[Work, _Turn] = {}
        self._asked = asyncio.Event()
        self.counters: Counter[str] = Counter()
        self.seconds = self.latest = 0.0

    async def next_chunk(self, prompt: Prompt) -> Chunk | None:
        """Compute some of what the prompt's slot lacks; None if more of its prefix is in the store by now.

        Raises why the prompt should stop, or what failed for it alone.
        """
        loop = asyncio.get_running_loop()
        turn = _Turn(prompt, loop.create_future(), loop.create_future())
        self._turns[prompt.work] = turn
        prompt.work.remaining = len(prompt.sequence) - prompt.slot.length
        self._schedule.add(prompt.work)
        self._asked.set()
        try:
            return await turn.done
        except asyncio.CancelledError:
            self._drop(turn)
            if turn.computing is not None:  # whoever gives up closes the slot
                await settled(turn.computing)
            raise

    async def run(self) -> None:
        """Compute what is asked for, for ever."""
        while True:
            self._dismiss()
            if turns := self._choose():
                await self._compute(turns)
            elif not self._turns:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(0)  # those whose chunk is done ask for the next one

    def _drop(self, turn: _Turn) -> None:
        self._schedule.remove(turn.prompt.work)
        self._turns.pop(turn.prompt.work, None)

    def _dismiss(self) -> None:
        """Those that should stop, and those that need not compute what others have computed meanwhile."""
        for turn in list(self._turns.values()):
            try:
                turn.prompt.running.check()
            except PdqError as e:
                self._drop(turn)
                turn.end(e)
            else:
                if self._behind(turn.prompt):
                    self._drop(turn)
                    turn.end(None)

    def _behind(self, prompt: Prompt) -> bool:
        """Has the prompt computed nothing yet, and need not compute the next block of its chain?"""
        there, usable = prompt.chain.stored, (len(prompt.sequence) - 1) // self._transfer.block_size
        if prompt.began or there == prompt.sought or there >= usable:
            return False
        return self._known(prompt.chain.hashes[there])

    def _choose(self) -> list[_Turn]:
        turns = []
        for work, count in self._schedule.next_chunks(self._budget):
            turn = self._turns.pop(work)
            turn.segment = turn.prompt.segment(count)
            turn.prompt.began = turn.prompt.began or time.monotonic()
            turns.append(turn)
        return turns

    async def _compute(self, turns: list[_Turn]) -> None:
        try:
            await self._in_one(turns)
        except Exception as e:
            if len(turns) == 1:
                turns[0].end(e)
            else:
                log.exception("a forward over %d prompts failed; trying them one by one", len(turns))
                await self._one_by_one(turns)

    async def _one_by_one(self, turns: list[_Turn]) -> None:
        """A failed forward has changed no slot's length: whoever fails again when alone was the cause."""
        for turn in turns:
            if not turn.done.done():
                try:
                    await self._in_one([turn])
                except Exception as e:
                    log.exception("%s: its forward fails", turn.prompt.running.job.id)
                    turn.end(e)

    async def _in_one(self, turns: list[_Turn]) -> None:
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        computing = asyncio.ensure_future(in_thread(self._thread, lambda: self._computed(turns, loop)))
        for turn in turns:
            turn.computing = computing
        self._begins()
        try:
            exported = await computing
        except asyncio.CancelledError:  # a failed forward has told nobody of blocks, and is tried again
            for turn in turns:
                turn.blocks.cancel()
            raise
        for turn, blocks in zip(turns, exported, strict=True):
            turn.take(blocks)
        self.latest = time.monotonic() - began
        self.seconds += self.latest
        self.counters.update(forwards=1, computed_tokens=sum(len(t.segment.token_ids) for t in turns if t.segment))

    def _computed(self, turns: list[_Turn], loop: asyncio.AbstractEventLoop) -> list[Blocks | Exception]:
        """A forward, then the blocks that it filled: token 0 does not wait for those."""
        segments = [turn.segment for turn in turns if turn.segment is not None]
        starts = [segment.slot.length for segment in segments]
        tokens = self._forward(segments)
        for turn, start, token in zip(turns, starts, tokens, strict=True):
            loop.call_soon_threadsafe(turn.tell, start, token)
        return [self._exported(*each) for each in zip(turns, segments, starts, tokens, strict=True)]

    def _exported(self, turn: _Turn, segment: Segment, start: int, token: int | None) -> Blocks | Exception:
        if turn.lacks(token):
            return []  # its KV is not to be stored
        try:
            return self._transfer.export(segment.slot, turn.prompt.chain, start, segment.slot.length)
        except Exception as e:
            log.exception("%s: its blocks cannot be exported", turn.prompt.running.job.id)
            return e
