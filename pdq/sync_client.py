"""`Client`: the SDK for programs without asyncio; a thin shell around an `AsyncClient` on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from pdq.client import AsyncClient, Handle, Result, Status
from pdq.config import RedisSettings
from pdq.messages import Event, WorkerInfo

T = TypeVar("T")


class SyncHandle:
    """A submitted request; the methods are `Handle`'s, blocking."""

    def __init__(self, client: Client, handle: Handle) -> None:
        self.id = handle.id
        self._client = client
        self._handle = handle

    def stream(self, after: int = 0) -> Iterator[Event]:
        events = self._handle.stream(after)
        try:
            while True:
                event = self._client.run(_next(events))
                if event is None:
                    return
                yield event
        finally:
            self._client.run(_close(events))

    def result(self, timeout: float | None = None) -> Result:
        return self._client.run(self._handle.result(timeout))

    def cancel(self) -> bool:
        return self._client.run(self._handle.cancel())

    def status(self) -> Status:
        return self._client.run(self._handle.status())


class Client:
    """Submits to one pool; arguments as of `AsyncClient`. Thread-safe. Use as a context manager, or call `close`."""

    def __init__(self, settings: RedisSettings | None = None, *, max_queued: int | None = None, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdq-client", daemon=True)
        self._thread.start()
        try:
            self._client = self.run(_make(settings, max_queued, options))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self.run(self._client.aclose())
            self._stop()

    def submit(self, **options: Any) -> SyncHandle:
        """See `AsyncClient.submit`."""
        return SyncHandle(self, self.run(self._client.submit(**options)))

    def attach(self, request_id: str) -> SyncHandle:
        return SyncHandle(self, self._client.attach(request_id))

    def workers(self) -> list[WorkerInfo]:
        return self.run(self._client.workers())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the client's loop and wait; Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make(settings: RedisSettings | None, max_queued: int | None, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(settings, max_queued=max_queued, **options)


async def _close(events: AsyncGenerator[Event, None]) -> None:
    await events.aclose()


async def _next(events: AsyncGenerator[Event, None]) -> Event | None:
    return await anext(events, None)
