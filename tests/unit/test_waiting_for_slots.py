"""Who gets KV memory next: higher lanes first, then whoever waits longest, however much it needs."""

from __future__ import annotations

import asyncio

import pytest

from pdq.engine.scripted import Script, ScriptedEngine
from pdq.errors import RequestCancelled
from pdq.lease import Running
from pdq.messages import Request, SamplingParams, Timings
from pdq.queue import Job
from pdq.slots import Slots

TOKENS = 100  # that the engine has memory for


def running(name: str, lane: str = "normal") -> Running:
    request = Request(name, SamplingParams(), prompt="x", lane=lane)
    return Running(Job(name, "", "", 1, "", request, None, 0, 60.0, 0, Timings(), 0), 20.0)


class Memory:
    """A full engine, and jobs that wait for room in it."""

    def __init__(self) -> None:
        engine = ScriptedEngine(Script(), block_size=4, max_model_len=TOKENS, memory=TOKENS * 8)
        self.slots = Slots(engine)
        self.full = engine.open(TOKENS)
        self.served: list[str] = []

    def wait(self, job: Running, tokens: int) -> asyncio.Task[None]:
        async def use() -> None:
            slot = await self.slots.open(tokens, job)
            self.served.append(job.job.id)
            await asyncio.sleep(0)
            self.slots.close(slot)

        return asyncio.create_task(use())


async def test_higher_lanes_first_then_the_longest_waiting() -> None:
    memory = Memory()
    jobs = [
        running(f"{lane} {i}", lane)
        for i, lane in enumerate(("batch", "normal", "high", "batch", "normal", "high"))
    ]  # fmt: skip
    shuffled = [jobs[i] for i in (3, 5, 0, 4, 1, 2)]  # tasks of jobs claimed together get here in any order
    tasks = [memory.wait(job, TOKENS) for job in shuffled]
    while memory.slots.waiting < len(jobs):
        await asyncio.sleep(0)
    memory.slots.close(memory.full)
    await asyncio.gather(*tasks)
    assert memory.served == ["high 2", "high 5", "normal 1", "normal 4", "batch 0", "batch 3"]


async def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    memory = Memory()
    memory.slots.close(memory.full)
    half = await memory.slots.open(TOKENS // 2, running("half"))
    tasks = [memory.wait(running("large"), TOKENS), *(memory.wait(running(f"small {i}"), 10) for i in range(3))]
    while memory.slots.waiting < 4:
        await asyncio.sleep(0)
    assert memory.served == []
    memory.slots.close(half)
    await asyncio.gather(*tasks)
    assert memory.served == ["large", "small 0", "small 1", "small 2"]


async def test_one_that_should_stop_leaves_the_queue() -> None:
    memory = Memory()
    first, second = running("first"), running("second")
    tasks = [memory.wait(first, TOKENS), memory.wait(second, TOKENS)]
    while memory.slots.waiting < 2:
        await asyncio.sleep(0)
    first.note("cancel")
    with pytest.raises(RequestCancelled):
        await tasks[0]
    memory.slots.close(memory.full)
    await tasks[1]
    assert memory.served == ["second"]
