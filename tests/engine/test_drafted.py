"""Drafts, right and wrong ones in any mixture, change nothing but how many forwards a text takes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from pdq.drafts import Drafter
from pdq.engine import products
from pdq.engine.base import Engine, Scores, Segment
from pdq.engine.choice import choose
from pdq.engine.forward import StockForward
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.kv import TorchSlot
from pdq.engine.runner import TorchEngine
from pdq.engine.scripted import Script, ScriptedEngine
from pdq.messages import SamplingParams
from tests.engine.conftest import Arch
from tests.engine.pd import GREEDY, engine, one
from tests.engine.test_choice import SEEDED, WORDS, Run, alone, same_scores, segment, story
from tests.engine.test_sampling import logits
from tests.engine.tiny import COMPILED, CONFIGS, CONTEXT, VOCAB, tiny_model

COUNT = 24
Archs = Callable[[str], Arch]
PARAMS = {
    "greedy": GREEDY,
    "greedy with logprobs": replace(GREEDY, logprobs=2),
    "seeded": SamplingParams(seed=5, temperature=1.2),
    "filtered": SamplingParams(seed=6, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(seed=7, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.6),
    "everything": SEEDED,
}


class Guessed(Run):
    """A completion whose forwards carry drafts: step s has `s % 6` of them, of which the first `s * 5 % 7` are right.

    right: the tokens that come. With right=None the drafts are a Drafter's.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], params: SamplingParams, right: Sequence[int] | None):
        super().__init__(engine, prompt, params)  # type: ignore[arg-type]
        self.right = right
        self.text = list(prompt)
        self.drafter = Drafter(self.text, 5)
        self.steps = self.drafted = self.accepted = 0
        self.asked: Segment | None = None

    def _drafts(self) -> list[int]:
        if self.right is None:
            return self.drafter.propose(5) if self.tokens else []
        done, good = len(self.tokens), self.steps * 5 % 7
        coming = list(self.right[done : done + self.steps % 6])
        return [t if i < good else (t + 1 + self.steps) % VOCAB for i, t in enumerate(coming)]

    def segment(self) -> Segment:
        drafts, plain = self._drafts(), super().segment()
        further: list[int] | None = [] if drafts else None
        self.asked = replace(plain, token_ids=[*self.feed, *drafts], drafts=len(drafts), further=further)
        return self.asked

    def push(self, token: int | None) -> None:
        assert token is not None
        assert self.asked is not None
        fed, made = len(self.feed), [token, *(self.asked.further or ())]
        self.steps += 1
        if self.asked.drafts:
            self.drafted += self.asked.drafts
            self.accepted += len(made) - 1
            self.drafter.learn(len(made) - 1)
        self.tokens += made
        self.text += made
        self.feed = made[-1:]
        assert fed > 0
        assert self.slot.length == len(self.prompt) + len(self.tokens) - 1


def run(engine: Engine, made: Guessed, count: int = COUNT) -> Guessed:
    while len(made.tokens) < count:
        made.push(engine.forward([made.segment()])[0])
    engine.close(made.slot)
    return made


def check(engine: TorchEngine, prompt: Sequence[int], params: SamplingParams) -> None:
    expected = alone(engine, prompt, COUNT + 8, params)
    made = run(engine, Guessed(engine, prompt, params, expected.tokens))
    assert made.tokens == expected.tokens[: len(made.tokens)]
    same_scores(made.scores, expected.scores[: len(made.scores)])
    assert len(made.scores) == (0 if params.logprobs is None else len(made.tokens))
    assert 0 < made.accepted < made.drafted
    assert made.steps == len(made.tokens) - made.accepted


@pytest.mark.parametrize("name", [*CONFIGS, *COMPILED])
def test_a_greedy_text_is_the_same_with_drafts(arch: Archs, name: str) -> None:
    check(arch(name).decode, arch(name).prompt(11), GREEDY)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("name", ["llama", "mistral", *[n for n in ("qwen3 compiled",) if n in COMPILED]])
def test_whatever_chooses_the_tokens_they_are_the_same_with_drafts(
    arch: Archs, name: str, params: SamplingParams
) -> None:
    check(arch(name).decode, arch(name).prompt(11), params)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_scripted_engine_takes_drafts_as_well(params: SamplingParams) -> None:
    it: Any = ScriptedEngine(Script(), block_size=4, max_model_len=CONTEXT, memory=1 << 20)
    expected = alone(it, [1, 2, 3], COUNT + 8, params)
    made = run(it, Guessed(it, [1, 2, 3], params, expected.tokens))
    assert made.tokens == expected.tokens[: len(made.tokens)]
    assert made.scores == expected.scores[: len(made.scores)]
    assert 0 < made.accepted < made.drafted


def test_a_token_that_is_only_guessed_does_not_crash_a_scripted_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("it ended the process"))
    it = ScriptedEngine(Script(text="a", crash_on=98), block_size=4, max_model_len=CONTEXT, memory=1 << 20)
    slot = it.open(9)
    further: list[int] = []
    for _ in range(2):
        assert it.forward([Segment(slot, [97, 98], GREEDY, drafts=1, further=further)]) == [97]
    assert (further, slot.length) == ([], 2)


