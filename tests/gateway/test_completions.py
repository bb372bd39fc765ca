"""POST /v1/completions: all forms of prompts, several of them, and their stream."""

from __future__ import annotations

import asyncio

import pytest

from pdq.errors import QueueFull, RequestFailed
from pdq.messages import Event

from .fakes import MODEL, TEXT, spoken
from .helpers import COMPLETIONS, completion, error, frames


def echo(asked):
    return spoken(tuple(asked.prompt), len(asked.token_ids), cached=1)


async def test_whole_answer_has_every_field(http):
    response = await http.post(COMPLETIONS, json=completion())
    body = await response.json()
    assert response.status == 200
    assert isinstance(body.pop("created"), int)
    assert body == {
        "id": "cmpl-r0",
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_stream_has_text_chunks_then_finish_then_done(http):
    response = await http.post(COMPLETIONS, json=completion(stream=True, stream_options={"include_usage": True}))
    *chunks, usage, done = frames(await response.text())
    assert done == "[DONE]"
    assert [c["choices"] for c in chunks] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]
        for text, reason in [("Hel", None), ("lo, ", None), ("wörld 👋", None), (' "quoted"\n', None), ("", "stop")]
    ]
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 7


@pytest.mark.parametrize(
    ("prompt", "sent"),
    [
        ("Hi", [b"Hi"]),
        (["Hi", "yo"], [b"Hi", b"yo"]),
        ([72, 105], [b"Hi"]),
        ([[72, 105], [121]], [b"Hi", b"y"]),
        ("A.\0 B.", [b"A.\0 B."]),
        ("a" * 400, [b"a" * 400]),
    ],
)
async def test_all_forms_of_prompts(http, fake, prompt, sent):
    response = await http.post(COMPLETIONS, json=completion(prompt))
    assert response.status == 200
    assert [bytes(a.token_ids) for a in fake.asked] == sent
    assert [c["index"] for c in (await response.json())["choices"]] == list(range(len(sent)))


async def test_long_texts_are_tokenized_too(start, fake):
    fake.workers_now = [type(w)(*(w.name, w.stage, w.model, w.fingerprint, 100_000)) for w in fake.workers_now]
    http = await start(max_model_len=100_000)
    assert (await http.post(COMPLETIONS, json=completion("ab" * 40_000))).status == 200
    assert fake.asked[0].prompt == "ab" * 40_000


async def test_max_tokens_is_16_unless_given(http, fake):
    for more in ({}, {"max_tokens": None}, {"max_tokens": 3}):
        assert (await http.post(COMPLETIONS, json=completion(**more))).status == 200
    assert [a.sampling.max_tokens for a in fake.asked] == [16, 16, 3]


async def test_several_prompts_give_numbered_choices_and_summed_usage(http, fake):
    fake.script = echo
    body = await (await http.post(COMPLETIONS, json=completion(["one", "three", "2"]))).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "one"), (1, "three"), (2, "2")]
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 9,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert len(fake.asked) == 3


async def test_several_prompts_in_a_stream_keep_their_indices(http, fake):
    fake.script = echo
    prompts = ["one", "three", "2"]
    response = await http.post(
        COMPLETIONS, json=completion(prompts, stream=True, stream_options={"include_usage": True})
    )
    *chunks, usage, done = frames(await response.text())
    assert done == "[DONE]"
    texts = dict.fromkeys(range(3), "")
    ends = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert choice["index"] not in ends
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append(choice["index"])
    assert texts == dict(enumerate(prompts))
    assert sorted(ends) == [0, 1, 2]
    assert usage["usage"]["completion_tokens"] == 9


async def test_a_full_queue_at_the_second_prompt_cancels_the_first(http, fake):
    def second_is_refused(asked):
        fake.refuse = QueueFull("1024 requests are waiting, the limit is 1024", retry_after=1.0)
        return spoken()

    fake.script = second_is_refused
    response = await http.post(COMPLETIONS, json=completion(["a", "b"]))
    assert response.status == 429
    assert (await error(response))["code"] == "queue_full"
    await asyncio.wait_for(fake.handles[0].cancelled.wait(), 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_fails_ends_the_others(http, fake, stream):
    never = asyncio.Event()
    fake.script = lambda asked: [RequestFailed("broken")] if asked.prompt == "b" else [never]
    response = await http.post(COMPLETIONS, json=completion(["a", "b", "c"], stream=stream))
    assert response.status == 500
    for handle in (fake.handles[0], fake.handles[2]):
        await asyncio.wait_for(handle.cancelled.wait(), 2)
        await asyncio.wait_for(handle.closed.wait(), 2)


async def test_a_prompt_that_fails_in_mid_stream_ends_the_stream_without_done(http, fake):
    said, never = asyncio.Event(), asyncio.Event()
    fake.script = lambda a: [said, RequestFailed("broken")] if a.prompt == "b" else [Event(0, (1,), "x"), never]
    response = await http.post(COMPLETIONS, json=completion(["a", "b"], stream=True))
    assert response.status == 200
    await response.content.readuntil(b"\n\n")
    said.set()
    (last,) = frames((await response.read()).decode())
    assert last["error"]["code"] == "request_failed"


async def test_idempotency_keys_of_several_prompts_differ(http, fake):
    await http.post(COMPLETIONS, json=completion(["a", "b"]), headers={"Idempotency-Key": "k"})
    first, second = (a.options["idempotency_key"] for a in fake.asked)
    assert first == "k"
    assert second not in ("k", None)
