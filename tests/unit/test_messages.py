"""The wire codec: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import itertools
import math
import pickle
import random
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import msgpack
import pytest

from pdq import messages
from pdq.messages import (
    MAX_MESSAGE_BYTES,
    VERSION,
    BadMessage,
    ErrorInfo,
    Event,
    Handoff,
    Message,
    Request,
    SamplingParams,
    Timings,
    TokenLogprob,
    TopLogprob,
    Usage,
    WorkerInfo,
    decode,
    encode,
)

EXAMPLES: list[Request | Handoff | Event | WorkerInfo] = [
    Request("r1", SamplingParams(), prompt="hi"),
    Request(
        "r2",
        SamplingParams(0.5, 0.9, 40, 0.1, 2**63 - 1, 12, ("a", "🙂\x00"), True),
        messages=(Message("system", ""), Message("user", "中", "Eve")),
        model="m",
        lane="high",
        timeout=1.5,
        tenant="t",
    ),
    Request(
        "r4",
        SamplingParams(1.0, 1.0, 0, 0.0, 7, None, (), False, 1.5, -2.0, 0.5, ((3, -1.5), (9, 2.0)), 4, (3, 9), (8,), 5),
        prompt="x",
    ),
    Request("r3", SamplingParams(seed=-(2**63)), token_ids=tuple(range(0, 3000, 7))),
    Request("r5", SamplingParams(), prompt="x", cache="off", speculation="ngram"),
    Handoff((1, 2, 3), 3, b"\x00\xff" * 16, 32),
    Handoff((), 0, b"", 1, "tail", 64, Timings(1.0, 2.5, 0.0, 1e9)),
    Event(0, (5,), "a"),
    Event(7, (), "", finish_reason="stop", usage=Usage(3, 4, 2), timings=Timings(1.0)),
    Event(
        3,
        (5, 6),
        "a",
        logprobs=(TokenLogprob(5, -0.5, b"a", (TopLogprob(7, 0.0, b"\xff"),)), TokenLogprob(6, -9.0, b"")),
    ),
    Event(0, (), "", finish_reason="error", error=ErrorInfo("queue_full", "no", "prompt")),
    WorkerInfo("w", "decode", "m", b"\x01" * 32, 8192, "ready", 3, 16, (("steps", 12), ("tokens", 2**40)), "avx2"),
]
KINDS = sorted({type(e) for e in EXAMPLES}, key=lambda cls: cls.__name__)


def raw(message: Request | Handoff | Event | WorkerInfo) -> list[Any]:
    found: list[Any] = msgpack.unpackb(encode(message))
    return found


def refused(cls: type[Any], data: bytes) -> BadMessage:
    with pytest.raises(BadMessage) as e:
        decode(cls, data)
    return e.value


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: f"{type(m).__name__}")
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    assert decode(type(message), encode(message)) == message
    assert hash(decode(type(message), encode(message))) == hash(message)


def test_whole_numbers_in_float_fields_come_back_as_floats() -> None:
    array = raw(Request("r", SamplingParams(), prompt="x"))
    array[2 + [f.name for f in fields(Request)].index("timeout")] = 5
    found = decode(Request, msgpack.packb(array))
    assert found.timeout == 5.0
    assert type(found.timeout) is float


# Of each type, values that it must not take.
WRONG: dict[str, list[Any]] = {
    "str": [None, True, 1, 1.5, b"x", [], ["x"]],
    "str | None": [True, 1, 1.5, b"x", [], ["x"]],
    "int": [None, True, 1.5, "1", b"1", []],
    "float": [None, True, "1", b"1", []],
    "bytes": [None, True, 1, "x", []],
    "tuple[int, ...]": [None, 1, "x", b"x", [None], [1, True], [1.0], ["1"], [[1]]],
    "tuple[int, ...] | None": [1, "x", b"x", [None], [1, True], [1.0], ["1"], [[1]]],
    "tuple[Message, ...] | None": [
        1,
        "x",
        [1],
        ["x"],
        [[]],
        [["user"]],
        [["user", 1]],
        [["user", "x", 1]],
        [[None] * 9],
    ],
    "tuple[tuple[str, int], ...]": [None, "x", ["x"], [["x"]], [["x", "1"]], [["x", 1, 1]], [[1, 1]]],
    "SamplingParams": [None, 1, "x", ["1"], [1.0, None], [1.0, 1.0, 1.5], [0.0] * 20],
    "Timings": [None, 1, "x", ["1"], [1.0] * 5],
    "Timings | None": [1, "x", ["1"], [1.0] * 5],
    "Usage | None": [1, "x", [], [1], ["1", 2], [1, 2, 3, 4]],
    "tuple[TokenLogprob, ...]": [
        None,
        1,
        [1],
        [[1, -0.5]],
        [[1, -0.5, "x"]],
        [["1", -0.5, b""]],
        [[1, math.nan, b""]],
        [[1, -0.5, b"", [[1, -0.5]]]],
        [[1, -0.5, b"", [1]]],
    ],
    "ErrorInfo | None": [1, "x", [], ["x"], [1, "x"], ["x", "x", 1]],
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda m: f"{type(m).__name__}")
def test_a_field_of_a_wrong_type_is_refused_by_its_name(example: Any) -> None:
    array = raw(example)
    for i, f in enumerate(fields(example)):
        for value in WRONG[str(f.type)]:
            changed = [*array[: 2 + i], value, *array[3 + i :]]
            assert f"{type(example).__name__}.{f.name}" in str(refused(type(example), msgpack.packb(changed)))


def test_a_wrong_type_is_refused_as_often_as_it_comes() -> None:
    array = msgpack.unpackb(encode(Event(0, (1,), "a")))
    for wrong in (5, b"a", 5, ["a"], 5):
        array[4] = wrong
        with pytest.raises(BadMessage, match=r"^Event\.text: expected str"):
            decode(Event, msgpack.packb(array))
        array[4] = "a"
        assert decode(Event, msgpack.packb(array)) == Event(0, (1,), "a")
    for junk in itertools.product([None, 1, "a", 1.5, b"a"], repeat=4):  # more combinations of types than are kept
        with suppress(BadMessage):
            decode(Event, msgpack.packb([*array[:3], *junk]))
    array[4] = 5
    with pytest.raises(BadMessage, match=r"^Event\.text: expected str"):
        decode(Event, msgpack.packb(array))


def test_a_sampling_parameter_of_a_wrong_type_is_refused_by_its_name() -> None:
    wrong = {
        "stop": ["x", [1], None],
        "ignore_eos": [0, 1, None, "x"],
        "max_tokens": [True, 1.0, "1"],
        "seed": [None, 1.0],
        "logit_bias": [None, [1], [[1]], [["1", 1.0]], [[1, "x"]], [[1, math.inf]], [[1, 1.0, 1]]],
        "allowed_token_ids": [1, "x", [1.0], [True]],
        "logprobs": [True, 1.0, "1"],
    }
    array = raw(EXAMPLES[0])
    for i, f in enumerate(fields(SamplingParams)):
        for value in wrong.get(f.name, ()):
            sampling = [*array[3][:i], value, *array[3][i + 1 :]]
            changed = [*array[:3], sampling, *array[4:]]
            assert f"Request.sampling.{f.name}" in str(refused(Request, msgpack.packb(changed)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    bad = replace(SamplingParams(), temperature=value)
    assert "Request.sampling.temperature" in str(refused(Request, encode(Request("r", bad, prompt="x"))))


def test_a_nested_array_of_a_wrong_length_is_refused() -> None:
    array = raw(EXAMPLES[-1])
    array[-2] = [["steps", 1, 2]]
    assert "WorkerInfo.counters" in str(refused(WorkerInfo, msgpack.packb(array)))


def test_every_truncation_is_refused() -> None:
    for example in EXAMPLES:
        data = encode(example)
        for n in range(len(data)):
            refused(type(example), data[:n])


def test_bytes_after_the_message_are_refused() -> None:
    for example in EXAMPLES:
        refused(type(example), encode(example) + b"\xc0")


def test_a_message_of_another_kind_is_refused() -> None:
    for example in EXAMPLES:
        for cls in KINDS:
            if cls is not type(example):
                assert cls.__name__ in str(refused(cls, encode(example)))


def test_a_newer_version_is_told_apart_from_garbage() -> None:
    array = raw(EXAMPLES[0])
    newer = msgpack.packb([VERSION + 1, *array[1:], "a field of the future"])
    assert refused(Request, newer).newer
    for version in (0, -1):
        assert not refused(Request, msgpack.packb([version, *array[1:]])).newer
    assert not refused(Request, b"\xc1").newer


def test_an_older_message_with_fewer_fields_gets_the_defaults() -> None:
    request = Request("r", SamplingParams(seed=5), prompt="x")
    assert decode(Request, msgpack.packb(raw(request)[: 2 + 4])) == request
    event = raw(Event(3, (1,), "a"))
    assert decode(Event, msgpack.packb(event[: 2 + 3])) == Event(3, (1,), "a")
    nested = raw(request)
    nested[2 + 1] = [0.25]
    assert decode(Request, msgpack.packb(nested)).sampling == SamplingParams(temperature=0.25)


def test_a_message_without_a_required_field_is_refused() -> None:
    assert "fields are missing" in str(refused(Request, msgpack.packb(raw(EXAMPLES[0])[:3])))


def test_more_fields_than_the_version_has_are_refused() -> None:
    assert "at most" in str(refused(Request, msgpack.packb([*raw(EXAMPLES[0]), 1])))


def test_a_pickle_is_refused_and_not_run() -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (pytest.fail, ("the pickle was run",))

    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for cls in KINDS:
            refused(cls, pickle.dumps(Bomb(), protocol))


def test_maps_extensions_and_timestamps_are_refused() -> None:
    for value in ({"id": 1}, msgpack.ExtType(1, b"x"), msgpack.Timestamp(1, 2)):
        refused(Request, msgpack.packb([VERSION, 1, value, []]))
        refused(Request, msgpack.packb(value))


@pytest.mark.parametrize("bad", [1, "x", None, [], [1], ["1", 1], [1, "1"], [True, True]])
def test_what_is_no_message_at_all_is_refused(bad: Any) -> None:
    refused(Request, msgpack.packb(bad))


def test_bit_flips_give_a_message_or_bad_message_and_nothing_else() -> None:
    rng = random.Random(3)
    for example in EXAMPLES:
        data = encode(example)
        for _ in range(3000):
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 4)):
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            only_bad_message(type(example), bytes(changed))


def test_random_bytes_give_bad_message_and_nothing_else() -> None:
    rng = random.Random(4)
    for _ in range(20_000):
        data = rng.randbytes(rng.randrange(0, 60))
        only_bad_message(rng.choice(KINDS), data)
        only_bad_message(rng.choice(KINDS), b"\x9a\x01" + bytes([rng.randrange(6)]) + data)


def only_bad_message(cls: type[Any], data: bytes) -> None:
    try:
        found = decode(cls, data)
    except BadMessage:
        return
    assert isinstance(found, cls)
    assert decode(cls, encode(found)) == found


def nested(size: int, depth: int) -> bytes:
    """Arrays in arrays, each of which claims to fill all the rest with its items."""
    head = b"\xdd" + struct.pack(">I", max(0, size - 6 * depth))
    return (head * depth)[:size].ljust(size, b"\xc0")


@pytest.mark.parametrize("depth", [1, 30, 400, 1000, 100_000])
@pytest.mark.parametrize("size", [10_000, 2_000_000])
def test_nested_arrays_that_claim_more_than_there_is_cost_little_time(depth: int, size: int) -> None:
    start = time.perf_counter()
    refused(Event, nested(size, depth))
    assert time.perf_counter() - start < 5


HOSTILE = """
import resource
from pdq.messages import BadMessage, Event, decode
from tests.unit.test_messages import nested
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if CAPPED:
    resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
