"""POST /v1/chat/completions: what is sent on, and the exact answer."""

from __future__ import annotations

import asyncio
import re
import time

import pytest

from pdq.errors import DeadlineExceeded, InvalidRequest, RequestCancelled, RequestFailed, Unavailable
from pdq.messages import Event

from .fakes import MODEL, TEXT, RefusingTokenizer, spoken
from .helpers import CHAT, COMPLETIONS, chat, chat_text, completion, error, frames

TEXT_A, TEXT_B = {"type": "text", "text": "a"}, {"type": "text", "text": "b"}


async def test_whole_answer_has_every_field(http, fake):
    fake.script = lambda asked: spoken(prompt_tokens=len(asked.token_ids), cached=7)
    before = int(time.time())
    response = await http.post(CHAT, json=chat())
    assert response.status == 200
    assert response.headers["Content-Type"] == "application/json; charset=utf-8"
    body = await response.json()
    assert before <= body.pop("created") <= int(time.time())
    prompt_tokens = len("user: Hi\nassistant:")
    assert body == {
        "id": "chatcmpl-r0",
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 5,
            "total_tokens": prompt_tokens + 5,
            "prompt_tokens_details": {"cached_tokens": 7},
        },
    }


async def test_stream_is_role_text_finish_done(http):
    response = await http.post(CHAT, json=chat(stream=True))
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    *chunks, done = frames(await response.text())
    assert done == "[DONE]"
    assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
    assert chunks[0] | {"created": 0} == {
        "id": "chatcmpl-r0",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [
            {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ],
    }
    assert [c["choices"][0]["delta"] for c in chunks[1:]] == [
        {"content": "Hel"}, {"content": "lo, "}, {"content": "wörld 👋"}, {"content": ' "quoted"\n'}, {},
    ]  # fmt: skip
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["stop"]
    assert all("usage" not in c for c in chunks)


async def test_usage_chunk_is_one_extra_chunk_with_empty_choices(http):
    response = await http.post(CHAT, json=chat(stream=True, stream_options={"include_usage": True}))
    *chunks, usage, done = frames(await response.text())
    whole = await (await http.post(CHAT, json=chat())).json()
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": None}, {"include_usage": False}])
async def test_no_usage_chunk_unless_asked_for(http, options):
    response = await http.post(CHAT, json=chat(stream=True, stream_options=options))
    *chunks, done = frames(await response.text())
    assert done == "[DONE]"
    assert all(c["choices"] and "usage" not in c for c in chunks)


async def test_text_of_the_last_event_comes_before_the_finish_chunk(http, fake):
    fake.script = lambda _: spoken(("a",), 1, reason="length", last="b")
    response = await http.post(CHAT, json=chat(stream=True))
    chunks = frames(await response.text())
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [
        {"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {},
    ]  # fmt: skip
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_an_answer_without_text_still_has_role_and_finish(http, fake):
    fake.script = lambda _: spoken((), 1)
    chunks = frames(await (await http.post(CHAT, json=chat(stream=True))).text())
    assert [c["choices"][0]["delta"] for c in chunks[:-1]] == [{"role": "assistant", "content": ""}, {}]
    body = await (await http.post(CHAT, json=chat())).json()
    assert body["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize(
    "text", ["\x00 nul", "line\nbreak\r\n\u2028", "data: [DONE]\n\n", "\U0001f469\u200d\U0001f680", '"\\']
)
async def test_stream_and_whole_answer_have_the_same_text(http, fake, text):
    fake.script = lambda _: spoken(list(text), 1)
    chunks = frames(await (await http.post(CHAT, json=chat(stream=True))).text())
    body = await (await http.post(CHAT, json=chat())).json()
    assert chat_text(chunks) == body["choices"][0]["message"]["content"] == text


async def test_the_first_text_arrives_while_the_rest_is_not_there(http, fake):
    more = asyncio.Event()
    first, *rest = spoken(("one", "two"), 1)
    fake.script = lambda _: [first, more, *rest]
    response = await http.post(CHAT, json=chat(stream=True))
    # role and first text leave in one write
    data = (await response.content.readuntil(b"\n\n")) + (await response.content.readuntil(b"\n\n"))
    assert chat_text(frames(data.decode())) == "one"
    more.set()
    assert chat_text(frames((await response.read()).decode())) == "two"


async def test_everything_asked_for_reaches_the_queue(http, fake):
    wanted = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": -(2**63), "stop": ["a", "b"],
        "max_tokens": 9, "ignore_eos": True,
    }  # fmt: skip
    assert (await http.post(CHAT, json=chat(**wanted))).status == 200
    sampling = fake.asked[0].sampling
    assert {k: getattr(sampling, k) for k in wanted} == wanted | {"stop": ("a", "b")}
    assert fake.asked[0].options["model"] == MODEL
    assert (fake.asked[0].options["timeout"], fake.asked[0].options["queue_timeout"]) == (600.0, 0.0)


async def test_nothing_asked_for_means_the_defaults_and_the_rest_of_the_context(http, fake):
    assert (await http.post(CHAT, json=chat(temperature=None, stop=None, max_tokens=None, seed=None))).status == 200
    sampling = fake.asked[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.stop, sampling.ignore_eos) == (None, (), False)


async def test_guessing_ahead_is_as_the_body_says_and_else_left_to_the_workers(http, fake):
    await http.post(CHAT, json=chat(speculation="ngram"))
    await http.post(COMPLETIONS, json=completion(speculation="off"))
    await http.post(CHAT, json=chat(speculation=None))
    assert [a.options.get("speculation") for a in fake.asked] == ["ngram", "off", None]


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [({"max_tokens": 5}, 5), ({"max_completion_tokens": 6}, 6), ({"max_tokens": 5, "max_completion_tokens": 6}, 6)],
)
async def test_max_completion_tokens_wins(http, fake, limits, wanted):
    assert (await http.post(CHAT, json=chat(**limits))).status == 200
    assert fake.asked[0].sampling.max_tokens == wanted


