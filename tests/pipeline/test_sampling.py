"""Penalties, log probabilities and the rest of the sampling options through the whole pipeline, deaths included."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from pdq.client import Handle
from pdq.engine.base import Segment
from pdq.errors import InvalidRequest
from pdq.messages import Event, Request, SamplingParams, TokenLogprob
from pdq.validate import make_sampling
from tests.pipeline.local import LocalPool
from tests.servers import Server

EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"101": 3, 256: -100},
    "min_tokens": 20, "stop_token_ids": [10], "allowed_token_ids": list(range(32, 127)), "logprobs": 3,
}  # fmt: skip
REQUESTS: list[dict[str, Any]] = [
    {"prompt": "victim one", "seed": 1, **EVERYTHING},
    {"prompt": "victim two", "temperature": 0.0, "repetition_penalty": 1.5, "logprobs": 0},
    {"prompt": "victim three", "seed": 3, "temperature": 1.4, "frequency_penalty": -0.5, "ignore_eos": True},
    {"prompt": "victim four", "seed": 4},
]


def tiny_torch() -> Any:
    """A real engine with a vocabulary of bytes, slow enough to be killed at work."""
    import torch

    from pdq.engine.runner import TorchEngine
    from tests.engine.tiny import tiny_model

    class SlowEngine(TorchEngine):
        def forward(self, segments: Sequence[Segment]) -> list[int | None]:
            time.sleep(0.01)
            return super().forward(segments)

    torch.set_num_threads(1)
    return SlowEngine(
        tiny_model("llama", vocab_size=257), fingerprint=b"t" * 32, dtype="float32", max_model_len=128,
        eos_ids=frozenset({256}), kv_memory_bytes=1 << 26, threads=1,
    )  # fmt: skip


async def read(handle: Handle) -> list[Event]:
    return [event async for event in handle.stream()]


def told(events: Sequence[Event]) -> list[TokenLogprob]:
    """The log probabilities of a whole reply, each where its token is."""
    for event in events:
        assert [p.token_id for p in event.logprobs] in ([], list(event.token_ids))
    return [p for event in events for p in event.logprobs]


def same(found: Sequence[Event], expected: Sequence[Event]) -> None:
    """Equal tokens, text and end; log probabilities up to the rounding of other batches."""
    for part in (lambda e: list(e.token_ids), lambda e: e.text):
        assert [x for e in found for x in part(e)] == [x for e in expected for x in part(e)]
    assert found[-1].finish_reason == expected[-1].finish_reason
    for a, b in zip(told(found), told(expected), strict=True):
        assert (a.raw, [t.raw for t in a.top]) == (b.raw, [t.raw for t in b.top])
        assert [a.logprob, *(t.logprob for t in a.top)] == pytest.approx(
            [b.logprob, *(t.logprob for t in b.top)], abs=1e-4
        )


@pytest.mark.parametrize("engine", ["scripted:step_ms=10", tiny_torch], ids=["scripted", "torch"])
async def test_penalties_and_logprobs_survive_the_death_of_a_decode_worker(server: Server, engine: Any) -> None:
    options = {"engine": engine, "lease_seconds": 0.6, "decode_flush_ms": 5.0}
    async with LocalPool(server, **options) as pool:
        undisturbed = [await read(await pool.client.submit(max_tokens=60, **r)) for r in REQUESTS]  # each alone
        handles = [await pool.client.submit(max_tokens=60, **r) for r in REQUESTS]
        for handle in handles:
            while (await handle.status()).tokens < 8:
                await asyncio.sleep(0.005)
        assert not all([(await h.status()).state == "done" for h in handles])
        await pool.workers["decode"][0].die()
        pool.add("decode")
        for handle, expected in zip(handles, undisturbed, strict=True):
            same(await read(handle), expected)
        assert max([(await h.status()).attempt for h in handles]) == 3
        assert [len(told(e)) for e in undisturbed] == [60, 60, 0, 0]
        assert [len(p.top) for p in told(undisturbed[0])] == [3] * 60
        assert {t for e in undisturbed[0] for t in e.token_ids} <= set(range(32, 127))


def in_one_process(options: dict[str, Any], count: int) -> list[int]:
    """The tokens of a request by an engine alone, its history kept by hand."""
    engine, params = tiny_torch(), make_sampling({k: v for k, v in options.items() if k != "prompt"})
    slot, prompt = engine.open(128), list(options["prompt"].encode())
    tokens: list[int] = []
    feed = prompt
    while len(tokens) < count:
        tokens += engine.forward([Segment(slot, feed, params, len(tokens), [*prompt, *tokens])])
        feed = tokens[-1:]
    return tokens


async def test_the_tokens_are_those_of_one_process(server: Server) -> None:
    async with LocalPool(server, engine=tiny_torch) as pool:
        for options in REQUESTS[:3]:
            result = await (await pool.client.submit(max_tokens=40, **options)).result(20)
            assert list(result.token_ids) == in_one_process(options, 40)[: len(result.token_ids)]
            assert len(result.token_ids) > 10


async def test_a_penalty_changes_what_comes(server: Server) -> None:
    async with LocalPool(server, engine=tiny_torch) as pool:

        async def ask(**options: Any) -> tuple[int, ...]:
            handle = await pool.client.submit(prompt="aaaa", max_tokens=30, temperature=0.0, ignore_eos=True, **options)
            return (await handle.result(20)).token_ids

        plain = await ask()
        assert len(set(plain)) < 30
        assert len(set(await ask(frequency_penalty=2.0, presence_penalty=2.0))) > len(set(plain))
        assert plain[0] not in await ask(logit_bias={plain[0]: -100.0})
        assert set(await ask(allowed_token_ids=[65, 66])) <= {65, 66}


async def test_every_token_of_a_stop_string_or_a_character_has_its_logprob_once(server: Server) -> None:
    async with LocalPool(server, engine="scripted:text=h\u00e9 \U0001f600stop", decode_flush_ms=0.0) as pool:
        handle = await pool.client.submit(prompt="x", max_tokens=24, stop="stop", logprobs=1)
        events = await read(handle)
        assert "".join(e.text for e in events) == "h\u00e9 \U0001f600"
        assert b"".join(p.raw for p in told(events)).decode() == "h\u00e9 \U0001f600stop"
        assert told(events)[1].text == "\ufffd"
        assert (await handle.result()).logprobs == tuple(told(events))


async def test_one_token_that_prefill_ends_alone_has_its_logprob(server: Server) -> None:
    async with LocalPool(server, decode=0) as pool:
        result = await (await pool.client.submit(prompt="x", max_tokens=1, logprobs=2)).result(5)
        (found,) = result.logprobs
        assert (found.token_id, found.text, len(found.top)) == (result.token_ids[0], result.text, 2)


async def test_a_stop_token_ends_the_text_and_is_not_shown_in_either_stage(server: Server) -> None:
    async with LocalPool(server, engine="scripted:text=Paris") as pool:
        for stop, text in ((b"r", "Pa"), (b"P", "")):
            handle = await pool.client.submit(prompt="x", max_tokens=30, stop_token_ids=list(stop), ignore_eos=True)
            result = await handle.result(5)
            assert (result.text, result.finish_reason, result.token_ids[-1]) == (text, "stop", stop[0])


async def test_no_end_before_min_tokens(server: Server) -> None:
    async with LocalPool(server, engine="scripted:eos_every=3") as pool:
        for seed in range(5):
            handle = await pool.client.submit(prompt="x", max_tokens=200, min_tokens=25, seed=seed)
            result = await handle.result(5)
            assert result.token_ids.index(256) == len(result.token_ids) - 1 >= 25
    async with LocalPool(server, engine="scripted:text=Paris") as pool:
        handle = await pool.client.submit(prompt="x", max_tokens=30, min_tokens=7, stop=["ri"], stop_token_ids=[80])
        result = await handle.result(5)
        assert (result.text, result.finish_reason) == ("ParisPa", "stop")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {257: 1.0}}, "logit_bias"),
    ({"allowed_token_ids": [5, 257]}, "allowed_token_ids"),
    ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ({"allowed_token_ids": [256], "min_tokens": 1}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("options", "param"), WRONG)
async def test_what_only_the_model_can_refuse_is_refused_by_the_worker(
    server: Server, options: dict[str, Any], param: str
) -> None:
    async with LocalPool(server, decode=0) as pool:
        handle = await pool.client.submit(prompt="x", max_tokens=3, **options)
        with pytest.raises(InvalidRequest) as raised:
            await handle.result(5)
        assert raised.value.param == param
        assert (await handle.status()).attempt == 1


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(temperature=-1.0), "temperature"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(logit_bias=((-1, 1.0),)), "logit_bias"),
        (SamplingParams(logit_bias=tuple((t, 1.0) for t in range(2000))), "logit_bias"),
        (SamplingParams(allowed_token_ids=()), "allowed_token_ids"),
        (SamplingParams(stop_token_ids=(-5,)), "stop_token_ids"),
        (SamplingParams(logprobs=10_000), "logprobs"),
        (SamplingParams(min_tokens=5, max_tokens=4), "min_tokens"),
    ],
)
async def test_a_request_that_nobody_checked_before_it_was_queued_is_refused(
    server: Server, sampling: SamplingParams, param: str
) -> None:
    async with LocalPool(server, decode=0) as pool:
        await pool.client._submit(Request("raw", sampling, prompt="x"), fresh_seed=False)
        with pytest.raises(InvalidRequest) as raised:
            await pool.client.attach("raw").result(5)
        assert raised.value.param == param
