"""When a running completion has something to tell that its client has waited for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from pdq.engine.base import Segment
from pdq.generation import Generation
from pdq.messages import SamplingParams, Timings
from pdq.sequence import Sequence
from pdq.text import ByteTokenizer

FACE = "\U0001f600".encode()


async def sequence(emitted: bytes, claimed: float = 0.0) -> Sequence:
    """After a prompt of one token and `emitted`, which took prefill 30 ms until a claim at `claimed`."""
    generation = Generation(ByteTokenizer(), SamplingParams(), frozenset(), 50)
    generation.replay([*emitted])
    job = SimpleNamespace(timings=Timings(handoff_ms=30.0), request=SimpleNamespace(sampling=SamplingParams()))
    running: Any = SimpleNamespace(job=job, claimed=claimed)
    slot: Any = SimpleNamespace(length=len(emitted))
    handoff: Any = SimpleNamespace(prompt=(1,), cached_tokens=0)
    return Sequence(running, handoff, slot, generation, [1, *emitted], SimpleNamespace())  # type: ignore[arg-type]


def push(one: Sequence, *tokens: int) -> None:
    for token in tokens:
        one.advance(Segment(one.slot, one.feed), token)


async def test_the_first_token_of_decode_comes_after_the_one_of_prefill() -> None:
    assert (await sequence(b"a", claimed=5.0)).silent_since == 5.0 - 0.03


async def test_a_sequence_without_any_event_is_late() -> None:
    assert (await sequence(b"")).silent_since < -1e9


async def test_an_event_that_shows_nothing_does_not_count_for_the_text_that_follows() -> None:
    one = await sequence(b"a", claimed=5.0)
    push(one, *FACE[:2])
    assert one.event().text == ""
    push(one, FACE[2])
    assert time.monotonic() - one.silent_since < 1  # the next token alone waits for a flush
    push(one, FACE[3])
    assert one.silent_since == 5.0 - 0.03  # its character does not
    assert one.event().text == FACE.decode()
    push(one, *b"b")
    assert time.monotonic() - one.silent_since < 1
