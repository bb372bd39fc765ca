"""What the SDK refuses before anything is queued: each mistake an InvalidRequest that names its field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pdq.errors import InvalidRequest
from pdq.messages import SamplingParams
from pdq.validate import MAX_LISTED, make_sampling

WRONG: list[tuple[str, list[Any]]] = [
    ("repetition_penalty", [0, 0.0, -1, 10.1, math.nan, math.inf, True, "1", [1]]),
    ("presence_penalty", [-2.1, 2.1, math.nan, -math.inf, False, "0"]),
    ("frequency_penalty", [-2.1, 2.1, math.nan, math.inf, True, {}]),
    ("min_tokens", [-1, 1.0, 2**31, True, "1"]),
    ("logprobs", [-1, 21, 1.0, True, "1"]),
    ("logit_bias", [5, "5", [5], [(5,)], {5: "1"}, {5: None}, {5: True}, {5: 100.5}, {5: math.nan}, {5: math.inf}]),
    ("logit_bias", [{-1: 1}, {1.0: 1}, {True: 1}, {"a": 1}, {"": 1}, {"-1": 1}, {"\u0665": 1}, {2**31: 1}]),
    ("logit_bias", [{5: 1, "5": 2}, {None: 1}, dict.fromkeys(range(MAX_LISTED + 1), 1), {"9" * 5000: 1}]),
    ("allowed_token_ids", [[], (), 5, "5", {5: 1}, ["5"], [5.0], [True], [-1], [2**31], range(5)]),
    ("allowed_token_ids", [[5] * (MAX_LISTED + 1)]),
    ("stop_token_ids", [5, "5", [None], [-1], [2**31], [5] * (MAX_LISTED + 1)]),
    ("bad_words", [["x"]]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG for value in values])
def test_a_wrong_option_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make_sampling({name: value})
    assert raised.value.param == name
    assert len(str(raised.value)) < 300


def test_more_least_than_most_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequest) as raised:
        make_sampling({"min_tokens": 6, "max_tokens": 5})
    assert raised.value.param == "min_tokens"
    assert make_sampling({"min_tokens": 5, "max_tokens": 5}).min_tokens == 5
    assert make_sampling({"min_tokens": 6}).min_tokens == 6


def test_options_come_in_one_form_however_they_were_written() -> None:
    """Else the same request, submitted again, would be another."""
    once = make_sampling(
        {"logit_bias": {"7": 1, 5: -2.5}, "stop_token_ids": [9, 8, 9], "allowed_token_ids": {4, 3}, "seed": 1}
    )
    again = make_sampling(
        {"logit_bias": [(5, -2.5), (7, 1.0)], "stop_token_ids": (8, 9), "allowed_token_ids": [3, 4], "seed": 1}
    )
    assert (
        once
        == again
        == SamplingParams(seed=1, logit_bias=((5, -2.5), (7, 1.0)), stop_token_ids=(8, 9), allowed_token_ids=(3, 4))
    )


def test_none_means_that_nothing_was_asked() -> None:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs")
    given = dict.fromkeys([*names, "allowed_token_ids", "stop_token_ids"])
    assert make_sampling(given | {"seed": 0}) == SamplingParams()
