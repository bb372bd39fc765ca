"""What edits logits and what is told of them: each option as a plain reference has it, alone, in a batch, replayed."""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pdq.engine.base import LEAST_LOGPROB, Scores, Segment
from pdq.engine.choice import choose
from pdq.engine.edits import edited
from pdq.engine.runner import TorchEngine
from pdq.messages import SamplingParams
from tests.engine.pd import BLOCK, HEADROOM, one, runs_of
from tests.engine.test_sampling import logits, reference
from tests.engine.tiny import CONTEXT

EOS = (3, 8)
WORDS = 400  # of the made-up logits
NO_SLOT: dict[str, object] = {"slot": None, "token_ids": ()}


def segment(params: SamplingParams, position: int = 0, history: Sequence[int] | None = None) -> Segment:
    scores: list[Scores] | None = None if params.logprobs is None else []
    return Segment(sample=params, position=position, history=history, scores=scores, **NO_SLOT)  # type: ignore[arg-type]


def plain(row: Sequence[float], wanted: Segment) -> list[float]:
    """The edited logits of one row, option after option, in plain Python."""
    p, out = wanted.sample, list(row)
    assert p is not None
    for token, bias in p.logit_bias:
        out[token] += bias
    history = list(wanted.history or ())
    if p.repetition_penalty != 1:
        for token in set(history):
            out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    for token, count in Counter(history[len(history) - wanted.position :]).items():
        out[token] -= p.presence_penalty + p.frequency_penalty * count
    if p.allowed_token_ids is not None:
        out = [x if token in p.allowed_token_ids else -math.inf for token, x in enumerate(out)]
    if wanted.position < p.min_tokens:
        for token in (*p.stop_token_ids, *(() if p.ignore_eos else EOS)):
            out[token] = -math.inf
    return out


OPTIONS = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below one": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 1.9},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": ((0, 4.0), (7, -100.0), (399, 6.5))},
    "allowed": {"allowed_token_ids": (1, 3, 50, 399)},
    "least": {"min_tokens": 30, "stop_token_ids": (11, 12), "logit_bias": ((3, 90.0), (8, 91.0), (11, 92.0))},
    "least without eos": {"min_tokens": 30, "ignore_eos": True, "logit_bias": ((3, 4.0), (8, 4.0))},
}
ALL = {name: value for options in OPTIONS.values() for name, value in options.items()} | {"repetition_penalty": 1.2}
ALL["allowed_token_ids"] = tuple(range(0, WORDS, 3))
CASES = [SamplingParams(seed=i, **options) for i, options in enumerate([*OPTIONS.values(), ALL])]  # type: ignore[arg-type]
CASES += [replace(CASES[-1], temperature=0.0), replace(CASES[-1], top_k=20, top_p=0.9, min_p=0.01, temperature=1.5)]
NAMES = [*OPTIONS, "all", "all, greedy", "all, filtered"]


def story(position: int, seed: int) -> list[int]:
    """A prompt of 40 tokens and a completion of `position`, with many repetitions."""
    rng = random.Random(seed * 1000)
    return [rng.randrange(60) for _ in range(40 + position)]


def segments(params: SamplingParams, count: int = 60) -> list[Segment]:
    return [segment(params, k, story(k, params.seed)) for k in range(count)]


