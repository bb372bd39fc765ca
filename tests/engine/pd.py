"""Prefill and decode as the workers do them, over two engines and without the queue: what the engine tests drive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from pdq.engine.base import Segment, Slot
from pdq.engine.runner import TorchEngine
from pdq.messages import SamplingParams
from tests.engine.tiny import CONTEXT

BLOCK = 4
HEADROOM = 5
GREEDY = SamplingParams(temperature=0.0)


def engine(model: PreTrainedModel, *, dtype: str = "float32", kv_memory_bytes: int = 1 << 26) -> TorchEngine:
    return TorchEngine(
        model,
        fingerprint=b"f" * 32,
        dtype=dtype,
        max_model_len=CONTEXT,
        eos_ids=frozenset(),
        kv_memory_bytes=kv_memory_bytes,
        threads=1,
    )


@dataclass
class Handoff:
    """What travels from prefill to decode: the KV in runs of BLOCK tokens (the last may be shorter), and token 0."""

    runs: list[tuple[int, memoryview]]
    first: int


def runs_of(exported: Sequence[memoryview], length: int) -> list[tuple[int, memoryview]]:
    """Exported KV of `length` tokens from a block edge, in the form that `load` takes."""
    return [(min(BLOCK, length - i * BLOCK), run[HEADROOM:]) for i, run in enumerate(exported)]


def one(engine: TorchEngine, segment: Segment) -> int:
    """The token of a forward over a single segment."""
    (token,) = engine.forward([segment])
    assert token is not None
    return token


def prefill(
    engine: TorchEngine, prompt: Sequence[int], chunk: int, cached: Sequence[tuple[int, memoryview]] = ()
) -> Handoff:
    """Compute `prompt` in chunks behind the KV blocks that are cached, and export everything."""
    slot = engine.open(len(prompt))
    engine.load(slot, 0, cached)
    while len(prompt) - slot.length > chunk:
        assert engine.forward([Segment(slot, prompt[slot.length : slot.length + chunk])]) == [None]
    first = one(engine, Segment(slot, prompt[slot.length :], GREEDY))
    exported = engine.export(slot, 0, len(prompt), BLOCK, HEADROOM)
    engine.close(slot)
    return Handoff(runs_of(exported, len(prompt)), first)


def full_blocks(handoff: Handoff, prompt: Sequence[int]) -> list[tuple[int, memoryview]]:
    """The cached prefix for a second request with this prompt: its last token is always computed."""
    return handoff.runs[: (len(prompt) - 1) // BLOCK]


def decode_together(engine: TorchEngine, handoffs: Sequence[Handoff], count: int, stagger: int) -> list[list[int]]:
    """`count` tokens of each sequence, decoded in one batch that a new sequence joins every `stagger` steps."""
    outputs: list[list[int]] = [[handoff.first] for handoff in handoffs]
    slots: dict[int, Slot] = {}
    waiting = list(range(len(handoffs)))
    step = 0
    while waiting or slots:
        while waiting and len(handoffs) - len(waiting) <= step // max(stagger, 1):
            i = waiting.pop(0)
            slots[i] = engine.open(CONTEXT)
            engine.load(slots[i], 0, handoffs[i].runs)
        live = list(slots)
        tokens = engine.forward([Segment(slots[i], [outputs[i][-1]], GREEDY) for i in live])
        for i, token in zip(live, tokens, strict=True):
            assert token is not None
            outputs[i].append(token)
            if len(outputs[i]) == count:
                engine.close(slots.pop(i))
        step += 1
    return outputs


def generated(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens by transformers' own `generate`."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return [int(token) for token in out[0, len(prompt) :]]
