"""kill -9 of a worker while streams run: every stream ends with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdq.client import AsyncClient, Handle
from pdq.config import RedisSettings
from pdq.messages import Event
from tests.engine.tiny import save_tiny
from tests.faults.programs import Programs
from tests.servers import Server
from tests.unit.small_models import write_tokenizer

LEASE = 1.0
OPTIONS = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny("llama", folder, vocab_size=259, max_position_embeddings=1024)
    return write_tokenizer(folder)


@pytest.fixture
def programs(server: Server, model: Path) -> Iterator[Programs]:
    settings = {"model": model, "dtype": "float32", "lease_seconds": LEASE, "block_size": 16, "chunk_tokens": 32}
    with Programs(server, **settings) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> object:
    async with AsyncClient(RedisSettings(redis_url=server.url)) as made:
        yield made


async def submit(client: AsyncClient, prompt: str) -> Handle:
    return await client.submit(prompt=prompt, **OPTIONS)  # type: ignore[arg-type]


async def read(handle: Handle) -> str:
    """The whole text; fails if a token is repeated, skipped, or follows the end."""
    events: list[Event] = []
    async with asyncio.timeout(40):
        async for event in handle.stream():
            assert event.index == sum(len(e.token_ids) for e in events)
            events.append(event)
    assert [e.terminal for e in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == sum(len(e.token_ids) for e in events) == 300
    return "".join(e.text for e in events)


async def until(handles: list[Handle], stage: str, tokens: int = 0) -> None:
    async with asyncio.timeout(40):
        for handle in handles:
            while (status := await handle.status()).stage != stage or status.tokens < tokens:
                await asyncio.sleep(0.01)


PROMPTS = [f"{word} " * 20 for word in ("one", "two", "three", "four")]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_killed_worker_costs_four_running_streams_nothing(
    programs: Programs, client: AsyncClient, victim: str
) -> None:
    running = {stage: programs.start(stage) for stage in ("prefill", "decode")}
    undisturbed = [await read(await submit(client, p)) for p in PROMPTS]
    handles = [await submit(client, p) for p in PROMPTS]
    if victim == "decode":
        await until(handles, "decode", 20)
    assert not all([(await h.status()).state == "done" for h in handles])
    running[victim].kill()
    programs.start(victim)
    assert await asyncio.gather(*map(read, handles)) == undisturbed
    attempts = [(await h.status()).attempt for h in handles]
    assert max(attempts) > 2 or victim == "prefill"


async def test_both_workers_killed_at_once_and_replaced_cost_nothing(programs: Programs, client: AsyncClient) -> None:
    running = [programs.start(stage) for stage in ("prefill", "decode")]
    undisturbed = [await read(await submit(client, p)) for p in PROMPTS]
    handles = [await submit(client, p) for p in PROMPTS]
    await until(handles[:1], "decode", 20)
    for process in running:
        process.kill()
    for stage in ("prefill", "decode"):
        programs.start(stage)
    assert await asyncio.gather(*map(read, handles)) == undisturbed


async def test_a_frozen_worker_that_wakes_up_writes_nothing(programs: Programs, client: AsyncClient) -> None:
    programs.start("prefill")
    frozen = programs.start("decode")
    undisturbed = [await read(await submit(client, p)) for p in PROMPTS]
    handles = [await submit(client, p) for p in PROMPTS]
    await until(handles, "decode", 20)
    import signal

    frozen.send_signal(signal.SIGSTOP)
    programs.start("decode")
    readers = [asyncio.create_task(read(h)) for h in handles]
    await until(handles, "done")
    frozen.send_signal(signal.SIGCONT)
    assert await asyncio.gather(*readers) == undisturbed
    again = await submit(client, PROMPTS[0])  # and it goes on serving
    assert await read(again) == undisturbed[0]
