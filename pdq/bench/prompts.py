"""What is asked: an endless, seeded series of conversations for each shape. Pure; knows no server.

A prompt of n tokens is n common English words with spaces between: in most BPE vocabularies a word and the space before
it are one token. The exact count is the server's (usage), and contains its chat template.

Every conversation is made from (seed, series, number) alone, so that neither the order of sending nor the load changes
a prompt. Two seeds share no prompt, so no run finds in the server's cache what an earlier one left there.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pdq.bench.settings import MULTI_TURN, SHARED_PREFIX, BenchSettings

# The rest of a long request is one more stream; its first tokens show what taking it over costs the others.
LONG_OUTPUT_TOKENS = 16
MEASURED, WARMUP, LONG = "measured", "warmup", "long"

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house "
    "service friend father power hour game line end member law car city community name president team minute idea "
    "body information back parent face others level office door health person art war history party result change "
    "morning reason research girl guy moment air teacher force education food land light river paper plan road "
    "sea sound table tree voice white black green red blue small large great old young new high low long short "
    "open close first last next"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One or more user turns, sent one after the other, each with all before it and their answers."""

    series: str
    turns: tuple[str, ...]
    output_tokens: int


def conversations(settings: BenchSettings, seed: int, series: str = MEASURED) -> Iterator[Conversation]:
    """The series without end. WARMUP has the shape of MEASURED and shares no prompt or prefix with it."""
    for number in itertools.count():
        rng = random.Random(f"{seed} {series} {number}")  # noqa: S311  words, not secrets
        if series == LONG:
            yield Conversation(series, (_text(rng, settings.long_tokens),), LONG_OUTPUT_TOKENS)
            continue
        turns = settings.turns if settings.shape == MULTI_TURN else 1
        texts = [_text(rng, settings.input_tokens) for _ in range(turns)]
        if settings.shape == SHARED_PREFIX:
            texts[0] = f"{_prefix(settings, seed, series, number % settings.prefixes)} {texts[0]}"
        yield Conversation(series, tuple(texts), settings.output_tokens)


def limited(series: Iterator[Conversation], requests: int | None) -> Iterator[Conversation]:
    """As many as make `requests` turns; the last is cut short. None: all."""
    left = requests
    while left is None or left > 0:
        one = next(series)
        if left is not None:
            one = replace(one, turns=one.turns[:left])
            left -= len(one.turns)
        yield one


def _prefix(settings: BenchSettings, seed: int, series: str, group: int) -> str:
    rng = random.Random(f"{seed} {series} prefix {group}")  # noqa: S311
    return _text(rng, settings.prefix_tokens)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))
