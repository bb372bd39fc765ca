"""Hostile values for every field: never a 5xx, always either an answer or an error object, and the gateway lives on."""

from __future__ import annotations

import asyncio
import io
import json
import random

import orjson
import pytest

from pdq.gateway import unsupported
from pdq.gateway.schemas import ChatBody, ChatMessage, CompletionBody

from .fakes import MODEL
from .helpers import CHAT, COMPLETIONS, chat, completion, error

DEEP = orjson.loads(b"[" * 500 + b"]" * 500)
VALUES = [
    None, True, False, 0, 1, -1, 0.0, -0.0, 1.5, 1e308, -1e308, 5e-324, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**63), 1e30, "", "0", "a", "\0", "\n\r", "é👋\u2028\ufeff\uffff", "{kind}{}", "%s%n", "x" * 100_000, "__class__",
    [], [[]], [None], [0], [""], ["a", 1], [{}], {}, {"": ""}, {"type": "text"}, {"type": "text", "text": None},
    {"include_usage": "yes"}, {"role": "user"}, [{"role": "user", "content": {}}], DEEP, {"a": DEEP},
    [1e30], ["\0"] * 300,
]  # fmt: skip
CHAT_FIELDS = sorted({*ChatBody.model_fields, *unsupported.CHAT, "user", "foo", "{", "stream.x", "(ids)"})
COMPLETION_FIELDS = sorted({*CompletionBody.model_fields, *unsupported.COMPLETION, "user"})


async def check(http, path, body):
    response = await http.post(path, data=json.dumps(body))  # orjson does not write as deep as it reads
    assert response.status < 500, await response.text()
    if response.status == 200:
        await response.read()
    else:
        await error(response)
    return response.status


@pytest.mark.parametrize("field", CHAT_FIELDS)
async def test_chat_fields(http, field):
    for value in VALUES:
        await check(http, CHAT, chat() | {field: value})


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
async def test_completion_fields(http, field):
    for value in VALUES:
        await check(http, COMPLETIONS, completion() | {field: value})


@pytest.mark.parametrize("field", [*ChatMessage.model_fields, "foo"])
async def test_message_fields(http, field):
    for value in VALUES:
        await check(http, CHAT, chat(messages=[{"role": "user", "content": "a"} | {field: value}]))
        await check(
            http, CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a", field: value}]}])
        )


async def test_random_bodies(http, fake):
    dice = random.Random(7)
    answered = 0
    for _ in range(400):
        base = chat() if dice.random() < 0.5 else completion()
        path = CHAT if "messages" in base else COMPLETIONS
        fields = CHAT_FIELDS if path == CHAT else COMPLETION_FIELDS
        change = {dice.choice(fields): dice.choice(VALUES) for _ in range(dice.randrange(4))}
        answered += await check(http, path, base | change) == 200
    assert answered > 40
    assert len(fake.asked) >= answered


async def test_cut_and_flipped_bytes(http):
    dice = random.Random(8)
    good = orjson.dumps(chat(stream=True, stop=["é"], temperature=0.5))
    for _ in range(300):
        data = bytearray(good)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        response = await http.post(CHAT, data=bytes(data[: dice.randrange(len(data) // 2, len(data) + 1)]))
        assert response.status < 500
        await response.read()


async def test_a_million_wrong_items_are_reported_once(start, fake):
    http = await start()
    data = b'{"model":"%s","prompt":[%s]}' % (MODEL.encode(), b",".join([b"-1"] * 300_000))
    response = await http.post(COMPLETIONS, data=data)
    assert response.status == 400
    assert (await error(response))["param"] == "prompt.0"


@pytest.mark.parametrize("value", [b"[[]],", b"{},", b"0,"])
async def test_a_body_of_millions_of_values_is_refused_before_they_are_built(http, value):
    data = b'{"foo":[' + value * (2_100_000 // sum(map(value.count, (b"[", b"{", b",")))) + b"1]}"
    response = await http.post(CHAT, data=io.BytesIO(data))
    assert response.status == 400
    assert (await error(response))["message"] == "The body has more than 2000000 values."


@pytest.mark.parametrize(
    "raw",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\x00b\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_broken_http_does_not_harm_others(http, raw):
    reader, writer = await asyncio.open_connection(http.host, http.port)
    writer.write(raw)
    await writer.drain()
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 5)
    assert b" 50" not in answer.split(b"\r\n")[0]
    writer.close()
    assert (await http.post(CHAT, json=chat())).status == 200
