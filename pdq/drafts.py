"""Drafts: guesses at the next tokens of a text, from the text itself, for the engine to verify in one forward.

`PromptLookup` finds them: what followed the last few tokens when they occurred before (Saxena's "prompt lookup
decoding", vLLM's method "ngram"). `Drafter` decides how many of them a step is worth. The decode worker asks it for
each sequence of a step; nothing here knows engines, slots or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 4, 2  # tokens of the ends that are looked for; one token alone says too little
AT_ONCE = 4096  # tokens of a long prompt that one step looks at: about a millisecond, in which nobody's text goes on
LEAST_PAUSE, MOST_PAUSE = 4, 64  # steps


class PromptLookup:
    """The earlier occurrences of every end that a text has had.

    tokens: the text, which grows at its end and changes nowhere else; it is not copied. Each token is looked at once,
    whatever the length of the text, and no more than AT_ONCE of them in a call: of a long one the end is found later.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        # By length, longest first: n tokens in a row -> where the token after their latest occurrence stands.
        self._after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(LONGEST, SHORTEST - 1, -1)}
        self._seen = 0  # tokens before this position are known as followers

    def following(self, count: int) -> list[int]:
        """`count` tokens: how the text went on the last time that its longest known end occurred; [] if it never did.

        Where that was less than `count` tokens ago, the text is taken to go round in a circle.
        """
        self._catch_up()
        tokens, end = self._tokens, len(self._tokens)
        for n, after in self._after.items():
            start = after.get(tuple(tokens[-n:]))
            if start is not None:
                return [tokens[start + i % (end - start)] for i in range(count)]
        return []

    def _catch_up(self) -> None:
        """The text's present end is left out until something follows it: it would be found as its own repetition."""
        tokens, end = self._tokens, min(len(self._tokens), self._seen + AT_ONCE)
        for n, after in self._after.items():
            first = max(self._seen, n)
            if first >= end:
                continue
            runs = zip(*(tokens[first - n + i : end - n + i] for i in range(n)), strict=True)
            after.update(zip(runs, range(first, end), strict=True))
        self._seen = end


class Drafter:
    """How many drafts the next step of one sequence gets, from none to `most`, by what became of the last ones.

    After a step with none that came true it is half as many, and when none is left a single one is tried again, later
    each time. One that comes true makes it `most` again: a text that repeats goes on repeating, and wrong drafts cost
    little.
    """

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        """tokens: as of `PromptLookup`."""
        self._lookup = PromptLookup(tokens)
        self._most = most
        self._size = most
        self._pause = LEAST_PAUSE
        self._waits = 0

    def propose(self, room: int) -> list[int]:
        """Drafts for the next step, at most `room`."""
        if self._waits:
            self._waits -= 1
            return []
        count = min(self._size, room)
        return self._lookup.following(count) if count > 0 else []

    def learn(self, accepted: int) -> None:
        """Account for a step with drafts, the first `accepted` of which came true."""
        if accepted:
            self._size, self._pause = self._most, LEAST_PAUSE
            return
        self._size //= 2
        if not self._size:
            self._size, self._waits = 1, self._pause
            self._pause = min(2 * self._pause, MOST_PAUSE)
