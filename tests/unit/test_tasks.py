"""Tasks are cancelled until they have ended; what must not be left half done is awaited however often that happens."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pdq.kv_transfer import in_thread
from pdq.tasks import cancelled, finished, settled

ROOT = Path(__file__).parents[2]


async def deaf(times: int) -> None:
    """Goes on after the first `times` cancels."""
    for _ in range(times):
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
    await asyncio.Event().wait()


async def failing() -> None:
    raise ValueError("its own")


async def test_a_task_that_loses_cancels_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.tasks.CANCEL_SECONDS", 0.01)
    tasks = [asyncio.create_task(deaf(times)) for times in (0, 1, 3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancelled(tasks)
    assert [task.cancelled() for task in tasks] == [True] * 3


async def test_a_task_that_had_ended_keeps_its_end() -> None:
    task = asyncio.create_task(failing())
    await asyncio.wait({task})
    await cancelled([task])
    assert not task.cancelled()
    assert str(task.exception()) == "its own"
    await cancelled([])


async def test_whoever_waits_may_be_cancelled_too() -> None:
    task = asyncio.create_task(deaf(1))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(cancelled([task]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await cancelled([task])


def test_pdq_never_waits_with_what_loses_cancels() -> None:
    sources = [path for top in ("pdq", "workers") for path in (ROOT / top).rglob("*.py")]
    assert sources
    assert [path.name for path in sources if "asyncio.wait_for(" in path.read_text()] == []


async def cancelled_three_times(task: asyncio.Task[Any]) -> None:
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_what_is_awaited_to_its_end_is_not_left_at_the_second_cancel() -> None:
    end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for wait in (finished, settled):
        task = asyncio.create_task(wait(end))  # type: ignore[arg-type,operator]
        await asyncio.sleep(0)
        await cancelled_three_times(task)
        assert not task.done()
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    end.set_result(5)
    await asyncio.wait(others)
    assert [task.cancelled() for task in others] == [True, True]
    assert end.result() == 5


async def test_what_ends_gives_its_result_or_its_error() -> None:
    async def five() -> int:
        return 5

    assert await finished(five()) == 5
    with pytest.raises(ValueError, match="its own"):
        await finished(failing())
    task = asyncio.create_task(failing())
    await settled(task)
    assert str(task.exception()) == "its own"


async def test_work_in_a_thread_has_ended_when_its_cancels_are_raised() -> None:
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(10)
        ended.set()

    with ThreadPoolExecutor(1) as threads:
        task = asyncio.create_task(in_thread(threads, work))
        await asyncio.to_thread(begun.wait, 10)
        await cancelled_three_times(task)
        assert not task.done()
        go.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended.is_set()