@pytest.mark.parametrize("params", CASES, ids=NAMES)
def test_the_edited_logits_are_those_of_a_plain_reference(params: SamplingParams) -> None:
    batch = logits(60, WORDS, seed=params.seed)
    before = batch.clone()
    wanted = segments(params)
    found = edited(batch, wanted, EOS)
    expected = torch.tensor([plain(row, s) for row, s in zip(batch.tolist(), wanted, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    assert not torch.equal(found, batch)
    assert torch.equal(batch, before)


@pytest.mark.parametrize("params", CASES, ids=NAMES)
def test_the_chosen_tokens_are_those_of_a_plain_reference(params: SamplingParams) -> None:
    batch = logits(60, WORDS, seed=params.seed)
    wanted = segments(params)
    expected = []
    for row, s in zip(batch.tolist(), wanted, strict=True):
        left = plain(row, s)
        greedy = max(range(WORDS), key=lambda t: left[t])
        expected.append(greedy if params.temperature == 0 else reference(left, params, s.position))
    assert choose(batch, wanted, EOS) == expected
    assert expected != choose(batch, [segment(replace(SamplingParams(), seed=params.seed), k) for k in range(60)], EOS)


def test_a_row_gives_the_same_token_and_scores_alone_in_a_batch_and_in_any_order() -> None:
    rows = [replace(p, logprobs=i % 4) for i, p in enumerate(CASES)] + [SamplingParams(temperature=0.0, logprobs=2)]
    rows += [SamplingParams(seed=5), SamplingParams(temperature=0.0)]
    batch = logits(len(rows), WORDS, seed=50)
    for position in range(12):

        def asked(order: Sequence[int], position: int = position) -> tuple[list[int | None], list[list[Scores] | None]]:
            wanted = [segment(rows[i], position, story(position, rows[i].seed)) for i in order]
            return choose(batch[list(order)], wanted, EOS), [s.scores for s in wanted]

        tokens, scores = asked(range(len(rows)))
        alone = [asked([i]) for i in range(len(rows))]
        assert [(tokens[i], scores[i]) for i in range(len(rows))] == [(t, s) for (t,), (s,) in alone]
        order = random.Random(position).sample(range(len(rows)), len(rows))
        assert asked(order) == ([tokens[i] for i in order], [scores[i] for i in order])


def test_logits_of_plain_requests_are_not_even_copied() -> None:
    batch = logits(3, WORDS).bfloat16()
    wanted = [segment(SamplingParams(stop_token_ids=(5,), logprobs=3, min_tokens=4), 4, [1, 2]) for _ in range(3)]
    assert edited(batch, wanted, EOS) is batch


def test_bfloat16_logits_are_edited_as_their_float32_values() -> None:
    batch = logits(len(CASES), WORDS).bfloat16()
    wanted = [segment(p, 9, story(9, 1)) for p in CASES]
    assert torch.equal(edited(batch, wanted, EOS), edited(batch.float(), wanted, EOS))


def test_penalties_without_the_tokens_before_are_refused() -> None:
    params = SamplingParams(presence_penalty=1.0)
    for history in (None, [1, 2]):
        with pytest.raises(ValueError, match="prompt and completion"):
            choose(logits(1, WORDS), [segment(params, 3, history)], EOS)


def test_an_array_is_read_as_a_list_is_and_can_grow_afterwards() -> None:
    row, params = logits(1, WORDS), SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)
    history = array("q", story(5, 2))
    found = edited(row, [segment(params, 5, history)], EOS)
    assert torch.equal(found, edited(row, [segment(params, 5, list(history))], EOS))
    history.append(3)
    assert not torch.equal(found, edited(row, [segment(params, 6, history)], EOS))


def test_the_first_token_of_a_completion_knows_no_presence_but_the_prompts_repetition() -> None:
    row, prompt = torch.ones(1, WORDS), [5, 5, 6]
    completion_only = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(edited(row, [segment(completion_only, 0, prompt)], EOS), row)
    found = edited(row, [segment(SamplingParams(repetition_penalty=2.0), 0, prompt)], EOS)
    assert {t: x for t, x in enumerate(found[0].tolist()) if x != 1.0} == {5: 0.5, 6: 0.5}


def test_ends_may_come_from_min_tokens_on() -> None:
    row = torch.zeros(1, WORDS)
    row[0, EOS[0]] = 9.0
    params = SamplingParams(temperature=0.0, min_tokens=2)
    assert [choose(row, [segment(params, k)], EOS) for k in range(4)] == [[0], [0], [EOS[0]], [EOS[0]]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_numbers_is_not_made_good_by_an_edit(bad: float) -> None:
    wanted = [segment(replace(CASES[-2], seed=i, logprobs=1), 3, story(3, i)) for i in range(3)]
    good = logits(3, WORDS)
    first, _, third = choose(good, wanted, EOS)
    broken = good.clone()
    broken[1, 1] = bad  # token 1 is not allowed
    wanted = [replace(s, scores=[]) for s in wanted]
    assert choose(broken, wanted, EOS) == [first, None, third]
    assert [len(s.scores or ()) for s in wanted] == [1, 0, 1]


def test_no_allowed_token_that_may_come_gives_none() -> None:
    params = SamplingParams(allowed_token_ids=EOS, min_tokens=1)
    assert choose(logits(1, WORDS), [segment(params)], EOS) == [None]


# ---- log probabilities ----


def test_scores_are_those_of_the_models_own_distribution() -> None:
    """Before temperature, filters, penalties and biases; of equal ones the lower id first."""
    row = logits(1, WORDS)
    row[0, 300] = row[0, 200] = row[0, 250] = 9.0
    edits = {"temperature": 0.3, "top_k": 2, "logit_bias": ((17, 100.0),), "repetition_penalty": 2.0}
    wanted = segment(SamplingParams(logprobs=4, **edits), 1, [200, 300])  # type: ignore[arg-type]
    assert choose(row, [wanted], EOS) == [17]
    exact = row[0].double() - row[0].double().logsumexp(0)
    (found,) = wanted.scores or ()
    assert found.token_id == 17
    assert found.logprob == pytest.approx(exact[17].item(), abs=1e-5)
    fourth = int(row[0].argsort(descending=True)[3])
    assert [token for token, _ in found.top] == [200, 250, 300, fourth]
    assert [p for _, p in found.top] == pytest.approx([exact[t].item() for t in (200, 250, 300, fourth)], abs=1e-5)


def test_impossible_tokens_have_a_finite_score() -> None:
    row = torch.full((1, 10), -math.inf)
    row[0, 4] = 1.0
    wanted = segment(SamplingParams(temperature=0.0, logprobs=3))
    assert choose(row, [wanted], EOS) == [4]
    assert wanted.scores == [Scores(4, 0.0, ((4, 0.0), (0, LEAST_LOGPROB), (1, LEAST_LOGPROB)))]


def test_of_many_equal_tokens_the_lowest_ids_are_told() -> None:
    row = torch.zeros(1, 5000)
    row[0, [4000, 30]] = 1.0
    wanted = segment(SamplingParams(temperature=0.0, logprobs=20))
    choose(row, [wanted], EOS)
    assert [t for t, _ in (wanted.scores or ())[0].top] == [30, 4000, *range(18)]


def test_more_scores_than_tokens_are_all_tokens() -> None:
    wanted = segment(SamplingParams(temperature=0.0, logprobs=20))
    choose(logits(1, 10), [wanted], EOS)
    assert sorted(t for t, _ in (wanted.scores or ())[0].top) == list(range(10))


# ---- on a model ----

SEEDED = SamplingParams(
    seed=77, temperature=1.3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
    logit_bias=((5, 1.5),), min_tokens=6, stop_token_ids=(9,), allowed_token_ids=tuple(range(90)), logprobs=3,
)  # fmt: skip


class Run:
    """One completion in an engine's slot, as the decode worker keeps it."""

    def __init__(self, engine: TorchEngine, prompt: Sequence[int], params: SamplingParams) -> None:
        self.slot, self.params, self.prompt = engine.open(CONTEXT), params, list(prompt)
        self.tokens: list[int] = []
        self.scores: list[Scores] = []
        self.feed = list(prompt)

    def segment(self) -> Segment:
        history = array("q", [*self.prompt, *self.tokens])
        return Segment(self.slot, self.feed, self.params, len(self.tokens), history, self.scores)

    def push(self, token: int | None) -> None:
        assert token is not None
        self.tokens.append(token)
        self.feed = [token]


def alone(engine: TorchEngine, prompt: Sequence[int], count: int, params: SamplingParams) -> Run:
    run = Run(engine, prompt, params)
    while len(run.tokens) < count:
        run.push(one(engine, run.segment()))
    engine.close(run.slot)
    return run


def same_scores(found: Sequence[Scores], expected: Sequence[Scores]) -> None:
    assert [s.token_id for s in found] == [s.token_id for s in expected]
    for a, b in zip(found, expected, strict=True):
        assert [t for t, _ in a.top] == [t for t, _ in b.top]
        assert [a.logprob, *(p for _, p in a.top)] == pytest.approx([b.logprob, *(p for _, p in b.top)], abs=1e-4)


def test_a_seeded_request_is_the_same_in_a_batch_of_others(arch) -> None:  # type: ignore[no-untyped-def]
    engine = arch("llama").decode
    expected = alone(engine, arch("llama").prompt(11), 20, SEEDED)
    others = [SamplingParams(temperature=0.0), replace(SEEDED, seed=1), SamplingParams(seed=2, presence_penalty=2.0)]
    runs = [Run(engine, arch("llama").prompt(n), p) for n, p in zip((9, 11, 14), others, strict=True)]
    runs.insert(2, Run(engine, arch("llama").prompt(11), SEEDED))
    for _ in range(20):
        for run, token in zip(runs, engine.forward([r.segment() for r in runs]), strict=True):
            run.push(token)
    assert runs[2].tokens == expected.tokens
    assert runs[1].tokens != expected.tokens
    same_scores(runs[2].scores, expected.scores)
    for run in runs:
        engine.close(run.slot)


@pytest.mark.parametrize("emitted", [1, 5, 13])
def test_a_seeded_request_goes_on_as_it_would_have_on_another_worker(arch, emitted: int) -> None:  # type: ignore[no-untyped-def]
    """The prompt's KV comes from the store, the emitted tokens are replayed, and the penalties count all of them."""
    first, second = arch("llama").prefill, arch("llama").decode
    prompt = arch("llama").prompt(11)
    expected = alone(first, prompt, 20, SEEDED)
    dead = Run(first, prompt, SEEDED)
    dead.push(one(first, dead.segment()))
    kv = runs_of(first.export(dead.slot, 0, len(prompt), BLOCK, HEADROOM), len(prompt))
    first.close(dead.slot)
    heir = Run(second, prompt, SEEDED)
    second.load(heir.slot, 0, kv)
    heir.tokens = expected.tokens[:emitted]
    heir.feed = list(heir.tokens)
    while len(heir.tokens) < 20:
        heir.push(one(second, heir.segment()))
    second.close(heir.slot)
    assert heir.tokens == expected.tokens
    same_scores(heir.scores, expected.scores[emitted:])


def test_greedy_with_a_repetition_penalty_is_that_of_generate(arch) -> None:  # type: ignore[no-untyped-def]
    it = arch("llama")
    prompt = it.prompt(12)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.4)
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    stock = it.stock.generate(ids, repetition_penalty=1.4, **options)[0, len(prompt) :].tolist()
    assert alone(it.prefill, prompt, 24, params).tokens == stock
    assert stock != it.expected(12, 24)
