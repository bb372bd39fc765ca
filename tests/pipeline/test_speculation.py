"""Guessed tokens through the whole pipeline: the same answers in fewer steps, whatever ends or interrupts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pdq.engine.base import Segment
from pdq.engine.scripted import Script, ScriptedEngine
from pdq.errors import InvalidRequest, RequestCancelled
from pdq.messages import Event
from tests.faults.pool import until
from tests.pipeline.local import LocalPool
from tests.pipeline.test_sampling import EVERYTHING, read, same, tiny_torch
from tests.servers import Server

SCRIPT = "scripted:text=round and round,step_ms=1"
FEW = [120, 121, 122]  # tokens that a model has to repeat
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "allowed_token_ids": FEW},
    "seeded": {"seed": 3, "temperature": 0.2, "allowed_token_ids": FEW},
    "penalties": {"temperature": 0.0, "frequency_penalty": 0.02, "repetition_penalty": 1.01, "allowed_token_ids": FEW},
    "logprobs": {"temperature": 0.0, "allowed_token_ids": FEW, "logprobs": 3},
    "everything": {"seed": 1, **EVERYTHING},
    "stop string": {"temperature": 0.0, "allowed_token_ids": FEW, "min_tokens": 31, "stop": ["x", "y", "z"]},
    "stop token": {"temperature": 0.0, "allowed_token_ids": FEW, "stop_token_ids": FEW, "ignore_eos": True},
    "eos": {"seed": 9, "temperature": 0.8, "logit_bias": {256: 3}, "allowed_token_ids": [*FEW, 256]},
    "free": {"seed": 4},
}


def told(pool: LocalPool) -> tuple[int, int]:
    """Tokens that the decode workers guessed, and those that came true."""
    counters = [w.stage.counters() for w in pool.workers["decode"]]
    return sum(c["drafted_tokens"] for c in counters), sum(c["accepted_tokens"] for c in counters)


async def ask(pool: LocalPool, speculation: str | None, **options: Any) -> list[Event]:
    options = {"prompt": "xyzxyz", "max_tokens": 60, **options}
    return await read(await pool.client.submit(speculation=speculation, **options))


@pytest.mark.parametrize("options", REQUESTS.values(), ids=REQUESTS)
async def test_an_answer_is_the_same_with_guesses(server: Server, options: dict[str, Any]) -> None:
    async with LocalPool(server, engine=tiny_torch) as pool:
        plain = await ask(pool, "off", **options)
        assert told(pool) == (0, 0)
        same(await ask(pool, "ngram", **options), plain)
        drafted, accepted = told(pool)
        tokens = sum(len(e.token_ids) for e in plain)
        if options.get("allowed_token_ids") == FEW and tokens == 60:
            assert drafted > accepted >= 10
        counters = pool.workers["decode"][0].stage.counters()
        assert counters["tokens"] - accepted == counters["steps"]


TEXT = "round and round" * 9
ENDS: list[tuple[dict[str, Any], int, str, str]] = [
    *[({"max_tokens": n}, n, TEXT[:n], "length") for n in range(48, 56)],
    ({"stop": ["dround"], "min_tokens": 45}, 50, TEXT[:44], "stop"),
    ({"stop_token_ids": [ord("a")], "min_tokens": 40}, 52, TEXT[:51], "stop"),
]


@pytest.mark.parametrize(("options", "tokens", "text", "reason"), ENDS)
async def test_an_end_among_right_guesses_is_the_end(
    server: Server, caplog: pytest.LogCaptureFixture, options: dict[str, Any], tokens: int, text: str, reason: str
) -> None:
    async with LocalPool(server, engine=SCRIPT, decode_draft_tokens=7) as pool:
        found = []
        for speculation in ("off", "ngram"):
            handle = await pool.client.submit(prompt="round", speculation=speculation, **{"max_tokens": 90, **options})
            result = await handle.result(10)
            found.append((result.token_ids, result.text, result.finish_reason, result.usage.completion_tokens))
        assert found[0] == found[1]
        assert found[1][1:3] == (text, reason)
        assert len(found[1][0]) == found[1][3] == tokens
        assert told(pool)[1] > 20
    assert "failed" not in caplog.text  # as a step would that guesses beyond the slot's end


@pytest.mark.parametrize("engine", [SCRIPT.replace("=1", "=8"), tiny_torch], ids=["scripted", "torch"])
async def test_guesses_survive_the_death_of_a_decode_worker(server: Server, engine: Any) -> None:
    options = {"engine": engine, "lease_seconds": 0.6, "decode_flush_ms": 5.0, "decode_draft_tokens": 2}
    wanted = [REQUESTS[name] for name in ("seeded", "penalties", "logprobs", "free")]
    async with LocalPool(server, **options) as pool:
        undisturbed = [await ask(pool, "off", max_tokens=110, **r) for r in wanted]
        handles = [await pool.client.submit(prompt="xyzxyz", speculation="ngram", max_tokens=110, **r) for r in wanted]
        for handle in handles:
            while (await handle.status()).tokens < 8:
                await asyncio.sleep(0.005)
        assert not all([(await h.status()).state == "done" for h in handles])
        await pool.workers["decode"][0].die()
        pool.add("decode")
        for handle, expected in zip(handles, undisturbed, strict=True):
            same(await read(handle), expected)
        assert max([(await h.status()).attempt for h in handles]) == 3
        assert pool.workers["decode"][1].stage.counters()["accepted_tokens"] > 0


async def test_the_next_turn_finds_the_blocks_that_guesses_filled(server: Server) -> None:
    async with LocalPool(server, engine=SCRIPT) as pool:
        result = await (await pool.client.submit(prompt="round", max_tokens=60, speculation="ngram")).result(10)
        assert told(pool)[1] > 20
        decode = pool.workers["decode"][0]
        await until(lambda: decode.stage.counters()["write_backs"] == 1)
        turn = [*b"round", *result.token_ids, 33]
        again = await (await pool.client.submit(token_ids=turn, max_tokens=5)).result(10)
        assert again.usage.cached_tokens == 64  # checked by the engine when it loads them


# ---- who guesses, and how much ----


@pytest.mark.parametrize(
    ("setting", "asked", "guesses"),
    [("off", None, False), ("off", "ngram", True), ("ngram", None, True), ("ngram", "off", False)],
)
async def test_the_request_decides_and_else_the_worker(
    server: Server, setting: str, asked: str | None, guesses: bool
) -> None:
    async with LocalPool(server, engine=SCRIPT, decode_speculation=setting) as pool:
        await ask(pool, asked)
        assert (told(pool)[1] > 20) is guesses
        assert (told(pool)[0] > 0) is guesses


@pytest.mark.parametrize("wrong", ["NGRAM", "", "on", True, 1, []])
async def test_the_sdk_takes_no_other_word_for_it(server: Server, wrong: Any) -> None:
    async with LocalPool(server, prefill=0, decode=0) as pool:
        with pytest.raises(InvalidRequest) as raised:
            await pool.client.submit(prompt="x", speculation=wrong)
        assert raised.value.param == "speculation"


class Watched(ScriptedEngine):
    """Notes of each forward its sequences, its rows, and the most drafts of a sequence."""

    def __init__(self) -> None:
        script = Script(text="round and round", step_ms=3)
        super().__init__(script, block_size=4, max_model_len=1024, memory=1 << 20)
        self.seen: list[tuple[int, int, int]] = []

    def forward(self, segments: Sequence[Segment]) -> list[int | None]:
        rows = sum(len(s.token_ids) for s in segments)
        self.seen.append((len(segments), rows, max(s.drafts for s in segments)))
        return super().forward(segments)


@pytest.mark.parametrize("most", [1, 3, 7])
async def test_a_step_of_several_has_no_more_rows_than_sequences_may_be_decoded_together(
    server: Server, most: int
) -> None:
    async with LocalPool(
        server, prefill_engine=SCRIPT, decode_engine=Watched, decode_max_batch=most, decode_speculation="ngram"
    ) as pool:
        await asyncio.gather(*(ask(pool, None, prompt=f"round {i}", max_tokens=300) for i in range(3)))
        await ask(pool, None)
        seen = pool.workers["decode"][0].engine.seen
        assert all(rows <= most for sequences, rows, _ in seen if sequences > 1)
        assert max(drafts for sequences, _, drafts in seen if sequences == 1) == 4
        assert ((3, 7, 2) in seen) is (most == 7)  # two of the four drafts for one, one for each of the others
        assert (3, 3, 0) in seen or most != 3


async def test_wrong_guesses_become_few(server: Server) -> None:
    """The text is one pair of tokens again and again, followed by another token each time."""

    def misleading() -> Watched:
        it = Watched()
        it._answer = bytes(token for i in range(60) for token in (120, 121, i))
        return it

    async with LocalPool(server, prefill_engine=SCRIPT, decode_engine=misleading, decode_speculation="ngram") as pool:
        await ask(pool, None, max_tokens=120)
        drafted, accepted = told(pool)
        assert 4 < drafted < 15
        assert accepted == 0


# ---- what goes wrong ----


class Spoilt(Watched):
    """Every guess makes its sequence's logits something else than numbers."""

    def forward(self, segments: Sequence[Segment]) -> list[int | None]:
        plain = [replace(s, token_ids=s.token_ids[: len(s.token_ids) - s.drafts], drafts=0) for s in segments]
        lengths = [s.slot.length for s in segments]
        tokens = super().forward(plain)
        for segment, length in zip(segments, lengths, strict=True):
            if segment.drafts:
                segment.slot.forget(segment.slot.length - length)  # type: ignore[attr-defined]
        self.seen[-1] = (len(segments), 0, max(s.drafts for s in segments))
        return [None if s.drafts else token for s, token in zip(segments, tokens, strict=True)]


