"""The built-in model through the whole product: `pdq serve`, curl, the openai package, the SDK, kill -9."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from pdq import AsyncClient
from pdq.config import cache_folder
from tests.engine.agreement import TEXT
from tests.pipeline.test_serve import Serve, children_of

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def serve() -> Iterator[Serve]:
    options = ["--max-model-len", "1024", "--dtype", "float32", "--lease-seconds", "2"]
    with Serve(cache_folder(), *options, engine="torch") as running:
        running.read("pdq is ready", 180)
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.end(60) == 0, "\n".join(running.lines[-40:])


def redis_url(serve: Serve) -> str:
    return serve.read("Redis +redis://").split()[-1]


def test_the_printed_curl_line_gets_an_answer(serve: Serve) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    line = re.sub(r"^ *try +", "", serve.read("try +curl"))
    line = line.replace("Hello!", QUESTION[0]["content"]).replace('"max_tokens"', '"temperature": 0, "max_tokens"')
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("stream", [False, True])
async def test_the_openai_package_gets_paris(serve: Serve, stream: bool) -> None:
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{serve.port}/v1", api_key="none") as client:
        (model,) = (await client.models.list()).data
        reply = await client.chat.completions.create(model=model.id, messages=QUESTION, temperature=0, stream=stream)  # type: ignore[call-overload]
        if stream:
            text = "".join([c.choices[0].delta.content or "" async for c in reply if c.choices])
        else:
            text = reply.choices[0].message.content
            assert reply.usage.prompt_tokens_details.cached_tokens == 32  # the question was asked before
    assert text == ANSWER


async def test_a_text_that_comes_again_takes_fewer_steps_with_guesses_and_is_the_same(serve: Serve) -> None:
    async with AsyncClient(redis_url=redis_url(serve)) as client:

        async def ask(speculation: str) -> str:
            text = f"{TEXT}\n\n{TEXT[:150]}"
            handle = await client.submit(prompt=text, temperature=0, max_tokens=100, speculation=speculation)
            return (await handle.result(120)).text

        async def accepted() -> int:
            return sum(dict(w.counters).get("accepted_tokens", 0) for w in await client.workers())

        plain = await ask("off")
        assert await accepted() == 0
        assert await ask("ngram") == plain
        async with asyncio.timeout(30):
            while await accepted() < 50:  # told with the next heartbeat
                await asyncio.sleep(0.1)


async def test_four_streams_survive_the_death_of_each_worker_with_the_same_text(serve: Serve) -> None:
    async with AsyncClient(redis_url=redis_url(serve)) as client:

        async def ask(word: str) -> str:
            handle = await client.submit(prompt=f"The story of the {word} begins", temperature=0, max_tokens=24)
            return (await handle.result(120)).text

        words = ["fox", "sea", "old king", "machine"]
        undisturbed = await asyncio.gather(*map(ask, words))
        for stage in ("decode", "prefill"):
            asking = [asyncio.create_task(ask(w)) for w in words]
            await asyncio.sleep(0.5)
            victim = next(pid for pid in children_of(serve.process.pid) if f"workers.{stage}" in command_of(pid))
            os.kill(victim, signal.SIGKILL)
            assert await asyncio.gather(*asking) == undisturbed


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
