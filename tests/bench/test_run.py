"""Whole runs against a server that does what the test says: what is sent, what is counted, what is an error."""

import asyncio
import itertools
from itertools import islice

import pytest
from aiohttp import web

from pdq.bench.load import arrivals
from pdq.bench.prompts import LONG
from pdq.bench.records import Record, clock
from pdq.bench.run import Bench
from pdq.bench.settings import BenchSettings
from pdq.bench.summary import summarize
from pdq.errors import Unavailable
from tests.bench.conftest import DONE, WHOLE, FakeServer, Reply, completed, event, finish, said, stream, usage
from tests.servers import free_port


async def measured(fake: FakeServer, **options: object) -> Bench:
    bench = Bench(BenchSettings(**{"url": fake.url, "seed": 1, "input_tokens": 5, "concurrency": 2} | options))
    await bench.measure()
    return bench


async def test_a_closed_loop_sends_what_was_asked_for(fake: FakeServer) -> None:
    bench = await measured(fake, requests=6, output_tokens=3, temperature=0.5, api_key="k1")
    assert len(fake.asked) == len(bench.records) == 6
    assert set(fake.paths) == {"/v1/chat/completions"}
    assert set(fake.keys) == {"Bearer k1"}
    body = fake.asked[0]
    assert {k: v for k, v in body.items() if k != "messages"} == {
        "model": "tiny",
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert len(set(fake.prompts)) == 6


async def test_the_summary_has_the_servers_own_counts(fake: FakeServer) -> None:
    bench = await measured(fake, requests=5)
    summary = summarize(bench.records, {})
    assert (summary.succeeded, summary.input_tokens, summary.output_tokens) == (5, 50, 15)
    assert (summary.cached_tokens, summary.hit_ratio) == (20, 0.4)
    assert summary.itl_ms is not None
    assert summary.itl_ms.count == 10


async def test_latencies_are_at_least_what_the_server_took(fake: FakeServer) -> None:
    fake.says(0.04, said("a"), 0.03, said("b"), 0.03, said("c"), finish(), usage(10, 5), 0.02, DONE)
    (record,) = (await measured(fake, requests=1)).records
    assert record.ttft is not None
    assert record.tpot is not None
    gaps = [end - begin for begin, end in record.gaps]
    # A timer may fire a clock tick early; the upper bounds tell the parts apart on a machine that is busy.
    assert 0.039 <= record.ttft < 1
    assert len(gaps) == 2
    assert all(0.025 <= gap < 1 for gap in gaps)
    assert record.tpot == pytest.approx(sum(gaps) / 4)
    assert record.e2e >= record.ttft + sum(gaps) + 0.019


async def test_the_time_after_the_end_is_not_counted(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.bench.client._END_SECONDS", 0.5)
    fake.says(*WHOLE, 60.0)
    begun = clock()
    (record,) = (await measured(fake, requests=1)).records
    assert record.ok
    assert clock() - begun >= 0.5
    assert record.e2e < 0.45


async def test_completions_get_a_prompt(fake: FakeServer) -> None:
    fake.says(completed("a"), finish(), usage(4, 1), DONE)
    bench = await measured(fake, requests=2, endpoint="completions", ignore_eos=False, model="other")
    assert [r.error for r in bench.records] == ["", ""]
    assert fake.paths == ["/v1/completions"] * 2
    assert [len(p.split()) for p in fake.prompts] == [5, 5]
    assert fake.asked[0]["model"] == "other"
    assert "ignore_eos" not in fake.asked[0]


# ---- errors ----


async def _drop(request: web.Request, body: object) -> web.StreamResponse:
    """Break off within a chunk of the transfer."""
    response = await stream(request, [said("a")])
    assert request.transport is not None
    request.transport.abort()
    return response


async def _refuse(request: web.Request, body: object) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too many"}}, status=429)


async def _page(request: web.Request, body: object) -> web.StreamResponse:
    return web.Response(text="<p>hello", content_type="text/html")


def reply(*parts: bytes | float) -> Reply:
    return lambda request, _: stream(request, parts)


FAULTS: list[tuple[str, Reply]] = [
    ("http_429", _refuse),
    ("closed", _drop),
    ("not_a_stream", _page),
    ("timeout", reply(said("a"), 5.0)),
    ("timeout", reply(5.0)),
    ("no_done", reply(said("a"), finish())),
    ("no_finish_reason", reply(said("a"), DONE)),
    ("no_content", reply(finish(), DONE)),
    ("error_event", reply(said("a"), event({"error": {"message": "lost"}}), DONE)),
    ("bad_event", reply(b"data: nonsense\n\n", DONE)),
]


@pytest.mark.parametrize(("kind", "fault"), FAULTS, ids=[f"{n}-{kind}" for n, (kind, _) in enumerate(FAULTS)])
async def test_a_fault_is_counted_by_kind_and_the_run_goes_on(fake: FakeServer, kind: str, fault: Reply) -> None:
    fake.replies(fault, reply(*WHOLE))
    bench = await measured(fake, requests=3, concurrency=1, timeout=0.5)
    assert [r.error for r in bench.records] == [kind, "", ""]
    summary = summarize(bench.records, {"e2e": 60_000.0})
    assert (summary.requests, summary.succeeded, summary.errors) == (3, 2, {kind: 1})
    assert summary.goodput is not None
    assert summary.goodput.met == 2


async def test_a_server_that_goes_away_is_an_error_of_each_request(fake: FakeServer) -> None:
    async def leave(request: web.Request, body: object) -> web.StreamResponse:
        await fake.stop_listening()
        return await _drop(request, body)

    fake.replies(reply(*WHOLE), leave)
    bench = await measured(fake, requests=4, concurrency=1)
    assert [r.error for r in bench.records] == ["", "closed", "connect", "connect"]


async def test_an_optional_field_that_is_refused_is_left_out_and_not_an_error(fake: FakeServer) -> None:
    async def strict(request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        for name in ("ignore_eos", "stream_options"):
            if name in body:
                return web.json_response({"error": {"message": f"unknown field {name}"}}, status=400)
        return await stream(request, [said("a"), said("b"), finish(), DONE])

    fake.replies(strict)
    bench = await measured(fake, requests=3, concurrency=1)
    assert [r.error for r in bench.records] == ["", "", ""]
    assert bench.left_out == {"ignore_eos", "stream_options"}
    assert len(fake.asked) == 5
    summary = summarize(bench.records, {})
    assert (summary.output_tokens, summary.without_usage, summary.hit_ratio) == (6, 3, None)


async def test_another_refusal_is_an_error_and_not_repeated(fake: FakeServer) -> None:
    fake.replies(_refuse)
    bench = await measured(fake, requests=2)
    assert [(r.error, r.detail) for r in bench.records] == [("http_429", "too many")] * 2
    assert len(fake.asked) == 2


# ---- loads and shapes ----


async def test_warm_up_is_sent_first_and_not_counted(fake: FakeServer) -> None:
    numbered = itertools.count()

    async def count(request: web.Request, body: object) -> web.StreamResponse:
        return await stream(request, [said("a"), finish(), usage(next(numbered), 1), DONE])

    fake.replies(count)
    bench = await measured(fake, requests=3, warmup=4)
    assert sorted(r.prompt_tokens or 0 for r in bench.records) == [4, 5, 6]
    assert len(set(fake.prompts)) == 7


async def test_a_duration_ends_the_load_and_lets_what_runs_finish(fake: FakeServer) -> None:
    fake.says(0.1, *WHOLE)
    bench = await measured(fake, duration=0.25)
    starts = [r.start for r in bench.records]
    assert all(r.ok for r in bench.records)
    assert 2 <= len(starts) <= 6
    assert max(starts) - min(starts) < 0.35
    assert max(r.end for r in bench.records) - min(starts) >= 0.2


async def test_an_open_loop_sends_on_while_the_server_hangs(fake: FakeServer) -> None:
    all_sent = asyncio.Event()

    async def answer_when_all_are_sent(request: web.Request, body: object) -> web.StreamResponse:
        if len(fake.asked) == 12:
            all_sent.set()
        await all_sent.wait()
        return await stream(request, WHOLE)

    fake.replies(answer_when_all_are_sent)
    bench = await measured(fake, requests=12, rate=40, concurrency=None)
    assert [r.error for r in bench.records] == [""] * 12
    assert len(bench.sent_late) == 12
    begun = sorted(r.start for r in bench.records)
    times = list(islice(arrivals(40, None, 1, None), 12))
    assert all(at - begun[0] >= due - times[0] - 0.1 for at, due in zip(begun, times, strict=True))


async def test_turns_carry_earlier_turns_and_answers(fake: FakeServer) -> None:
    bench = await measured(fake, requests=5, shape="multi-turn", turns=3, concurrency=1)
    turns = [a["messages"] for a in fake.asked]
    assert [len(t) for t in turns] == [1, 3, 5, 1, 3]  # type: ignore[arg-type]
    assert [m["role"] for m in turns[2]] == ["user", "assistant", "user", "assistant", "user"]  # type: ignore[attr-defined]
    assert turns[2][:3] == turns[1]  # type: ignore[index]
    assert turns[1][1] == {"role": "assistant", "content": "abc"}  # type: ignore[index]
    assert [r.turn for r in bench.records] == [0, 1, 2, 0, 1]


async def test_conversations_arrive_at_the_rate_of_their_requests(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def noted(*values: object) -> list[float]:
        asked.append(values)
        return [0.0, 0.0]

    monkeypatch.setattr("pdq.bench.run.arrivals", noted)
    bench = await measured(fake, rate=30, burst=2, duration=9, concurrency=None, shape="multi-turn", turns=3)
    assert asked == [(10.0, 2.0, 1, 9.0)]
    assert len(bench.records) == 6


async def test_a_failed_turn_ends_its_conversation(fake: FakeServer) -> None:
    fake.replies(reply(*WHOLE), _refuse, reply(*WHOLE))
    bench = await measured(fake, requests=6, shape="multi-turn", turns=3, concurrency=1)
    assert [(r.turn, r.error) for r in bench.records] == [(0, ""), (1, "http_429"), (0, ""), (1, ""), (2, "")]


async def test_long_prompts_arrive_by_the_clock_beside_the_steady_streams(fake: FakeServer) -> None:
    async def answer(request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        return await stream(request, [said("a"), 0.02, said("b"), 0.02, said("c"), finish(), usage(9, 3), DONE])

    fake.replies(answer)
    bench = await measured(
        fake, duration=0.5, shape="interference", long_tokens=50, long_every=0.15, input_tokens=5, output_tokens=3
    )
    long = [r for r in bench.records if r.series == LONG]
    sizes = {len(p.split()): a["max_tokens"] for p, a in zip(fake.prompts, fake.asked, strict=True)}
    assert sizes == {5: 3, 50: 16}
    assert 3 <= len(long) <= 5
    begun = min(r.start for r in bench.records)
    assert all(r.start - begun >= 0.15 * n - 0.01 for n, r in enumerate(sorted(long, key=_start), 1))
    found = summarize(bench.records, {}).interference
    assert found is not None
    assert found.itl_quiet_ms is not None
    assert found.itl_loaded_ms is not None
    assert found.long_requests == len(long)


def _start(record: Record) -> float:
    return record.start


# ---- the server itself ----


async def test_a_server_that_is_not_there_is_one_sentence() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=rf"^no server answers at {url} \(.+\)$"):
        await Bench(BenchSettings(url=url, model="named")).measure()


@pytest.mark.parametrize("listed", [{"data": []}, [], {"data": [{}]}, "nothing"])
async def test_without_a_model_to_use_nothing_is_sent(fake: FakeServer, listed: object) -> None:
    fake.listed = listed
    with pytest.raises(Unavailable, match="lists no model; name one with --model"):
        await measured(fake, requests=1)
    assert (await measured(fake, requests=1, model="mine")).records[0].ok
    assert fake.asked[0]["model"] == "mine"