class Failing(Watched):
    """Cannot compute drafts at all."""

    def forward(self, segments: Sequence[Segment]) -> list[int | None]:
        tokens = super().forward(segments) if not any(s.drafts for s in segments) else None
        if tokens is None:
            self.seen.append((len(segments), 0, max(s.drafts for s in segments)))
            raise RuntimeError("no room for so many rows")
        return tokens


@pytest.mark.parametrize("engine", [Spoilt, Failing])
async def test_a_guess_that_breaks_a_step_is_the_last_one_and_breaks_no_answer(server: Server, engine: Any) -> None:
    async with LocalPool(server, prefill_engine=SCRIPT, decode_engine=engine) as pool:
        events, other = await asyncio.gather(ask(pool, "ngram"), ask(pool, "off", prompt="x"))
        for found in (events, other):
            assert "".join(e.text for e in found) == TEXT[:60]
        assert sum(drafts > 0 for _, _, drafts in pool.workers["decode"][0].engine.seen) == 1


async def test_an_answer_with_guesses_can_be_cancelled(server: Server) -> None:
    async with LocalPool(server, engine=SCRIPT.replace("step_ms=1", "step_ms=20")) as pool:
        handle = await pool.client.submit(prompt="round", max_tokens=900, speculation="ngram")
        while (await handle.status()).tokens < 30:
            await asyncio.sleep(0.005)
        assert await handle.cancel()
        with pytest.raises(RequestCancelled):
            await handle.result(5)