async def test_top_k_of_minus_one_is_no_limit(http, fake):
    assert (await http.post(CHAT, json=chat(top_k=-1))).status == 200
    assert fake.asked[0].sampling.top_k == 0


@pytest.mark.parametrize("stop", ["\n", ["\n"]])
async def test_stop_may_be_a_string_or_a_list(http, fake, stop):
    assert (await http.post(CHAT, json=chat(stop=stop))).status == 200
    assert fake.asked[0].sampling.stop == ("\n",)


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "user", "content": "Hi"}], "user: Hi\nassistant:"),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], "system: S\nuser: U\nassistant:"),
        ([{"role": "developer", "content": "D"}], "developer: D\nassistant:"),
        ([{"role": "user", "content": [TEXT_A, TEXT_B]}], "user: ab\nassistant:"),
        ([{"role": "user", "content": []}], "user: \nassistant:"),
        ([{"role": "user", "content": ""}], "user: \nassistant:"),
        ([{"role": "assistant", "content": None, "tool_calls": None}], "assistant: \nassistant:"),
        ([{"role": "user", "content": "A.\0 B."}], "user: A.\0 B.\nassistant:"),
        ([{"role": "user", "content": "é👋", "foo": 1}], "user: é👋\nassistant:"),
    ],
)  # fmt: skip
async def test_messages_are_rendered_whole(http, fake, messages, rendered):
    assert (await http.post(CHAT, json=chat(messages=messages))).status == 200
    assert fake.asked[0].prompt == rendered


async def test_what_the_template_refuses_is_a_400_with_its_own_sentence(start, fake):
    http = await start(tokenizer=RefusingTokenizer())
    two = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    response = await http.post(CHAT, json=chat(messages=two))
    assert response.status == 400
    found = await error(response)
    assert found["message"] == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert found["param"] == "messages"
    assert fake.asked == []


async def test_model_may_be_left_out(http, fake):
    body = chat()
    del body["model"]
    assert (await http.post(CHAT, json=body)).status == 200
    assert fake.asked[0].options["model"] == MODEL


