"""A worker that ends while its engine's threads work: no slot is closed under them, however often it cancels."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from pdq.engine.base import Segment
from pdq.worker import Worker
from tests.pipeline.local import LocalPool, LocalWorker
from tests.pipeline.test_pipeline import ask, expected
from tests.pipeline.test_prefill_sharing import submit, until
from tests.servers import Server

CANCELS = 4  # that whoever waits gets: one is not enough to show that all are outlasted
Call = Callable[..., Any]
pytestmark = pytest.mark.leaves_keys("the workers end as if they had crashed, with jobs in work")


@pytest.fixture(autouse=True)
def quick_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.tasks.CANCEL_SECONDS", 0.01)


class Watched:
    """A worker one of whose engine's methods can be held up, and one of whose loops can be made to raise.

    faults: slots that were closed, in order, while that method was at work on them.
    """

    def __init__(self, worker: LocalWorker, monkeypatch: pytest.MonkeyPatch, name: str, after: int = 0) -> None:
        """The first `after` calls of the method go through."""
        self.worker, self._after = worker, after
        self.entered, self.release = threading.Event(), threading.Event()
        self.closed: list[object] = []
        self.faults: list[object] = []
        self._crash = asyncio.Event()
        self._inside: set[int] = set()
        engine, loops = worker.engine, worker.stage.loops
        self._stock, self._close = getattr(engine, name), engine.close
        monkeypatch.setattr(engine, name, self._held_up)
        monkeypatch.setattr(engine, "close", self._closing)
        monkeypatch.setattr(worker.stage, "loops", lambda: [*loops(), self._raises()])

    def crash(self) -> None:
        """One of the worker's loops raises."""
        self._crash.set()

    async def crashed(self) -> None:
        """The worker has ended by that."""
        with pytest.raises(RuntimeError, match="a loop of the worker"):
            await self.worker.task
        with suppress(Exception):
            await self.worker.close()

    async def _raises(self) -> None:
        await self._crash.wait()
        raise RuntimeError("a loop of the worker")

    def _held_up(self, *args: Any) -> Any:
        if self._after > 0:
            self._after -= 1
            return self._stock(*args)
        slots = [s.slot for s in args[0]] if isinstance(args[0], list) else [args[0]]
        self._inside = {id(slot) for slot in slots}
        self.entered.set()
        assert self.release.wait(30)
        try:
            return self._stock(*args)
        finally:
            self._inside = set()

    def _closing(self, slot: object) -> None:
        self.closed.append(slot)
        if id(slot) in self._inside:
            self.faults.append(slot)
        self._close(slot)


def tasks_of(*names: str) -> list[asyncio.Task[Any]]:
    """Those that run a coroutine of one of these names."""
    return [task for task in asyncio.all_tasks() if getattr(task.get_coro(), "__qualname__", "") in names]


async def outlasted(tasks: list[asyncio.Task[Any]]) -> None:
    """Each has ended, or is still there after being cancelled several times."""
    assert tasks
    await until(lambda: all(task.done() or task.cancelling() >= CANCELS for task in tasks))


async def ended_by_a_crash(watched: Watched, *names: str) -> None:
    """A loop raises while the engine is held up: its slots are closed, but only after it has returned."""
    await until(watched.entered.is_set)
    tasks = tasks_of("Worker._job", *names)
    watched.crash()
    await outlasted(tasks)
    try:
        assert watched.faults == []
        assert not watched.worker.task.done()
    finally:
        watched.release.set()
        await watched.crashed()
    assert watched.faults == []
    assert watched.closed


@pytest.mark.parametrize("failed", [False, True], ids=["a step", "a step alone after one that failed"])
async def test_a_decode_step_that_is_cancelled_ends_before_its_slots_are_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    async with LocalPool(server, decode=0) as pool:
        worker = pool.add("decode")
        watched = Watched(worker, monkeypatch, "forward")
        held_up, forwards = worker.engine.forward, []

        def forward(segments: list[Segment]) -> list[int | None]:
            forwards.append(len(segments))
            if failed and len(forwards) == 1:
                raise RuntimeError("a step that fails")
            return held_up(segments)  # type: ignore[no-any-return]

        monkeypatch.setattr(worker.engine, "forward", forward)
        await submit(pool, "a prompt", 9)
        await ended_by_a_crash(watched, "DecodeStage._steps")
        assert len(forwards) == 1 + failed


