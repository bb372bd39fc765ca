"""Figures of known records, computed by hand."""

import math
from dataclasses import replace

import pytest

from pdq.bench.prompts import LONG, MEASURED
from pdq.bench.records import Record
from pdq.bench.report import histogram, report
from pdq.bench.settings import BenchSettings
from pdq.bench.summary import percentile, stats, summarize

# Sent at 10 s; text at 10.5, 10.6, 10.9; the end at 11. Five tokens came in three chunks.
ONE = Record(
    MEASURED, 10.0, 11.0, (10.5, 10.6, 10.9), prompt_tokens=100, cached_tokens=64, completion_tokens=5,
    finish_reason="stop",
)  # fmt: skip
FAILED = Record(MEASURED, 10.0, 14.0, (10.1,), error="timeout", detail="not done after 4 s")


def about(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


def test_what_is_measured_of_one_request() -> None:
    assert ONE.ttft == about(0.5)
    assert ONE.tpot == about(0.4 / 4)
    assert ONE.e2e == 1.0
    assert ONE.gaps == [(10.5, 10.6), (10.6, 10.9)]
    assert ONE.output_tokens == 5


def test_without_usage_chunks_are_tokens() -> None:
    bare = replace(ONE, completion_tokens=None)
    assert (bare.output_tokens, bare.tpot) == (3, about(0.2))


def test_one_token_has_no_time_per_output_token() -> None:
    assert replace(ONE, chunks=(10.5,), completion_tokens=1).tpot is None


def test_percentiles_are_linear_between_ranks() -> None:
    found = stats([n / 1000 for n in range(100, 0, -1)])
    assert found is not None
    assert (found.count, found.mean, found.max) == (100, about(50.5), 100.0)
    assert (found.p50, found.p90, found.p99) == (about(50.5), about(90.1), about(99.01))
    assert percentile([7.0], 99) == 7.0
    assert stats([]) is None


def test_throughput_counts_successes_over_first_sent_to_last_ended() -> None:
    second = replace(ONE, start=11.0, end=12.0, chunks=(11.2, 11.3), completion_tokens=3, prompt_tokens=60)
    summary = summarize([second, FAILED, ONE], {})
    assert summary.duration_s == 4.0
    assert (summary.requests, summary.succeeded, summary.failed, summary.errors) == (3, 2, 1, {"timeout": 1})
    assert (summary.input_tokens, summary.output_tokens) == (160, 8)
    assert (summary.requests_per_s, summary.input_tokens_per_s, summary.output_tokens_per_s) == (0.5, 40.0, 2.0)


def test_a_failed_request_has_no_latency() -> None:
    summary = summarize([ONE, FAILED], {})
    for found, ms in ((summary.ttft_ms, 500), (summary.tpot_ms, 100), (summary.e2e_ms, 1000)):
        assert found is not None
        assert (found.count, found.max) == (1, about(ms))
    assert summary.itl_ms is not None
    assert (summary.itl_ms.count, summary.itl_ms.mean, summary.itl_ms.max) == (2, about(200), about(300))


def test_the_hit_ratio_is_of_tokens_and_of_those_who_tell() -> None:
    cold = replace(ONE, prompt_tokens=300, cached_tokens=0)
    silent = replace(ONE, prompt_tokens=1000, cached_tokens=None)
    summary = summarize([ONE, cold, silent, replace(FAILED, prompt_tokens=50, cached_tokens=50)], {})
    assert (summary.cached_tokens, summary.hit_ratio) == (64, 64 / 400)
    assert summarize([silent], {}).hit_ratio is None


def test_answers_without_usage_are_counted() -> None:
    assert (
        summarize([ONE, replace(ONE, completion_tokens=None), replace(ONE, prompt_tokens=None)], {}).without_usage == 2
    )


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({"ttft": 500.0}, 2),
        ({"ttft": 499.0}, 1),
        ({"tpot": 100.1, "e2e": 1000.0}, 2),
        ({"tpot": 99.0}, 0),
        ({"ttft": 600.0, "e2e": 999.0}, 0),
    ],
)
def test_goodput_wants_every_limit_met_and_counts_failures_as_misses(limits: dict[str, float], met: int) -> None:
    quick = replace(ONE, chunks=(10.1, 10.2, 10.5))
    goodput = summarize([ONE, quick, FAILED, FAILED], limits).goodput
    assert goodput is not None
    assert (goodput.met, goodput.share, goodput.rate) == (met, met / 4, met / 4.0)


