"""What a completion shows and when it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from pdq.engine.base import Scores
from pdq.generation import Generation, Step, max_new_tokens
from pdq.messages import SamplingParams, TokenLogprob, TopLogprob
from pdq.text import ByteTokenizer

EOS = ByteTokenizer.eos_id


def generation(*stop: str, max_new: int = 100, ignore_eos: bool = False) -> Generation:
    sampling = SamplingParams(stop=stop, ignore_eos=ignore_eos)
    return Generation(ByteTokenizer(), sampling, frozenset({EOS}), max_new)


def run(found: Generation, ids: bytes | list[int]) -> tuple[list[str], str | None]:
    """The deltas up to the end, and the finish reason (None: it goes on)."""
    deltas = []
    for token in ids:
        step = found.push(token)
        deltas.append(step.text)
        if step.finish_reason:
            return deltas, step.finish_reason
    return deltas, None


def test_text_without_stops_is_shown_at_once() -> None:
    assert run(generation(), b"abc") == (["a", "b", "c"], None)


class Words(ByteTokenizer):
    """Tokens of several characters each."""

    WORDS = ("Par", "is ", "big", "Paris big")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.WORDS[t] for t in token_ids)


def test_a_stop_string_off_token_edges_cuts_the_text_before_it() -> None:
    found = Generation(Words(), SamplingParams(stop=("ari",)), frozenset(), 10)
    assert [found.push(0), found.push(1)] == [Step("P", None), Step("", "stop")]


def test_a_stop_string_spread_over_tokens_never_shows() -> None:
    assert run(generation("ari"), b"Paris is big") == (["P", "", "", ""], "stop")


def test_held_text_is_released_when_it_does_not_become_a_stop_string() -> None:
    assert run(generation("abc"), b"xabxabd") == (["x", "", "", "abx", "", "", "abd"], None)


def test_a_stop_string_that_begins_inside_a_failed_one_is_found() -> None:
    assert run(generation("aab"), b"aaab") == (["", "", "a", ""], "stop")


@pytest.mark.parametrize("stop", [("s b", "is"), ("is", "s b")])
def test_of_several_stop_strings_in_one_token_the_one_that_begins_first_wins(stop: tuple[str, ...]) -> None:
    found = Generation(Words(), SamplingParams(stop=stop), frozenset(), 10)
    assert found.push(3) == Step("Par", "stop")


def test_one_held_start_does_not_hide_another_stop_string() -> None:
    assert run(generation("abcd", "bc"), b"xabcd") == (["x", "", "", "a"], "stop")


def test_an_empty_stop_string_does_not_end_the_text() -> None:
    assert run(generation("", "c"), b"abc") == (["a", "b", ""], "stop")


def test_a_stop_string_of_several_bytes_a_character() -> None:
    deltas, reason = run(generation("🙂中"), "a🙂b🙂中x".encode())
    assert ("".join(deltas), reason) == ("a🙂b", "stop")


def test_eos_ends_with_stop_and_releases_held_text() -> None:
    assert run(generation("abc"), [*b"xab", EOS]) == (["x", "", "", "ab"], "stop")


def test_a_stop_token_ends_as_eos_does_and_is_no_text() -> None:
    found = Generation(ByteTokenizer(), SamplingParams(stop=("abc",), stop_token_ids=(33,)), frozenset({EOS}), 100)
    assert run(found, b"xab!") == (["x", "", "", "ab"], "stop")


def test_ignoring_eos_does_not_ignore_stop_tokens() -> None:
    params = SamplingParams(ignore_eos=True, stop_token_ids=(33, EOS))
    for end in (33, EOS):
        assert run(Generation(ByteTokenizer(), params, frozenset({EOS}), 100), [97, end]) == (["a", ""], "stop")


@pytest.mark.parametrize(("least", "text"), [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "abab"), (9, "ababab")])
def test_stop_strings_count_when_they_end_after_min_tokens(least: int, text: str) -> None:
    found = Generation(ByteTokenizer(), SamplingParams(stop=("ab",), min_tokens=least), frozenset(), 6)
    deltas, _ = run(found, b"ababab")
    assert "".join(deltas) == text


def test_a_stop_string_that_ended_before_min_tokens_is_not_found_later_in_held_text() -> None:
    found = Generation(ByteTokenizer(), SamplingParams(stop=("bc", "abcd"), min_tokens=3), frozenset(), 10)
    assert run(found, b"abcxbc") == (["", "", "", "abcx", "", ""], "stop")


def test_stop_tokens_before_min_tokens_are_ordinary() -> None:
    found = Generation(ByteTokenizer(), SamplingParams(stop_token_ids=(98,), min_tokens=2), frozenset({EOS}), 10)
    assert run(found, [97, 98, 97, 98]) == (["a", "b", "a", ""], "stop")


def test_log_probabilities_have_the_bytes_of_their_tokens() -> None:
    scores = [Scores(104, -0.5, ((104, -0.5), (0xC3, -1.0))), Scores(EOS, -2.0, ())]
    assert generation().logprobs(scores) == (
        TokenLogprob(104, -0.5, b"h", (TopLogprob(104, -0.5, b"h"), TopLogprob(0xC3, -1.0, b"\xc3"))),
        TokenLogprob(EOS, -2.0, b"<eos>"),
    )


def test_ignored_eos_is_no_text_and_no_end() -> None:
    assert run(generation(ignore_eos=True, max_new=4), [97, EOS, EOS, 98]) == (["a", "", "", "b"], "length")


def test_the_last_allowed_token_ends_with_length_and_releases_held_text() -> None:
    assert run(generation("abc", max_new=3), b"xab") == (["x", "", "ab"], "length")


def test_a_single_token_ends_at_once() -> None:
    assert run(generation(max_new=1), b"ab") == (["a"], "length")
    assert run(generation("a", max_new=1), b"ab") == ([""], "stop")
    assert run(generation(max_new=1), [EOS]) == ([""], "stop")


def test_an_incomplete_character_at_the_end_does_not_show() -> None:
    assert run(generation(max_new=3), b"a\xf0\x9f") == (["a", "", ""], "length")


@pytest.mark.parametrize("stop", [(), ("xyz",), ("s b", "🙂🙂"), ("中x",)])
def test_a_run_taken_over_after_any_token_continues_as_if_undisturbed(stop: tuple[str, ...]) -> None:
    ids = [*"Paris is big 🙂中é".encode(), 0xFF, *"s 中x!".encode(), EOS]
    undisturbed = generation(*stop)
    steps = []
    for token in ids:
        steps.append(undisturbed.push(token))
        if steps[-1].finish_reason:
            break
    for k in range(len(steps)):
        other = generation(*stop)
        other.replay(ids[:k])
        assert other.count == k
        assert [other.push(token) for token in ids[k : len(steps)]] == steps[k:]


def test_deltas_together_are_the_text_before_the_stop() -> None:
    text = "one two three 🙂 four"
    for stop in ("two", "three 🙂", "four", "e t", "never"):
        deltas, _ = run(generation(stop), [*text.encode(), EOS])
        assert "".join(deltas) == text.split(stop)[0]


def test_many_long_stop_strings_cost_little_a_token() -> None:
    stops = tuple(chr(0x100 + i) + "a" * 1023 for i in range(63))
    found = generation("a" * 1024, *stops, max_new=10_000)
    for _ in range(1000):
        found.push(97)
    start = time.perf_counter()
    for _ in range(20):
        found.push(97)
    assert (time.perf_counter() - start) / 20 < 0.005


@pytest.mark.parametrize(("asked", "prompt", "room"), [(None, 10, 90), (5, 10, 5), (500, 10, 90), (1, 99, 1)])
def test_new_tokens_are_what_was_asked_or_what_the_context_leaves(asked: int | None, prompt: int, room: int) -> None:
    assert max_new_tokens(SamplingParams(max_tokens=asked), prompt, 100) == room
