"""Every mistake of a client is a 4xx in OpenAI's error shape, and nothing is queued."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import zlib

import pytest

from .fakes import MODEL
from .helpers import CHAT, COMPLETIONS, chat, completion, error


def user(content, **more):
    return [{"role": "user", "content": content, **more}]


TEXT_PART = {"type": "text", "text": "a"}

FIELDS = [
    # what is sent instead, param, message
    ({"messages": []}, "messages", "messages must not be empty."),
    ({"messages": None}, "messages", "messages must be an array, got null."),
    ({"messages": "Hi"}, "messages", "messages must be an array, got a string."),
    ({"messages": ["Hi"]}, "messages.0", "messages.0 must be an object, got a string."),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role", "messages.0.role is required."),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "messages.0.content is required."),
    (
        {"messages": [*user("a"), {"role": "tool", "content": "b"}]},
        "messages.1.role",
        "messages.1.role must be 'system', 'developer', 'user' or 'assistant'.",
    ),
    ({"messages": user(5)}, "messages.0.content", "messages.0.content must be a string or an array of content parts."),
    ({"messages": user([5])}, "messages.0.content.0", "messages.0.content.0 must be an object, got an integer."),
    (
        {"messages": user([TEXT_PART, {"type": "image_url", "image_url": {"url": "data:"}}])},
        "messages.0.content.1.type",
        "messages.0.content.1.type is 'image_url', but only parts of type 'text' are supported.",
    ),
    ({"messages": user([{"type": "text"}])}, "messages.0.content.0.text", "messages.0.content.0.text is required."),
    ({"messages": user("a", name=1)}, "messages.0.name", "messages.0.name must be a string, got an integer."),
    (
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]},
        "messages.0.tool_calls",
        "messages.0.tool_calls is not supported by this server.",
    ),
    ({"temperature": "1"}, "temperature", "temperature must be a number, got a string."),
    ({"temperature": True}, "temperature", "temperature must be a number, got a boolean."),
    ({"temperature": -0.1}, "temperature", "temperature must be at least 0.0."),
    ({"temperature": 2.1}, "temperature", "temperature must be at most 2.0."),
    ({"top_p": 0}, "top_p", "top_p must be above 0."),
    ({"top_p": 1.5}, "top_p", "top_p must be at most 1.0."),
    ({"top_k": 1.0}, "top_k", "top_k must be an integer, got a number."),
    ({"top_k": -2}, "top_k", "top_k must be at least -1."),
    ({"min_p": []}, "min_p", "min_p must be a number, got an array."),
    ({"seed": 2**63}, "seed", f"seed must be at most {2**63 - 1}."),
    ({"seed": 2**64}, "seed", "seed must be an integer, got a number."),
    ({"seed": -(2**63) - 1}, "seed", "seed must be an integer, got a number."),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1."),
    ({"max_tokens": False}, "max_tokens", "max_tokens must be an integer, got a boolean."),
    (
        {"max_completion_tokens": "5"},
        "max_completion_tokens",
        "max_completion_tokens must be an integer, got a string.",
    ),
    ({"stop": ""}, "stop.0", "stop.0 must not be empty."),
    ({"stop": ["a", ""]}, "stop.1", "stop.1 must not be empty."),
    ({"stop": ["a", None]}, "stop.1", "stop.1 must be a string, got null."),
    ({"stop": {"a": 1}}, "stop", "stop must be a string or an array of strings."),
    ({"stop": ["a"] * 65}, "stop", "stop must have at most 64 items."),
    ({"stop": "a" * 1025}, "stop.0", "stop.0 must have at most 1024 characters."),
    ({"stream": "true"}, "stream", "stream must be true or false, got a string."),
    ({"stream": 1}, "stream", "stream must be true or false, got an integer."),
    ({"stream": True, "stream_options": []}, "stream_options", "stream_options must be an object, got an array."),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "stream_options.include_usage must be true or false, got an integer.",
    ),
    (
        {"stream_options": {"include_usage": True}},
        "stream_options",
        "stream_options is only allowed together with stream.",
    ),
    ({"ignore_eos": 0}, "ignore_eos", "ignore_eos must be true or false, got an integer."),
    ({"model": 5}, "model", "model must be a string, got an integer."),
    ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be above 0."),
    ({"repetition_penalty": 10.5}, "repetition_penalty", "repetition_penalty must be at most 10.0."),
    ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty must be at most 2.0."),
    ({"presence_penalty": False}, "presence_penalty", "presence_penalty must be a number, got a boolean."),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "frequency_penalty must be at least -2.0."),
    ({"frequency_penalty": "0"}, "frequency_penalty", "frequency_penalty must be a number, got a string."),
    ({"logit_bias": [5]}, "logit_bias", "logit_bias must be an object that maps token ids to numbers."),
    ({"logit_bias": {"the": 1}}, "logit_bias", "logit_bias has the key 'the', which is no token id."),
    ({"logit_bias": {"05": 1}}, "logit_bias", "logit_bias has the key '05', which is no token id."),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias has the key '-1', which is no token id."),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias", "logit_bias has the key '\u0665', which is no token id."),
    ({"logit_bias": {"9" * 60: 1}}, "logit_bias", f"logit_bias has the key '{'9' * 50}…', which is no token id."),
    ({"logit_bias": {str(2**31): 1}}, "logit_bias", f"logit_bias has the key '{2**31}', which is no token id."),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 must be at most 100.0."),
    ({"logit_bias": {"5": -100.5}}, "logit_bias.5", "logit_bias.5 must be at least -100.0."),
    ({"logit_bias": {"5": None}}, "logit_bias.5", "logit_bias.5 must be a number, got null."),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "logit_bias must have at most 1024 items."),
    ({"min_tokens": -1}, "min_tokens", "min_tokens must be at least 0."),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "min_tokens must be at most max_tokens, which is 5."),
    (
        {"min_tokens": 6, "max_completion_tokens": 5},
        "min_tokens",
        "min_tokens must be at most max_completion_tokens, which is 5.",
    ),
    ({"allowed_token_ids": []}, "allowed_token_ids", "allowed_token_ids must not be empty."),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "allowed_token_ids must be an array, got an integer."),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids.1", "allowed_token_ids.1 must be at least 0."),
    ({"stop_token_ids": [5.0]}, "stop_token_ids.0", "stop_token_ids.0 must be an integer, got a number."),
    ({"stop_token_ids": [2**31]}, "stop_token_ids.0", f"stop_token_ids.0 must be at most {2**31 - 1}."),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids", "stop_token_ids must have at most 1024 items."),
    ({"logprobs": 1}, "logprobs", "logprobs must be true or false, got an integer."),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20."),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "top_logprobs must be an integer, got a boolean."),
    ({"top_logprobs": 2}, "top_logprobs", "top_logprobs is only allowed together with logprobs."),
    ({"cache": "OFF"}, "cache", "cache must be 'on' or 'off'."),
    ({"cache": False}, "cache", "cache must be 'on' or 'off'."),
    ({"speculation": "on"}, "speculation", "speculation must be 'ngram' or 'off'."),
    ({"speculation": True}, "speculation", "speculation must be 'ngram' or 'off'."),
    ({"cache_salt": ""}, "cache_salt", "cache_salt must not be empty."),
    ({"cache_salt": 5}, "cache_salt", "cache_salt must be a string, got an integer."),
    ({"cache_salt": "a" * 1025}, "cache_salt", "cache_salt must have at most 1024 characters."),
]


@pytest.mark.parametrize(("change", "param", "message"), FIELDS)
async def test_a_wrong_field_is_named_in_one_sentence(http, fake, change, param, message):
    response = await http.post(CHAT, json=chat(**change))
    assert response.status == 400
    assert await error(response) == {
        "message": message, "type": "invalid_request_error", "param": param, "code": "invalid_request",
    }  # fmt: skip
    assert fake.asked == []


UNSUPPORTED = {
    "n": [0, 2, "1", True],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
    "functions": [[{"name": "f"}]],
    "function_call": [{"name": "f"}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
    "audio": [{"voice": "x"}],
    "modalities": [["text", "audio"], ["audio"]],
    "web_search_options": [{}],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"chat_template": "{% for i in range(99999) %}{% endfor %}"}, {"tokenize": True}],
    "continue_final_message": [True],
    "add_generation_prompt": [False],
    "structured_outputs": [{"regex": "a"}],
    "truncate_prompt_tokens": [5],
    "prompt_logprobs": [0, 1],
    "bad_words": [["x"]],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in UNSUPPORTED.items() for v in values])
async def test_a_meaningful_field_that_is_not_supported_is_refused_by_name(http, fake, name, value):
    response = await http.post(CHAT, json=chat(**{name: value}))
    assert response.status == 400
    found = await error(response)
    assert found["param"] == name
    assert found["message"].startswith(f"{name}: ")
    assert fake.asked == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("echo", True), ("suffix", "x"), ("best_of", 2), ("top_logprobs", 2), ("n", 3), ("prompt_embeds", "x")],
)
async def test_completions_refuse_what_they_cannot_do(http, fake, name, value):
    response = await http.post(COMPLETIONS, json=completion(**{name: value}))
    assert response.status == 400
    assert (await error(response))["param"] == name
    assert fake.asked == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (True, "logprobs must be an integer, got a boolean."),
        (-1, "logprobs must be at least 0."),
        (21, "logprobs must be at most 20."),
        ("1", "logprobs must be an integer, got a string."),
    ],
)
async def test_a_completion_counts_its_logprobs(http, fake, value, message):
    response = await http.post(COMPLETIONS, json=completion(logprobs=value))
    assert response.status == 400
    found = await error(response)
    assert (found["param"], found["message"]) == ("logprobs", message)
    assert fake.asked == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ['"repetition_penalty": {}', '"presence_penalty": {}', '"logit_bias": {{"5": {}}}'])
async def test_numbers_that_are_none_are_no_json(http, fake, field, number):
    body = '{"messages": [{"role": "user", "content": "Hi"}], ' + field.format(number) + "}"
    response = await http.post(CHAT, data=body)
    assert response.status == 400
    await error(response)
    assert fake.asked == []


async def test_a_least_length_over_the_context_is_named(http, fake):
    response = await http.post(CHAT, json=chat(min_tokens=600))
    assert response.status == 400
    found = await error(response)
    assert (found["code"], found["param"]) == ("context_length_exceeded", "min_tokens")
    assert fake.asked == []


HARMLESS = {
    "user": "u", "store": True, "metadata": {"a": "b\0"}, "safety_identifier": "s", "verbosity": "low",
    "prompt_cache_key": "k", "service_tier": "auto", "parallel_tool_calls": True, "request_id": "a", "foo": {"bar": 1},
    "n": 1, "tools": None, "tool_choice": "auto", "logprobs": False,
    "top_logprobs": 0, "min_tokens": 0, "presence_penalty": 0, "frequency_penalty": 0.0,
    "logit_bias": {}, "response_format": {"type": "text"}, "modalities": ["text"], "reasoning_effort": "low",
}  # fmt: skip


async def test_harmless_and_unknown_fields_are_ignored(http, fake):
    assert (await http.post(CHAT, json=chat(**HARMLESS))).status == 200
    assert (await http.post(COMPLETIONS, json=completion(**HARMLESS, best_of=1, echo=False, suffix=""))).status == 200
    assert len(fake.asked) == 2


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"), ([], "prompt"), ([[]], "prompt.0"), (["a", ""], "prompt.1"), ([""], "prompt.0"),
        (None, "prompt"), (5, "prompt"), ({}, "prompt"), ([1, "a"], "prompt.1"), (["a", 1], "prompt.1"),
        ([[1], "a"], "prompt.1"), ([[1], []], "prompt.1"), ([True], "prompt.0"), ([1.0], "prompt.0"),
        ([-1], "prompt.0"), ([2**31], "prompt.0"), ([[1], [2**70]], "prompt.1.0"), ([None], "prompt.0"),
        (["a"] * 129, "prompt"),
    ],
)  # fmt: skip
async def test_prompts_that_are_empty_or_of_the_wrong_type(http, fake, prompt, param):
    response = await http.post(COMPLETIONS, json=completion(prompt))
    assert response.status == 400
    assert (await error(response))["param"] == param
    assert fake.asked == []


async def test_a_missing_prompt_is_named(http):
    response = await http.post(COMPLETIONS, json={"model": MODEL})
    assert (await error(response))["message"] == "prompt is required."


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b'{"model": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}', b"[" * 5000,
        b'{"model": "\xff"}', b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xef\xbb\xbf{}", b"{}{}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_is_not_json_is_a_400(http, fake, path, body):
    response = await http.post(path, data=body, headers={"Content-Type": "application/json"})
    assert response.status == 400
    found = await error(response)
    assert found["message"].startswith("The body is not valid JSON: ")
    assert (found["type"], found["param"]) == ("invalid_request_error", None)
    assert fake.asked == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [(b"[]", "an array"), (b'"x"', "a string"), (b"1", "an integer"), (b"null", "null"), (b"true", "a boolean")],
)
async def test_a_body_that_is_no_object_is_a_400(http, body, kind):
    response = await http.post(CHAT, data=body)
    assert response.status == 400
    assert (await error(response))["message"] == f"The body must be a JSON object, got {kind}."


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/octet-stream", "application/json; charset=latin-1"]
)
async def test_content_type_does_not_matter(http, content_type):
    response = await http.post(CHAT, data=json.dumps(chat()).encode(), headers={"Content-Type": content_type})
    assert response.status == 200


async def test_compressed_bodies_are_read(http, fake):
    response = await http.post(
        CHAT, data=gzip.compress(json.dumps(chat()).encode()), headers={"Content-Encoding": "gzip"}
    )
    assert response.status == 200


async def test_a_body_with_a_wrong_encoding_is_a_400(http, fake):
    response = await http.post(CHAT, data=b"x" * 100, headers={"Content-Encoding": "gzip"})
    assert response.status == 400
    assert fake.asked == []


async def test_a_compressed_body_counts_by_its_real_size(start, fake):
    http = await start(max_body="1MiB")
    bomb = zlib.compress(json.dumps(chat(foo="x" * 4 * 2**20)).encode())
    response = await http.post(CHAT, data=bomb, headers={"Content-Encoding": "deflate"})
    assert response.status == 413
    assert (await error(response))["code"] == "request_too_large"
    assert fake.asked == []


async def test_a_body_over_32_mib_is_a_413(http, fake):
    data = json.dumps(chat(foo="x" * 33 * 2**20)).encode()
    response = await http.post(CHAT, data=io.BytesIO(data))
    assert response.status == 413
    assert await error(response) == {
        "message": "The request body is over the limit of this server.",
        "type": "invalid_request_error",
        "param": None,
        "code": "request_too_large",
    }
    assert fake.asked == []


async def test_a_body_that_says_it_is_too_large_is_not_waited_for(http):
    reader, writer = await asyncio.open_connection(http.host, http.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**40}\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.readline(), 5)
    assert answer.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_chunked_body_over_the_limit_is_a_413(start, fake):
    http = await start(max_body="100KiB")

    async def endless():
        for _ in range(20):
            yield b" " * 10_000

    response = await http.post(CHAT, data=endless())
    assert response.status == 413
    assert fake.asked == []


async def test_a_body_just_under_the_limit_is_served(http, fake):
    data = json.dumps(chat(foo="x" * (32 * 2**20 - 200))).encode()
    assert len(data) < 32 * 2**20
    assert (await http.post(CHAT, data=io.BytesIO(data))).status == 200


@pytest.mark.parametrize("model", ["gpt-4", "", "x" * 10_000, MODEL + "\0", MODEL.upper()])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_unknown_model_is_a_404(http, fake, path, model):
    response = await http.post(path, json=(chat if path == CHAT else completion)(model=model))
    assert response.status == 404
    found = await error(response)
    assert (found["type"], found["code"], found["param"]) == ("not_found_error", "model_not_found", "model")
    assert len(found["message"]) < 400
    assert fake.asked == []


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/v1/chat", "/v1/embeddings", "/v1/models/", "/%00", "/%ff"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_an_unknown_route_is_a_404(http, method, path):
    response = await http.request(method, path)
    assert response.status == 404
    found = await error(response)
    assert (found["type"], found["code"], found["param"]) == ("not_found_error", "not_found", None)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"), ("PUT", COMPLETIONS, "POST"), ("OPTIONS", CHAT, "POST"),
        ("POST", "/v1/models", "GET,HEAD"), ("DELETE", "/v1/models/a/b", "GET,HEAD"), ("POST", "/health", "GET,HEAD"),
    ],
)  # fmt: skip
async def test_a_wrong_method_is_a_405_with_allow(http, method, path, allow):
    response = await http.request(method, path)
    assert response.status == 405
    assert response.headers["Allow"] == allow
    found = await error(response)
    assert (found["type"], found["code"]) == ("invalid_request_error", "method_not_allowed")


@pytest.mark.parametrize("key", ["", "k" * 129, "é", "a\tb"])
async def test_a_bad_idempotency_key_is_a_400(http, fake, key):
    response = await http.post(CHAT, json=chat(), headers={"Idempotency-Key": key})
    assert response.status == 400
    assert (await error(response))["param"] == "Idempotency-Key"
    assert fake.asked == []


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "param", "message"),
    [
        (511, None, None, None),
        (511, 1, None, None),
        (496, None, None, None),
        (510, 2, None, None),
        (511, 2, "max_tokens", "context is 512 tokens, but 513 were requested: 511 in prompt and 2 as max_tokens"),
        (1, 600, "max_tokens", "context is 512 tokens, but 601 were requested: 1 in prompt and 600 as max_tokens"),
        (512, None, "prompt", "context is 512 tokens, but prompt has 512 tokens"),
        (513, 1, "prompt", "context is 512 tokens, but prompt has 513 tokens"),
        (5000, 600, "prompt", "context is 512 tokens, but prompt has 5000 tokens"),
        (200_000, None, "prompt", "context is 512 tokens, but prompt has at least 782 tokens"),
    ],
)
@pytest.mark.parametrize("as_ids", [False, True])
async def test_what_does_not_fit_the_context_is_refused_with_the_numbers(
    http, fake, prompt_tokens, max_tokens, param, message, as_ids
):
    prompt = [97] * prompt_tokens if as_ids else "a" * prompt_tokens
    response = await http.post(COMPLETIONS, json=completion(prompt, max_tokens=max_tokens))
    if param is None:
        assert response.status == 200
        assert len(fake.asked[0].token_ids) == prompt_tokens
        assert fake.asked[0].sampling.max_tokens == (max_tokens or min(16, 512 - prompt_tokens))
        return
    assert response.status == 400
    found = await error(response)
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)
    assert message.replace("at least 782", "200000" if as_ids else "at least 782") in found["message"]
    assert fake.asked == []


@pytest.mark.parametrize(
    ("content", "limits", "param"),
    [
        ("a" * 600, {}, "messages"),
        ("a", {"max_completion_tokens": 600}, "max_completion_tokens"),
        ("a", {"max_tokens": 600}, "max_tokens"),
        ("a", {"max_tokens": 2**62}, "max_tokens"),
    ],
)
async def test_chats_that_do_not_fit_name_the_field(http, fake, content, limits, param):
    response = await http.post(CHAT, json=chat(messages=user(content), **limits))
    assert response.status == 400
    found = await error(response)
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)
    assert "512" in found["message"]
    assert fake.asked == []


async def test_more_turns_than_context_are_refused_before_the_template(http, fake):
    response = await http.post(CHAT, json=chat(messages=user("") * 20_000))
    assert response.status == 400
    found = await error(response)
    assert found["code"] == "context_length_exceeded"
    assert "at least 20000 tokens" in found["message"]
