"""The thread pool for slow work, and what a slow template does to clients."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from pdq.gateway import prompts
from pdq.gateway.errors import Busy
from pdq.gateway.offload import Offload, TooSlow
from pdq.text import ByteTokenizer

from .helpers import CHAT, chat, error


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


async def test_work_runs_in_another_thread_and_its_error_comes_back():
    pool = Offload(threads=1)
    assert await pool.run(1.0, threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await pool.run(1.0, lambda: 1 / 0)
    pool.close()


async def test_work_over_its_limit_is_too_slow_and_others_go_on(release):
    pool = Offload(threads=2)
    with pytest.raises(TooSlow):
        await pool.run(0.05, release.wait)
    assert await pool.run(1.0, lambda: 5) == 5
    pool.close()


async def test_the_limit_counts_from_the_start_of_the_work(release):
    pool = Offload(threads=1)
    first = asyncio.create_task(pool.run(5.0, time.sleep, 0.3))
    await asyncio.sleep(0)
    second = asyncio.create_task(pool.run(0.5, time.sleep, 0.4))  # 0.3 s of waiting and 0.4 s of work
    await asyncio.gather(first, second)
    pool.close()


async def test_nobody_waits_longer_than_the_limit_for_a_thread(release):
    pool = Offload(threads=1)
    stuck = asyncio.create_task(pool.run(None, release.wait))
    await asyncio.sleep(0)
    begun = []
    with pytest.raises(Busy):
        await pool.run(0.05, begun.append, 1)
    release.set()
    await stuck
    await pool.run(1.0, int)
    assert begun == []  # it was given up before a thread got to it
    pool.close()


async def test_a_flood_is_refused_and_not_collected(release):
    pool = Offload(threads=1, waiting=2)
    running = asyncio.Event()
    loop = asyncio.get_running_loop()

    def block():
        loop.call_soon_threadsafe(running.set)
        release.wait()

    tasks = [asyncio.create_task(pool.run(None, block))]
    await running.wait()
    tasks += [asyncio.create_task(pool.run(None, int)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Busy):
        await pool.run(None, int)
    release.set()
    await asyncio.gather(*tasks)
    pool.close()


async def test_work_whose_client_left_is_not_begun(release):
    pool = Offload(threads=1)
    stuck = asyncio.create_task(pool.run(None, release.wait))
    await asyncio.sleep(0)
    begun = []
    left = asyncio.create_task(pool.run(5.0, begun.append, 1))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait({left})
    release.set()
    await stuck
    await pool.run(1.0, int)
    assert begun == []
    pool.close()


class EndlessTemplate(ByteTokenizer):
    def __init__(self, release):
        self.release = release

    def encode_chat(self, messages):
        if messages[0].content == "loop":
            self.release.wait()
        return super().encode_chat(messages)


async def test_an_endless_template_is_a_400_and_holds_nobody_up(start, fake, release, monkeypatch):
    monkeypatch.setattr(prompts, "TEMPLATE_SECONDS", 0.3)
    http = await start(tokenizer=EndlessTemplate(release))
    loop = [{"role": "user", "content": "loop"}]
    asking = asyncio.create_task(http.post(CHAT, json=chat(messages=loop)))
    begin = time.monotonic()
    assert (await http.get("/health")).status == 200
    assert (await http.post(CHAT, json=chat())).status == 200
    assert time.monotonic() - begin < 0.25
    response = await asking
    assert response.status == 400
    found = await error(response)
    assert (found["param"], found["message"]) == (
        "messages",
        "The chat template took more than 0.3 s on these messages.",
    )
    assert len(fake.asked) == 1
