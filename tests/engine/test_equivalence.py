"""Prefill in one engine and decode in another give what the stock model gives alone, for every architecture."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pdq.engine.base import Segment
from tests.engine.conftest import Arch
from tests.engine.pd import BLOCK, GREEDY, Handoff, decode_together, full_blocks, prefill
from tests.engine.tiny import CONFIGS, WINDOW

COUNT = 8
LENGTHS = range(1, 2 * BLOCK + 2)
Archs = Callable[[str], Arch]

each_arch = pytest.mark.parametrize("name", CONFIGS)
each_chunk = pytest.mark.parametrize("chunk", [1, 7, 64])
cold_or_hit = pytest.mark.parametrize("hit", [False, True], ids=["cold", "prefix hit"])


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
@cold_or_hit
def test_decoding_alone_in_another_engine_gives_what_generate_gives(
    arch: Archs, name: str, chunk: int, hit: bool
) -> None:
    it = arch(name)
    for length, handoff in zip(LENGTHS, handoffs(it, chunk, hit), strict=True):
        assert decode_together(it.decode, [handoff], COUNT, 1) == [it.expected(length, COUNT)], length


@each_arch
@each_chunk
@cold_or_hit
def test_decoding_in_a_changing_batch_gives_what_generate_gives(arch: Archs, name: str, chunk: int, hit: bool) -> None:
    it = arch(name)
    ready = handoffs(it, chunk, hit)
    expected = [it.expected(length, COUNT) for length in LENGTHS]
    assert decode_together(it.decode, ready[:8], COUNT, 1) == expected[:8]
    assert decode_together(it.decode, ready[:0:-1], COUNT, 2) == expected[:0:-1]


@each_arch
def test_logits_after_prefill_and_first_decode_steps_equal_the_stock_models(arch: Archs, name: str) -> None:
    it = arch(name)
    ids = it.prompt(2 * BLOCK + 5)
    slot = it.decode.open(len(ids))
    assert it.decode.forward([Segment(slot, ids[:7])]) == [None]
    parts = [ids[7:9], *([token] for token in ids[9:])]
    ours = torch.cat([it.decode.logits([Segment(slot, part, GREEDY)]) for part in parts])
    it.decode.close(slot)
    assert len(ids) > 2 * WINDOW
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, it.stock(torch.tensor([ids])).logits[0, 8:], rtol=0, atol=1e-4)


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
    stock = torch.stack([it.stock(torch.tensor([p])).logits[0, -1] for p in prompts])
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4)
    assert [s.length for s in slots] == [9, 1, 6, 13]


@each_arch
def test_prompts_tell_the_stock_models_apart(arch: Archs, name: str) -> None:
    """Guards the tests above: a model that always says the same would pass them with attention switched off."""
    outputs = {tuple(arch(name).expected(length, COUNT)) for length in LENGTHS}
    assert len(outputs) == len(LENGTHS)
