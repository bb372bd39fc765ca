"""Sampling: reproducible row by row, true to the distribution, and each filter as a plain reference has it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from pdq.engine import sampling
from pdq.engine.sampling import sample, uniform
from pdq.messages import SamplingParams

VOCAB = 5000  # more than the heads in which sampling looks first


def logits(rows: int = 1, vocab: int = VOCAB, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def reference(row: Sequence[float], params: SamplingParams, position: int) -> int:
    """One row in plain Python, filter after filter, renormalised after each."""
    scaled = [x / params.temperature for x in row]
    highest = max(scaled)
    left = [(math.exp(x - highest), -token) for token, x in enumerate(scaled)]
    if 0 < params.top_k < len(row) or params.top_p < 1 or params.min_p > 0:
        left.sort(reverse=True)
    if params.top_k:
        left = left[: params.top_k]
    if params.top_p < 1:
        mass, before, kept = sum(p for p, _ in left), 0.0, []
        for p, token in left:
            if kept and before >= params.top_p * mass:
                break
            kept.append((p, token))
            before += p
        left = kept
    left = [(p, token) for p, token in left if p >= params.min_p * left[0][0]]
    target = uniform(params.seed, position) * sum(p for p, _ in left)
    for p, token in left:
        target -= p
        if target < 0:
            return -token
    return -left[-1][1]


MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=0.3),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, top_p=0.5),
    SamplingParams(seed=5, min_p=0.1),
    SamplingParams(seed=6, temperature=3.0, top_k=500, top_p=0.99, min_p=0.001),
    SamplingParams(seed=7, temperature=10.0),
]


def test_a_row_gives_the_same_token_alone_in_a_batch_and_in_any_order() -> None:
    batch = logits(len(MIXED))
    for position in range(20):
        rows = [(params, position) for params in MIXED]
        together = sample(batch, rows)
        alone = [sample(batch[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
        order = list(range(len(rows)))
        random.Random(position).shuffle(order)
        shuffled = sample(batch[order], [rows[i] for i in order])
        assert together == alone
        assert shuffled == [together[i] for i in order]


def test_torch_generators_are_neither_used_nor_advanced() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = sample(logits(), [(SamplingParams(seed=9), 3)])
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert sample(logits(), [(SamplingParams(seed=9), 3)]) == first


def test_random_numbers_are_fixed_for_all_workers_and_versions() -> None:
    # 52 bits of SHA-256("7:0"), ("7:1") and ("-1:0"): a change here breaks the resumption of running requests.
    assert [uniform(7, 0), uniform(7, 1), uniform(-1, 0)] == [
        0.45234988393293185,
        0.8894061276003478,
        0.06767077964867019,
    ]


def test_seed_and_position_both_change_the_token() -> None:
    row = logits()
    by_seed = {sample(row, [(SamplingParams(seed=s), 0)])[0] for s in range(40)}
    by_position = {sample(row, [(SamplingParams(seed=0), k)])[0] for k in range(40)}
    assert len(by_seed) > 20
    assert len(by_position) > 20


@pytest.mark.parametrize("params", MIXED[1:], ids=lambda p: f"seed {p.seed}")
def test_filters_match_a_plain_reference(params: SamplingParams) -> None:
    batch = logits(60, seed=params.seed)
    rows = [(params, position) for position in range(60)]
    assert sample(batch, rows) == [reference(batch[i].tolist(), *rows[i]) for i in range(60)]


@pytest.mark.parametrize("top_k", [1, 2, 255, 256, 257, 4096, 4097, 4999, 5000, 9000])
@pytest.mark.parametrize("top_p", [0.2, 1.0])
def test_top_k_around_the_edges_of_the_heads_matches_a_plain_reference(top_k: int, top_p: float) -> None:
    params = SamplingParams(seed=11, temperature=8.0, top_k=top_k, top_p=top_p)  # flat: deep ranks are drawn
    row = logits(seed=11)
    for position in range(30):
        assert sample(row, [(params, position)]) == [reference(row[0].tolist(), params, position)]


def test_draws_follow_the_softmax_distribution() -> None:
    """Chi-square against the exact probabilities, over fixed seeds: 30.58 is the 99 % quantile for 15 degrees."""
    row = logits(vocab=16, spread=1.0)
    exact = torch.softmax(row[0] / 0.7, -1).tolist()
    n = 4000
    rows = [(SamplingParams(seed=seed, temperature=0.7), seed % 5) for seed in range(n)]
    counts = Counter(sample(row.expand(n, -1), rows))
    assert sum((counts[t] - n * p) ** 2 / (n * p) for t, p in enumerate(exact)) < 30.58


def test_draws_beyond_the_head_follow_the_distribution_too() -> None:
    """All of 1000 tokens equally likely: the mean id of 2000 draws is 499.5 with a standard error of 6.5."""
    n = 2000
    for params in (SamplingParams(), SamplingParams(top_p=0.9999), SamplingParams(min_p=0.9)):
        rows = [(replace(params, seed=seed), 0) for seed in range(n)]
        tokens = sample(torch.zeros(n, 1000), rows)
        assert abs(sum(t for t in tokens if t is not None) / n - 499.5) < 19.5
        assert len(set(tokens)) > 800


def test_top_k_one_equals_greedy() -> None:
    batch = logits(50, seed=3)
    rows = [(SamplingParams(seed=i, top_k=1), i) for i in range(50)]
    assert (
        sample(batch, rows) == sample(batch, [(SamplingParams(temperature=0.0), 0)] * 50) == batch.argmax(-1).tolist()
    )


def test_the_coldest_temperature_equals_greedy() -> None:
    batch = logits(20, seed=4)
    assert (
        sample(batch, [(SamplingParams(seed=i, temperature=1e-300), 0) for i in range(20)]) == batch.argmax(-1).tolist()
    )


def test_equal_logits_are_ordered_by_token_id() -> None:
    row = torch.zeros(1, VOCAB)
    assert sample(row, [(SamplingParams(temperature=0.0), 0)]) == [0]
    kept = {sample(row, [(SamplingParams(seed=s, top_k=3), 0)])[0] for s in range(100)}
    assert kept == {0, 1, 2}


def test_bfloat16_logits_give_the_tokens_of_their_float32_values() -> None:
    batch = logits(8).bfloat16()
    rows = [(params, 1) for params in MIXED]
    assert sample(batch, rows) == sample(batch.float(), rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_numbers_gives_none_and_leaves_its_neighbours_right(bad: float, temperature: float) -> None:
    rows = [(SamplingParams(seed=i, temperature=temperature), i) for i in range(3)]
    good = logits(3)
    broken = good.clone()
    broken[1, 500] = bad
    first, _, third = sample(good, rows)
    assert sample(broken, rows) == [first, None, third]


def test_a_row_without_a_finite_logit_gives_none() -> None:
    row = torch.full((1, 10), -math.inf)
    assert sample(row, [(SamplingParams(temperature=0.0), 0)]) == [None]
    assert sample(row, [(SamplingParams(), 0)]) == [None]


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    row = torch.full((1, VOCAB), -math.inf)
    row[0, 700], row[0, 300] = 1.0, 1.5
    assert {sample(row, [(SamplingParams(seed=s), 0)])[0] for s in range(50)} == {300, 700}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(min_p=1e-9)], ids=["unfiltered", "filtered"])
def test_the_ends_of_the_random_range_stay_on_possible_tokens(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    row = torch.full((1, VOCAB), -math.inf)
    row[0, [300, 700]] = 1.0
    for number, token in ((0.0, 300), (1 - 2.0**-52, 700)):
        monkeypatch.setattr(sampling, "uniform", lambda seed, position, number=number: number)
        assert sample(row, [(params, 0)]) == [token]
