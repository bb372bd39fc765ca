"""One running completion in a decode batch: what to feed the engine next, and what of its tokens is still to be told.

Used by the decode worker alone, which owns the batch; knows the job, its slot and its text, not the queue or the store.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from itertools import islice

from pdq.drafts import Drafter
from pdq.engine.base import Scores, Segment, Slot
from pdq.generation import Generation
from pdq.kv_transfer import Prefix
from pdq.lease import Running
from pdq.messages import Event, Handoff, Timings, Usage

REPLAY_CHUNK = 64  # tokens recomputed in one step (after a take-over, or lost KV), so that the others do not stutter


class Sequence:
    """One running completion.

    known: tokens of prompt and completion; `feed` those of them whose KV is not there yet, the last of which gives the
    next token. chain: of the tokens whose KV came from prefill.
    """

    def __init__(
        self, running: Running, handoff: Handoff, slot: Slot, generation: Generation, known: list[int], chain: Prefix
    ) -> None:
        self.running = running
        self.handoff = handoff
        self.slot = slot
        self.generation = generation
        self.known = known
        self.feed = known[slot.length :]
        self.chain = chain
        self.sent = generation.count  # tokens in events that were made
        self.tokens: list[int] = []  # sampled since
        self.scores: list[Scores] = []  # of those, if they are wanted
        self.history: array[int] | None = None  # prompt and completion, if they are wanted
        self.drafter: Drafter | None = None  # if the request wants one
        self.text = ""
        self.finish_reason: str | None = None
        self.joined = time.monotonic()
        # When the latest event was made, and the latest with text; if by prefill, about then. What is first is late.
        self._told = self._shown = running.claimed - running.job.timings.handoff_ms / 1000 if self.sent else -math.inf
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def segment(self, room: int = 0) -> Segment:
        """What to compute next. room: for how many drafts."""
        if len(self.feed) > REPLAY_CHUNK:
            return Segment(self.slot, self.feed[:REPLAY_CHUNK])
        params = self.running.job.request.sampling
        scores: list[Scores] | None = None if params.logprobs is None else []
        if not (drafts := self._drafts(room)):
            return Segment(self.slot, self.feed, params, self.generation.count, self.history, scores)
        fed = [*self.feed, *drafts]
        return Segment(self.slot, fed, params, self.generation.count, self.history, scores, len(drafts), [])

    def _drafts(self, room: int) -> list[int]:
        """Never more than the completion may still have after the next token: the slot holds no others."""
        if self.drafter is None or len(self.feed) > 1:
            return []
        return self.drafter.propose(min(room, self.generation.max_new - self.generation.count - 1))

    def advance(self, segment: Segment, token: int | None) -> None:
        """Account for a forward over `segment`, which begins the feed."""
        fed = len(segment.token_ids) - segment.drafts
        if fed < len(self.feed):
            self.feed = self.feed[fed:]
            return
        if token is None and segment.drafts:  # by a guess, perhaps: the next step says
            self.drafter = None
            return
        if token is None:
            raise RuntimeError("the model's logits are not finite")
        made = [token, *(segment.further or ())]
        if self.drafter is not None and segment.drafts:
            self.drafter.learn(len(made) - 1)
        scores = iter(segment.scores or ())
        for one in made:
            self._push(one)
            self.scores += islice(scores, 1)
            if self.finish_reason is not None:
                break  # drafts know nothing of ends: what comes after one is not part of the text

    def _push(self, token: int) -> None:
        step = self.generation.push(token)
        self.tokens.append(token)
        if self.history is not None:
            self.history.append(token)
        self.text += step.text
        self.finish_reason = step.finish_reason
        self.known.append(token)
        self.feed = [token]

    @property
    def silent_since(self) -> float:
        """When its client last heard of what it has to tell: a token may be a part of a character, and show nothing."""
        return self._shown if self.text else self._told

    def event(self) -> Event:
        """Take what was sampled since the last event as the next one."""
        logprobs = self.generation.logprobs(self.scores) if self.scores else ()
        usage, timings, now = None, None, time.monotonic()
        if self.finish_reason is not None or self.sent == 0:
            usage = Usage(len(self.handoff.prompt), self.sent + len(self.tokens), self.handoff.cached_tokens)
            so_far = self.running.job.timings
            timings = Timings(so_far.queue_ms, so_far.prefill_ms, so_far.handoff_ms, (now - self.joined) * 1000)
        event = Event(self.sent, tuple(self.tokens), self.text, self.finish_reason, usage, timings, logprobs=logprobs)
        self.sent += len(self.tokens)
        self._told, self._shown = now, now if self.text else self._shown
        self.tokens, self.scores, self.text = [], [], ""
        return event

    def end(self, error: Exception | None) -> None:
        """Tell the job's task that this is over."""
        if not self.outcome.done():
            if error is None:
                self.outcome.set_result(None)
            else:
                self.outcome.set_exception(error)