@pytest.mark.parametrize("name", ["llama", "mistral", *[n for n in ("llama compiled",) if n in COMPILED]])
def test_sequences_with_and_without_drafts_and_chunks_share_forwards(arch: Archs, name: str) -> None:
    it = arch(name)
    ways = [GREEDY, SEEDED, GREEDY, PARAMS["seeded"]]
    prompts = [it.prompt(n) for n in (5, 9, 14, 11)]
    expected = [alone(it.decode, p, COUNT + 8, w) for p, w in zip(prompts, ways, strict=True)]
    runs: list[Run] = [
        Guessed(it.decode, prompt, way, e.tokens) if i % 2 else Run(it.decode, prompt, way)
        for i, (prompt, way, e) in enumerate(zip(prompts, ways, expected, strict=True))
    ]
    chunked = it.decode.open(CONTEXT)
    while any(len(r.tokens) < COUNT for r in runs):
        chunk = Segment(chunked, it.prompt(CONTEXT)[chunked.length : chunked.length + 3])
        live = [r for r in runs if len(r.tokens) < COUNT]
        tokens = it.decode.forward([*(r.segment() for r in live), chunk])
        for made, token in zip(live, tokens[:-1], strict=True):
            made.push(token)
    for made, e in zip(runs, expected, strict=True):
        it.decode.close(made.slot)
        assert made.tokens == e.tokens[: len(made.tokens)]
        same_scores(made.scores, e.scores[: len(made.scores)])
    it.decode.close(chunked)
    assert all(0 < r.accepted < r.drafted for r in runs if isinstance(r, Guessed))


@pytest.mark.parametrize("name", ["llama", *[n for n in ("llama compiled",) if n in COMPILED]])
def test_a_model_that_repeats_itself_takes_fewer_forwards(arch: Archs, name: str) -> None:
    it = arch(name).decode
    for params in (GREEDY, SamplingParams(seed=3, temperature=0.1), replace(GREEDY, frequency_penalty=0.01)):
        params = replace(params, allowed_token_ids=(7, 8, 9))
        expected = alone(it, [7, 8, 9], 80, params)
        made = run(it, Guessed(it, [7, 8, 9], params, None), 70)
        assert made.tokens == expected.tokens[: len(made.tokens)]
        assert made.accepted >= 20


