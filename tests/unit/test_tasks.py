"""Tasks are cancelled until they have ended."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from pdq.tasks import cancelled

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