for depth in (30, 400, 1000):
    try:
        decode(Event, nested(2_000_000, depth))
    except BadMessage:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("limit", [False, True])
def test_nested_arrays_that_claim_more_than_there_is_cost_little_memory(limit: bool) -> None:
    """In kilobytes of resident memory; with a limit of 1 GB on addresses too, which the claims exceed."""
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE.replace("CAPPED", str(limit))], capture_output=True, text=True, check=True
    )
    grown = [int(line) for line in done.stdout.split()]
    assert len(grown) == 3
    assert max(grown) < 150_000


def test_a_length_far_beyond_the_data_is_refused_at_once() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
        refused(Request, b"\x93\x01\x01" + head)


def test_a_value_over_the_limit_is_refused_before_it_is_parsed() -> None:
    assert "over the limit" in str(refused(Request, bytes(MAX_MESSAGE_BYTES + 1)))


def test_a_message_over_the_limit_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(BadMessage, match="over the limit of 100"):
        encode(Request("r", SamplingParams(), prompt="x" * 100))


@pytest.mark.parametrize(
    "request_",
    [
        Request("r", SamplingParams(), prompt="\ud800"),
        Request("r", SamplingParams(seed=2**64), prompt="x"),
        Request("r", SamplingParams(), token_ids=(2**70,)),
    ],
    ids=["half a surrogate pair", "seed", "token id"],
)
def test_what_msgpack_cannot_hold_is_a_bad_message(request_: Request) -> None:
    with pytest.raises(BadMessage, match=r"^Request: "):
        encode(request_)