def test_drafts_do_not_change_the_kv_that_is_kept(arch: Archs) -> None:
    it = arch("llama")
    prompt = it.prompt(9)
    expected = alone(it.decode, prompt, COUNT + 8, GREEDY).tokens
    made = Guessed(it.decode, prompt, GREEDY, expected)
    while len(made.tokens) < COUNT:
        made.push(it.decode.forward([made.segment()])[0])
    ids = [*prompt, *made.tokens[:-1]]
    whole = it.decode.open(CONTEXT)
    it.decode.forward([Segment(whole, ids)])
    ours, theirs = (
        torch.frombuffer(it.decode.export(slot, 0, len(ids), len(ids), 0)[0], dtype=torch.float32)
        for slot in (made.slot, whole)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for slot in (made.slot, whole):
        it.decode.close(slot)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_forwards_give_the_same_bits_with_drafts(arch: Archs, name: str, dtype: str) -> None:
    it = arch(name).decode if dtype == "float32" else arch(name).half.engine
    for params in (replace(GREEDY, logprobs=5), replace(SEEDED, logprobs=5)):
        expected = alone(it, arch(name).prompt(11), COUNT + 8, params)
        made = run(it, Guessed(it, arch(name).prompt(11), params, expected.tokens))
        assert made.tokens == expected.tokens[: len(made.tokens)]
        assert made.scores == expected.scores[: len(made.scores)]
        assert 0 < made.accepted < made.drafted


def test_a_slot_filled_to_its_end_by_drafts_goes_no_farther(arch: Archs) -> None:
    it = arch("llama").decode
    expected = alone(it, [1, 2], 64, GREEDY).tokens
    slot = it.open(64)
    it.forward([Segment(slot, [1, 2, *expected[:58]])])
    further: list[int] = []
    with pytest.raises(ValueError, match="holds 60 of 64"):
        it.forward([Segment(slot, expected[58:63], GREEDY, drafts=4, further=further)])
    assert (slot.length, further) == (60, [])
    assert one(it, Segment(slot, expected[58:62], GREEDY, drafts=3, further=further)) == expected[59]
    assert (slot.length, further) == (64, expected[60:63])
    it.close(slot)


WRONG: list[dict[str, Any]] = [
    {"drafts": 2, "further": []},
    {"drafts": -1, "further": []},
    {"drafts": 1},
    {"drafts": 1, "further": [5]},
    {"drafts": 1, "further": [], "sample": None},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_drafts_that_cannot_be_verified_are_refused_and_change_nothing(arch: Archs, wrong: dict[str, Any]) -> None:
    scripted = ScriptedEngine(Script(), block_size=4, max_model_len=CONTEXT, memory=1 << 20)
    for it in (arch("llama").decode, scripted):
        slot = it.open(8)
        with pytest.raises(ValueError, match="drafts"):
            it.forward([Segment(slot, [1, 2], **{"sample": GREEDY, **wrong})])
        assert slot.length == 0
        it.close(slot)


# ---- what is not a number ----


def guessed(drafts: Sequence[int], position: int = 3) -> Segment:
    """As the engine has it when the logits are there: the last of `story` and the drafts were computed."""
    plain = segment(replace(SEEDED, allowed_token_ids=None), position, array("q", story(position, 1)))
    return replace(plain, token_ids=[1, *drafts], drafts=len(drafts), further=[])


def test_a_row_that_is_not_numbers_ends_what_its_segment_makes_and_touches_no_other() -> None:
    batch = logits(9, WORDS)
    free = guessed([0] * 3)
    rows = [guessed([0] * 3), segment(GREEDY), guessed([0] * 3)]
    first, middle, last = choose(batch, rows, ())
    assert None not in (first, middle, last)
    # With the tokens that these rows give as drafts, all count.
    drafts = list(free.token_ids[1:])
    for i in range(3):
        tried = replace(free, token_ids=[1, *drafts], further=[], scores=[])
        (token,) = choose(batch[:4], [tried], ())
        made = [token, *(tried.further or ())]
        drafts[i] = made[i]  # type: ignore[assignment]
    whole = replace(free, token_ids=[1, *drafts], further=[], scores=[])
    assert choose(batch[:4], [whole], ()) == [drafts[0]]
    assert (whole.further or [])[:2] == drafts[1:]
    assert len(whole.further or ()) == 3
    for bad in range(4):
        broken = batch.clone()
        broken[bad, 50] = math.nan
        again = replace(whole, further=[], scores=[])
        others = [segment(GREEDY), guessed([0] * 3)]
        tokens = choose(broken, [again, *others], ())
        assert tokens == [None if bad == 0 else drafts[0], middle, last]
        assert again.further == (whole.further or [])[: max(bad - 1, 0)]
        assert [s.token_id for s in again.scores or ()] == [*drafts, 0][:bad]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_sequence_whose_kv_is_not_numbers_fails_alone(arch: Archs, name: str) -> None:
    it, prompts = arch(name), [arch(name).prompt(n) for n in (9, 8)]
    slots = [it.decode.open(CONTEXT) for _ in prompts]
    it.decode.forward([Segment(slot, p[:-1]) for slot, p in zip(slots, prompts, strict=True)])
    assert isinstance(slots[0], TorchSlot)
    slots[0].planes(0, 8)[1][0, 0, 7] = math.nan
    expected = it.expected(8, 4)
    asked = [
        Segment(slots[0], [prompts[0][-1], 5, 6], GREEDY, drafts=2, further=[]),
        Segment(slots[1], [prompts[1][-1], *expected[:2]], GREEDY, drafts=2, further=[]),
    ]
    assert it.decode.forward(asked) == [None, expected[0]]
    assert (asked[0].further, asked[1].further) == ([], expected[1:3])
    assert [s.length for s in slots] == [8, 10]
    assert it.decode.forward([Segment(slots[0], prompts[0][-1:], GREEDY)]) == [None]
    for slot in slots:
        it.decode.close(slot)


@pytest.mark.parametrize("padded", [False, True])
def test_a_guess_that_spoils_the_numbers_leaves_the_text_without_drafts_right(
    monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    """Its KV stands beyond the slot's length, where attention by products reads padding."""
    model = tiny_model("llama")
    model.get_input_embeddings().weight[50] = math.nan
    it = engine(model)
    if padded:
        monkeypatch.setattr(products, "_FEWEST_KEYS", 1)
        assert isinstance(it._forward, StockForward)
        it._forward._kernels = KernelSet(bmm=products.Bmm(singles=True))
    prompt, found = [3, 1, 4, 1, 5], []
    right = alone(it, prompt, 8, GREEDY).tokens
    assert 50 not in right
    slot = it.open(CONTEXT)
    it.forward([Segment(slot, prompt[:-1])])
    feed = prompt[-1:]
    while len(found) < 8:
        length, further = slot.length, []  # type: ignore[var-annotated]
        (token,) = it.forward([Segment(slot, [*feed, 50, 50, 50], GREEDY, drafts=3, further=further)])
        if token is None:
            assert slot.length == length
            token = one(it, Segment(slot, feed, GREEDY))
        assert further == []
        found.append(token)
        feed = [token]
    assert found == right


def test_scores_come_in_order_and_for_tokens_that_count_only() -> None:
    batch = logits(3, WORDS)
    best = batch.argmax(-1).tolist()
    for drafts, count in (([0, 0], 1), ([best[0], 0], 2), (best[:2], 3)):
        scores: list[Scores] = []
        asked = Segment(None, [1, *drafts], replace(GREEDY, logprobs=1), 0, None, scores, 2, [])  # type: ignore[arg-type]
        assert choose(batch, [asked], ()) == best[:1]
        assert asked.further == best[1:count]
        assert [s.token_id for s in scores] == best[:count]
