"""The one place that decides what a completion shows and when it ends; prefill and decode both use it.

A `Generation` is fed the sampled tokens in order and answers with the visible text and, once, the finish reason. It is
a pure function of the tokens: a worker that takes over replays the emitted ones and continues as if nothing had
happened, held-back text included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdq.engine.base import Scores
from pdq.messages import SamplingParams, TokenLogprob, TopLogprob
from pdq.text import Detokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class Step:
    """What one more token brought: visible text, and the finish reason ("stop" or "length") if it was the last."""

    text: str
    finish_reason: str | None


class Generation:
    """State of one completion. max_new: most tokens it may have (at least 1).

    The deltas together are the text of the tokens up to the end or the stop string; an incomplete character at the very
    end is left out.
    """

    __slots__ = ("_detokenizer", "_ends", "_held", "_min_tokens", "_stops", "_tokenizer", "count", "last", "max_new")

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, eos_ids: frozenset[int], max_new: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = tuple(s for s in sampling.stop if s)  # an empty one would end every text before it begins
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        self._min_tokens = sampling.min_tokens
        self._held = ""  # text that may be the start of a stop string
        self.max_new = max_new
        self.count = 0
        self.last: int | None = None

    def push(self, token_id: int) -> Step:
        """Account for the next sampled token."""
        self.count += 1
        self.last = token_id
        may_stop = self.count > self._min_tokens
        if token_id in self._ends and may_stop:
            return Step(self._flush(), "stop")
        text = self._held + self._detokenizer.push(token_id)
        cut = _first_stop(text, self._stops, len(self._held))
        if cut is not None and may_stop:
            self._held = ""
            return Step(text[:cut], "stop")
        if self.count >= self.max_new:
            self._held = ""
            return Step(text, "length")
        keep = _held_back(text, self._stops)
        self._held = text[len(text) - keep :] if keep else ""
        return Step(text[: len(text) - keep], None)

    def replay(self, token_ids: Iterable[int]) -> None:
        """Account for tokens that an earlier worker already made visible."""
        for token_id in token_ids:
            self.push(token_id)

    def logprobs(self, scores: Sequence[Scores]) -> tuple[TokenLogprob, ...]:
        """What a client is told of the tokens with these scores, in the same order."""
        raw = self._tokenizer.token_bytes
        return tuple(
            TokenLogprob(s.token_id, s.logprob, raw(s.token_id), tuple(TopLogprob(t, p, raw(t)) for t, p in s.top))
            for s in scores
        )

    def _flush(self) -> str:
        text, self._held = self._held, ""
        return text


def max_new_tokens(sampling: SamplingParams, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens a completion may have: what was asked, or what the context leaves."""
    room = max_model_len - prompt_tokens
    return room if sampling.max_tokens is None else min(sampling.max_tokens, room)


def _first_stop(text: str, stops: tuple[str, ...], seen: int) -> int | None:
    """Where the earliest stop string that ends beyond the first `seen` characters begins in `text`."""
    return min((at for s in stops if (at := text.find(s, max(seen - len(s) + 1, 0))) >= 0), default=None)


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for s in stops:
        tries = range(min(len(s) - 1, len(text)), longest, -1)
        longest = next((n for n in tries if text.endswith(s[:n])), longest)
    return longest