def test_a_gap_is_loaded_if_it_overlaps_the_life_of_a_long_prompt() -> None:
    steady = replace(ONE, start=0.0, end=9.0, chunks=(1.0, 2.0, 2.5, 3.25, 3.5, 4.25, 8.0))
    long = [
        Record(LONG, 2.0, 3.5, (2.9,)),  # overlaps the three gaps from 2.0 to 3.5, and only touches their neighbours
        Record(LONG, 2.25, 3.0, (), error="timeout"),  # one that failed was a load, too
        Record(LONG, 5.0, 6.0, (5.25,)),  # inside 4.25-8.0
    ]
    summary = summarize([steady, *long], {})
    found = summary.interference
    assert found is not None
    assert found.itl_quiet_ms == stats([1.0, 0.75])
    assert found.itl_loaded_ms == stats([0.5, 0.75, 0.25, 3.75])
    assert (found.long_requests, found.long_errors) == (3, {"timeout": 1})
    assert found.long_ttft_ms == stats([2.9 - 2.0, 0.25])
    assert (summary.requests, summary.errors, summary.duration_s) == (1, {}, 9.0)


def test_turns_of_a_conversation_have_a_ttft_each() -> None:
    later = replace(ONE, turn=1, chunks=tuple(c + 0.25 for c in ONE.chunks))
    settings = BenchSettings(shape="multi-turn")
    summary = summarize([ONE, later, replace(FAILED, turn=2)], {})
    assert summary.ttft_by_turn_ms == {1: stats([0.5]), 2: stats([0.75])}
    assert summarize([ONE, ONE], {}).ttft_by_turn_ms == {}
    lines = report(settings, "tiny", 7, summary, []).splitlines()
    assert [line.split()[:5] for line in lines if line.startswith("TTFT turn")] == [
        ["TTFT", "turn", "1", "500.00", "500.00"],
        ["TTFT", "turn", "2", "750.00", "750.00"],
    ]


def test_nothing_measured_is_nothing_and_no_division() -> None:
    summary = summarize([], {"ttft": 1.0})
    assert (summary.requests, summary.duration_s, summary.requests_per_s, summary.ttft_ms) == (0, 0.0, 0.0, None)
    assert summary.goodput is not None
    assert summary.goodput.share == 0.0


def test_the_report_says_it_all() -> None:
    settings = BenchSettings(rate=2, shape="shared-prefix", slo="ttft:600")
    lines = report(settings, "tiny", 7, summarize([ONE, FAILED], settings.slos, [0.001]), ["a note"]).splitlines()
    assert lines[0] == "http://127.0.0.1:8000, model tiny, seed 7"
    assert lines[1].endswith("after a prefix of 512 words (1 different); 2 requests/s (Poisson)")
    assert "requests    2, 1 failed (timeout 1)" in lines
    assert "throughput  0.25 requests/s, 1.2 output tokens/s, 25.0 input tokens/s" in lines
    assert "cache hits  64.0% of the input tokens" in lines
    assert "goodput     50.0% of the requests, 0.25/s, within ttft 600 ms" in lines
    assert "sent late   by 1.0 ms (p50), 1.0 ms (max)" in lines
    assert "timeout     not done after 4 s" in lines
    assert "note        a note" in lines
    assert [line.split() for line in lines if line.startswith("ITL")] == [
        ["ITL", "200.00", "200.00", "280.00", "298.00", "300.00"]
    ]


def test_a_histogram_has_equal_steps_and_a_row_for_the_tail() -> None:
    values = [*(n / 1000 for n in range(100)), *(0.0,) * 100]
    title, *rows, last, empty = histogram("TTFT", values, "#", bins=2)
    assert (title, empty) == ("TTFT (ms, 200 values)", "")
    assert [int(row.split()[-1]) for row in rows] == [149, 49]
    assert int(last.split()[-1]) == 2
    assert last.startswith("> ")
    assert rows[0].count("#") == 50
    assert rows[1].count("#") == round(49 / 149 * 50)


def test_a_histogram_of_equal_values_has_one_row() -> None:
    assert [row.split() for row in histogram("ITL", [0.002] * 3, "#")[1:-1]] == [["2.00", "#" * 50, "3"]]
    assert histogram("ITL", []) == []


def test_json_has_no_endless_digits() -> None:
    found = summarize([ONE], {}).as_json()
    assert found["ttft_ms"] == {"count": 1, "mean": 500.0, "p50": 500.0, "p90": 500.0, "p99": 500.0, "max": 500.0}
    assert found["interference"] is None
    assert all(math.isfinite(v) for v in found["itl_ms"].values())