async def test_server_timing_has_all_stages(http):
    expected = "queue;dur=1.5, prefill;dur=20.0, handoff;dur=3.0, decode;dur=40.2"
    whole = await http.post(CHAT, json=chat())
    stream = await http.post(CHAT, json=chat(stream=True))
    assert whole.headers["Server-Timing"] == expected
    assert stream.headers["Server-Timing"] == expected
    await stream.read()


async def test_request_id_is_echoed_and_never_used_as_a_key(http, fake):
    answers = [await http.post(CHAT, json=chat(request_id="a"), headers={"X-Request-Id": "a {b} *"}) for _ in range(2)]
    assert [r.headers["x-request-id"] for r in answers] == ["a {b} *", "a {b} *"]
    assert [(await r.json())["id"] for r in answers] == ["chatcmpl-r0", "chatcmpl-r1"]
    assert all("id" not in asked.given for asked in fake.asked)


@pytest.mark.parametrize("given", ["", "x" * 129, "tab\there", "é"])
async def test_an_unprintable_or_long_request_id_is_replaced(http, given):
    response = await http.post(CHAT, json=chat(), headers={"X-Request-Id": given})
    assert re.fullmatch("req-[0-9a-f]{32}", response.headers["x-request-id"])


async def test_request_id_is_on_errors_and_streams_too(http):
    for body in (chat(n=2), chat(stream=True)):
        response = await http.post(CHAT, json=body, headers={"X-Request-Id": "mine"})
        assert response.headers["x-request-id"] == "mine"
        await response.read()


async def test_idempotency_key_is_passed_on(http, fake):
    assert (await http.post(CHAT, json=chat(), headers={"Idempotency-Key": "k 1"})).status == 200
    assert (await http.post(CHAT, json=chat())).status == 200
    assert [a.options["idempotency_key"] for a in fake.asked] == ["k 1", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("raised", "status", "kind", "code", "retry"),
    [
        (InvalidRequest("300 is no token", param="prompt"), 400, "invalid_request_error", "invalid_request", None),
        (RequestCancelled("the request was cancelled"), 499, "invalid_request_error", "cancelled", "false"),
        (RequestFailed("prefill was tried 3 times"), 500, "server_error", "request_failed", "false"),
        (Unavailable("10.0.0.7:6379 went away"), 503, "service_unavailable", "unavailable", None),
        (DeadlineExceeded("the request's deadline has passed"), 504, "timeout", "deadline_exceeded", "false"),
    ],
)  # fmt: skip
async def test_a_failure_before_the_first_event_is_a_status(http, fake, stream, raised, status, kind, code, retry):
    fake.script = lambda _: [raised]
    response = await http.post(CHAT, json=chat(stream=stream), headers={"X-Request-Id": "L1"})
    assert response.status == status
    found = await error(response)
    assert (found["type"], found["code"]) == (kind, code)
    assert response.headers.get("x-should-retry") == retry
    assert ("Retry-After" in response.headers) == (status == 503)
    if status == 503:
        assert "10.0.0.7" not in found["message"]
    if status == 500:
        assert found["message"] == "prefill was tried 3 times (request id L1)"


async def test_a_failure_after_the_first_byte_is_one_error_event_and_the_end(http, fake):
    fake.script = lambda _: [Event(0, (1,), "half"), RequestFailed("decode failed")]
    body = chat(stream=True, stream_options={"include_usage": True})
    response = await http.post(CHAT, json=body, headers={"X-Request-Id": "L2"})
    assert response.status == 200
    *chunks, last = frames(await response.text())
    assert chat_text(chunks) == "half"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    assert last == {
        "error": {
            "message": "decode failed (request id L2)",
            "type": "server_error",
            "param": None,
            "code": "request_failed",
        }
    }


async def test_a_bug_shows_no_internals(http, fake, caplog):
    def broken(_):
        raise ZeroDivisionError("secret")

    fake.script = broken
    response = await http.post(CHAT, json=chat(), headers={"X-Request-Id": "L3"})
    assert response.status == 500
    assert (await error(response))["message"] == "Internal error; the log has it under request id L3."
    assert "ZeroDivisionError: secret" in caplog.text
