"""Bytes of an event stream become an answer with exact times, or a fault of a known kind."""

import pytest

from pdq.bench.stream import Answer, Fault, Lines, error_text
from tests.bench.conftest import DONE, completed, event, finish, said, usage


def answer(*parts: bytes) -> Answer:
    """Each part arrives one second after the last, the first at 1 s."""
    found, lines = Answer(), Lines()
    for now, part in enumerate(parts, 1):
        for data in lines.feed(part):
            found.take(data, float(now))
    for data in lines.close():
        found.take(data, float(len(parts)))
    return found


def test_chunks_have_the_times_of_their_text() -> None:
    role = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    found = answer(role, said("Hi"), b": ping\n\n", said(" you") + said("!"), finish("stop"), usage(9, 4, 2), DONE)
    found.check()
    assert found.chunks == [2.0, 4.0, 4.0]
    assert "".join(found.texts) == "Hi you!"
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (9, 4, 2)
    assert (found.finish_reason, found.ended) == ("stop", 7.0)


def test_an_event_may_come_in_pieces_and_with_carriage_returns() -> None:
    whole = (said("é") + finish() + DONE).replace(b"\n", b"\r\n")
    found = answer(*(whole[i : i + 1] for i in range(len(whole))))
    found.check()
    assert found.texts == ["é"]


def test_the_last_line_needs_no_newline() -> None:
    answer(completed("x"), finish(), b"data: [DONE]").check()


def test_thinking_is_output_but_no_part_of_the_answer() -> None:
    found = answer(event({"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}), said("a"))
    assert found.chunks == [1.0, 2.0]
    assert "".join(found.texts) == "a"


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("no_done", [said("a"), finish()]),
        ("no_done", []),
        ("no_finish_reason", [said("a"), DONE]),
        ("no_content", [said(""), finish(), DONE]),
        ("finish_error", [said("a"), finish("error"), DONE]),
        ("error_event", [said("a"), event({"error": {"message": "out of memory"}})]),
        ("error_event", [event({"object": "error", "message": "out of memory"})]),
        ("bad_event", [said("a"), b"data: {broken\n\n"]),
        ("bad_event", [b"data: 7\n\n"]),
    ],
)
def test_what_is_not_a_whole_answer_is_a_fault_with_its_kind(kind: str, parts: list[bytes]) -> None:
    with pytest.raises(Fault) as caught:
        answer(*parts).check()
    assert caught.value.kind == kind
    if kind == "error_event":
        assert caught.value.message == "out of memory"


def test_a_line_without_an_end_is_refused() -> None:
    lines = Lines()
    for _ in range(16):
        assert lines.feed(bytes(2**20)) == []
    with pytest.raises(Fault) as caught:
        lines.feed(b"x")
    assert caught.value.kind == "bad_event"


@pytest.mark.parametrize("odd", [None, 3, [], {"prompt_tokens": "x", "completion_tokens": True}, {"prompt_tokens": -1}])
def test_odd_usage_is_no_usage(odd: object) -> None:
    found = answer(said("a"), event({"choices": None, "usage": odd}), finish(), DONE)
    found.check()
    assert (found.prompt_tokens, found.completion_tokens, found.cached_tokens) == (None, None, None)


@pytest.mark.parametrize(
    "body", [{"error": {"message": "no"}}, {"error": "no"}, {"message": "no"}, {"detail": "no"}, "no"]
)
def test_the_sentence_in_an_error_is_found(body: object) -> None:
    assert error_text(body) == "no"
