"""Log probabilities in OpenAI's shapes, whole and streamed, by its own client; and the options that choose tokens."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from pdq.messages import Event, TokenLogprob, TopLogprob, Usage

from .fakes import MODEL, TIMINGS
from .helpers import CHAT, COMPLETIONS, chat, completion, frames

MESSAGES = [{"role": "user", "content": "Hi"}]
WAVE = "👋".encode()
# The text of the third token is held back until the fourth completes the character; the last one never shows.
RAWS = [b"Hi", b" ", WAVE[:2], WAVE[2:], b"<eos>"]
LOGPROBS = [-0.5, -1.25, 0.0, -9999.0, -2.0]


def scored(n: int) -> TokenLogprob:
    """The n-th token, with itself and token 99 as the most likely ones."""
    best = (TopLogprob(n, LOGPROBS[n], RAWS[n]), TopLogprob(99, -12.5, b"\xff"))
    return TokenLogprob(n, LOGPROBS[n], RAWS[n], best)


def spoken(count: int = 2) -> list[Event]:
    """The answer "Hi 👋" in four events."""
    found = [scored(n) for n in range(5)]
    if count == 0:
        found = [TokenLogprob(t.token_id, t.logprob, t.raw) for t in found]
    return [
        Event(0, (0,), "Hi", logprobs=(found[0],)),
        Event(1, (1, 2), " ", logprobs=(found[1], found[2])),
        Event(3, (3,), "👋", logprobs=(found[3],)),
        Event(4, (4,), "", "stop", Usage(2, 5), TIMINGS, logprobs=(found[4],)),
    ]


@pytest.fixture
async def client(http):
    url = f"http://{http.host}:{http.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=10) as found:
        yield found


def chat_tokens(choice):
    return [(t.token, t.logprob, t.bytes) for t in choice.logprobs.content]


EXPECTED = [
    ("Hi", -0.5, [72, 105]),
    (" ", -1.25, [32]),
    ("\ufffd", 0.0, list(WAVE[:2])),
    ("\ufffd\ufffd", -9999.0, list(WAVE[2:])),
    ("<eos>", -2.0, list(b"<eos>")),
]


async def test_chat_has_each_token_once_with_its_bytes(client, fake):
    fake.script = lambda _: spoken()
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert choice.message.content == "Hi 👋"
    assert chat_tokens(choice) == EXPECTED
    assert choice.logprobs.refusal is None
    best = choice.logprobs.content[1].top_logprobs
    assert [(t.token, t.logprob, t.bytes) for t in best] == [(" ", -1.25, [32]), ("\ufffd", -12.5, [255])]
    assert fake.asked[0].sampling.logprobs == 2


async def test_a_chat_stream_has_them_in_the_same_order_also_of_what_does_not_show(client, fake):
    fake.script = lambda _: spoken()
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, stream=True
    )
    chunks = [c.choices[0] async for c in stream]
    assert "".join(c.delta.content or "" for c in chunks) == "Hi 👋"
    assert [t for c in chunks if c.logprobs for t in chat_tokens(c)] == EXPECTED
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].logprobs is None


async def test_chat_without_top_logprobs_has_the_chosen_tokens_alone(client, fake):
    fake.script = lambda _: spoken(0)
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True)
    assert [t.top_logprobs for t in answer.choices[0].logprobs.content] == [[]] * 5
    assert fake.asked[0].sampling.logprobs == 0


COMPLETION = {
    "tokens": ["Hi", " ", "bytes:\\xf0\\x9f", "bytes:\\x91\\x8b", "<eos>"],
    "token_logprobs": LOGPROBS,
    "text_offset": [0, 2, 3, 3, 4],
}


async def test_a_completion_has_four_arrays(client, fake):
    fake.script = lambda _: spoken()
    answer = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=2)
    for choice in answer.choices:
        found = choice.logprobs.model_dump()
        assert {name: found[name] for name in COMPLETION} == COMPLETION
        assert found["top_logprobs"][2] == {"bytes:\\xf0\\x9f": 0.0, "bytes:\\xff": -12.5}
    assert fake.asked[0].sampling.logprobs == 2


async def test_a_stream_of_completions_counts_characters_across_its_chunks(client, fake):
    fake.script = lambda _: spoken()
    stream = await client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=2, stream=True)
    found = {0: {name: [] for name in COMPLETION}, 1: {name: [] for name in COMPLETION}}
    async for chunk in stream:
        (choice,) = chunk.choices
        for name in COMPLETION if choice.logprobs else ():
            found[choice.index][name] += getattr(choice.logprobs, name)
    assert found == {0: COMPLETION, 1: COMPLETION}


async def test_a_completion_with_logprobs_0_has_the_chosen_tokens(client, fake):
    fake.script = lambda _: spoken(0)
    answer = await client.completions.create(model=MODEL, prompt="a", logprobs=0)
    assert answer.choices[0].logprobs.top_logprobs[0] == {"Hi": -0.5}
    assert answer.choices[0].logprobs.token_logprobs == LOGPROBS
    assert fake.asked[0].sampling.logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat()), (COMPLETIONS, completion()), (CHAT, chat(logprobs=False))])
async def test_nobody_gets_logprobs_who_did_not_ask(http, fake, path, body, stream):
    response = await http.post(path, json=body | {"stream": stream})
    assert fake.asked[0].sampling.logprobs is None
    answers = frames(await response.text())[:-1] if stream else [await response.json()]
    assert {c["logprobs"] for a in answers for c in a["choices"]} == {None}


async def test_every_option_reaches_the_queue(client, fake):
    await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=9, presence_penalty=0.5, frequency_penalty=-1,
        logit_bias={"7": -100, "5": 2.5},
        extra_body={
            "repetition_penalty": 1.25, "min_tokens": 3, "allowed_token_ids": [9, 5, 7], "stop_token_ids": [8, 8],
        },
    )  # fmt: skip
    found = fake.asked[0].sampling
    assert (found.presence_penalty, found.frequency_penalty, found.repetition_penalty) == (0.5, -1.0, 1.25)
    assert (found.logit_bias, found.min_tokens) == (((5, 2.5), (7, -100.0)), 3)
    assert (found.allowed_token_ids, found.stop_token_ids) == ((5, 7, 9), (8,))


async def test_the_default_length_of_a_completion_gives_way_to_min_tokens(client, fake):
    await client.completions.create(model=MODEL, prompt="a", extra_body={"min_tokens": 30})
    await client.completions.create(model=MODEL, prompt="a", extra_body={"min_tokens": 3})
    assert [a.sampling.max_tokens for a in fake.asked] == [30, 16]
