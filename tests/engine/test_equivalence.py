"""Prefill in one engine and decode in another give what the stock model gives alone, for every architecture.

The reference is transformers' own `generate` and forward in float32, by eager attention. "compiled": without the stock
modelling code (`engine.fused`).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pdq.engine.base import Segment, Slot
from pdq.engine.runner import TorchEngine
from tests.engine.conftest import Arch
from tests.engine.pd import BLOCK, GREEDY, Handoff, decode_together, full_blocks, one, prefill
from tests.engine.tiny import COMPILED, CONFIGS, CONTEXT, WINDOW

COUNT = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, WINDOW + 1, 2 * BLOCK, 2 * WINDOW, 4 * BLOCK + 1)
CUTS = (1, 15, 16, 17, 31, 32, 33)
BFLOAT16 = 1.5  # how many times farther than the stock model in bfloat16 ours may be from float32, in the median
Archs = Callable[[str], Arch]

each_arch = pytest.mark.parametrize("name", [*CONFIGS, *COMPILED])
each_chunk = pytest.mark.parametrize("chunk", [1, 7, CONTEXT], ids=["by token", "by 7", "whole"])


def handoffs(it: Arch, chunk: int, hit: bool) -> list[Handoff]:
    """One per length of LENGTHS, prefilled in chunks, alone or behind the blocks of an earlier request."""
    out = []
    for length in LENGTHS:
        prompt = it.prompt(length)
        handoff = prefill(it.prefill, prompt, chunk)
        if hit:
            handoff = prefill(it.prefill, prompt, chunk, full_blocks(handoff, prompt))
        out.append(handoff)
    return out


@each_arch
@each_chunk
def test_decoding_in_a_changing_batch_gives_what_generate_gives(arch: Archs, name: str, chunk: int) -> None:
    it = arch(name)
    ready = handoffs(it, chunk, hit=False)
    expected = [it.expected(length, COUNT) for length in LENGTHS]
    assert decode_together(it.decode, ready, COUNT, stagger=2) == expected


@each_arch
def test_decoding_behind_cached_blocks_gives_what_generate_gives(arch: Archs, name: str) -> None:
    it = arch(name)
    ready = handoffs(it, 7, hit=True)
    expected = [it.expected(length, COUNT) for length in LENGTHS]
    assert decode_together(it.decode, ready[::-1], COUNT, stagger=0) == expected[::-1]


@each_arch
def test_logits_of_prefill_and_sixteen_decode_steps_equal_the_stock_models(arch: Archs, name: str) -> None:
    it = arch(name)
    ids = it.prompt(9 + COUNT)
    handoff = prefill(it.prefill, ids[:7], 7)
    slot = it.decode.open(len(ids))
    it.decode.load(slot, 0, handoff.runs)
    parts = [ids[7:9], *([token] for token in ids[9:])]
    ours = torch.cat([it.decode.logits([Segment(slot, part, GREEDY)]) for part in parts])
    it.decode.close(slot)
    assert len(ids) > 2 * WINDOW
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, it.logits(ids)[8:], rtol=0, atol=1e-4)


@each_arch
def test_prefixes_cut_anywhere_are_continued_exactly(arch: Archs, name: str) -> None:
    it = arch(name)
    ids = it.prompt(max(CUTS) + 3)
    whole = it.prefill.open(len(ids))
    it.prefill.forward([Segment(whole, ids)])
    stock = it.logits(ids)
    for cut in CUTS:
        slot = it.decode.open(len(ids))
        it.decode.load(slot, 0, [(cut, run) for run in it.prefill.export(whole, 0, cut, cut, 0)])
        parts = [ids[cut:-1], ids[-1:]]
        ours = torch.cat([it.decode.logits([Segment(slot, part, GREEDY)]) for part in parts])
        it.decode.close(slot)
        torch.testing.assert_close(ours, stock[-2:], rtol=0, atol=1e-4)
    it.prefill.close(whole)


@each_arch
def test_a_replay_of_emitted_tokens_goes_on_as_if_nothing_had_died(arch: Archs, name: str) -> None:
    it = arch(name)
    length, emitted = 4 * BLOCK + 1, 6
    expected = it.expected(length, COUNT)
    handoff = prefill(it.prefill, it.prompt(length), CONTEXT)
    slot = it.decode.open(CONTEXT)
    it.decode.load(slot, 0, handoff.runs)
    tokens = [one(it.decode, Segment(slot, expected[:emitted], GREEDY, emitted))]
    while emitted + len(tokens) < COUNT:
        tokens.append(one(it.decode, Segment(slot, tokens[-1:], GREEDY)))
    it.decode.close(slot)
    assert tokens == expected[emitted:]


@each_arch
def test_chunks_and_single_tokens_of_many_sequences_share_one_forward(arch: Archs, name: str) -> None:
    it = arch(name)
    prompts = [it.prompt(length) for length in (9, 1, 6, 13)]
    slots = [it.decode.open(len(p)) for p in prompts]
    it.decode.forward([Segment(slots[0], prompts[0][:-1]), Segment(slots[3], prompts[3][:6])])
    rest = [Segment(s, p[s.length :], GREEDY) for s, p in zip(slots, prompts, strict=True)]
    ours = it.decode.logits(rest)
    for slot in slots:
        it.decode.close(slot)
    torch.testing.assert_close(ours, torch.stack([it.logits(p)[-1] for p in prompts]), rtol=0, atol=1e-4)
    assert [s.length for s in slots] == [9, 1, 6, 13]


def in_pieces(engine: TorchEngine, ids: list[int]) -> torch.Tensor:
    """Logits after 17 tokens in two chunks, and after each one that follows."""
    slot: Slot = engine.open(len(ids))
    engine.forward([Segment(slot, ids[:9])])
    found = [engine.logits([Segment(slot, part, GREEDY)]) for part in [ids[9:17], *([t] for t in ids[17:])]]
    engine.close(slot)
    return torch.cat(found)


@each_arch
def test_bfloat16_is_about_as_near_to_float32_as_the_stock_model_in_bfloat16(arch: Archs, name: str) -> None:
    it = arch(name)
    ids = it.prompt(17 + COUNT)
    exact = it.logits(ids)[16:]
    stock, ours = (
        # Of the tokens' errors the median: rounding may send one of them to another expert.
        float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
        for found in (it.half.logits(ids)[16:], in_pieces(it.half.engine, ids))
    )
    assert stock < 0.2
    assert ours < BFLOAT16 * stock


@each_arch
def test_prompts_tell_the_stock_models_apart(arch: Archs, name: str) -> None:
    """Guards the tests above: a model that always says the same would pass them with attention switched off."""
    outputs = {tuple(arch(name).expected(length, COUNT)) for length in LENGTHS}
    assert len(outputs) >= len(LENGTHS) - 1