async def test_a_cancelled_load_of_kv_into_decode_ends_before_its_slot_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server, decode=0) as pool:
        watched = Watched(pool.add("decode"), monkeypatch, "load")
        await submit(pool, "a prompt of several blocks", 9)
        await ended_by_a_crash(watched)


async def test_a_cancelled_load_of_a_prefix_into_prefill_ends_before_its_slot_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with LocalPool(server) as pool:
        prompt = "a prompt of several blocks"
        assert (await ask(pool, prompt, 3)).text == expected(prompt.encode(), 3)
        await pool.workers["prefill"][0].stop()
        watched = Watched(pool.add("prefill"), monkeypatch, "load")
        await submit(pool, prompt, 9)
        await ended_by_a_crash(watched)


@pytest.mark.parametrize("method", ["forward", "export"])
async def test_a_cancelled_prefill_chunk_ends_before_its_slot_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with LocalPool(server, prefill=0, decode=0) as pool:
        watched = Watched(pool.add("prefill"), monkeypatch, method)
        await submit(pool, "a prompt of several blocks", 9)
        await ended_by_a_crash(watched, "Forwards.run")


async def test_a_write_back_that_exports_when_decode_closes_ends_before_its_slot_is_closed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.write_back.DRAIN_SECONDS", 0.01)
    async with LocalPool(server, decode=0) as pool:
        watched = Watched(pool.add("decode"), monkeypatch, "export")
        assert (await ask(pool, "a prompt", 9)).text == expected(b"a prompt", 9)
        await until(watched.entered.is_set)
        (write_back,) = tasks_of("WriteBack._settle")
        stopping = asyncio.create_task(watched.worker.stop())
        await until(lambda: stopping.done() or write_back.cancelling() >= CANCELS)
        try:
            assert not stopping.done()
            assert watched.faults == []
        finally:
            watched.release.set()
            await stopping
        assert write_back.done()
        assert watched.faults == []
        assert watched.closed


async def test_a_worker_whose_forward_never_returns_ends_without_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        raise Exited(code)

    async with LocalPool(server, decode=0) as pool:
        worker = pool.add("decode", stall_seconds=1.0)
        watched = Watched(worker, monkeypatch, "forward")
        await submit(pool, "a prompt", 9)
        await until(watched.entered.is_set)
        with monkeypatch.context() as patch:
            patch.setattr("pdq.worker.os._exit", leave)
            watched.crash()
            await asyncio.wait([worker.task])
        assert isinstance(worker.task.exception(), Exited)
        assert worker.task.exception().args == (1,)  # type: ignore[union-attr]
        assert watched.closed == []
        steps = tasks_of("DecodeStage._steps", "Worker._job")
        watched.release.set()
        await asyncio.wait(steps)
        with suppress(Exception):
            await worker.close()


async def test_a_stage_is_closed_by_whatever_its_worker_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalPool(server, decode=0) as pool:
        worker = pool.add("decode")
        watched = Watched(worker, monkeypatch, "forward")
        closed: list[str] = []
        stock = worker.stage.close

        async def close() -> None:
            assert tasks_of("DecodeStage._steps", "Worker._job") == []
            closed.append("stage")
            await stock()

        monkeypatch.setattr(worker.stage, "close", close)
        await until(lambda: worker.worker._joined)
        watched.crash()
        with pytest.raises(RuntimeError, match="a loop of the worker"):
            await worker.task
        assert closed == ["stage"]
        assert isinstance(worker.worker, Worker)
        for client in (worker.worker._redis, worker.worker._waiting, worker.worker._hints):
            await client.aclose()
