"""The queued requests behind one HTTP request: submitted together, read together, cancelled together.

A client that goes away cancels them, whatever the gateway was waiting for at that moment, the submit included. The
exception are requests with an idempotency key: their client may come back for the answer under the same key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

from pdq.errors import IdConflict, PdqError, QueueFull, RequestFailed, Unavailable
from pdq.gateway.context import Gateway
from pdq.gateway.prompts import Prompt
from pdq.messages import Event
from pdq.tasks import cancelled

if TYPE_CHECKING:
    from pdq.client import Handle, Result

log = logging.getLogger(__name__)

SUBMIT_SECONDS = 10.0
CANCEL_SECONDS = 5.0
Numbered = tuple[int, Event]


class Jobs:
    """Handles in the order of the choices. Set `done` when every one has been seen to end."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.done = False

    @property
    def id(self) -> str:
        return self.handles[0].id

    async def results(self) -> list[Result]:
        """All answers. Raises what ended the first one that failed."""
        if len(self.handles) == 1:
            return [await self.handles[0].result()]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(h.result()) for h in self.handles]
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None
        return [t.result() for t in tasks]

    async def events(self) -> AsyncGenerator[Numbered, None]:
        """(choice, event) as they come, a terminal event for every choice. Raises as `results`."""
        if len(self.handles) == 1:
            async for event in _read(self.handles[0]):
                yield 0, event
            return
        merged: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(maxsize=2 * len(self.handles))
        readers = [asyncio.create_task(_pump(n, h, merged)) for n, h in enumerate(self.handles)]
        try:
            left = len(readers)
            while left:
                item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            await cancelled(readers)


@asynccontextmanager
async def submitted(
    gateway: Gateway, prompts: Sequence[Prompt], options: dict[str, Any], key: str | None
) -> AsyncIterator[Jobs]:
    """Queue one request a prompt; those not done at the end of the block are cancelled.

    options: further keywords of `AsyncClient.submit`. key: the client's idempotency key. Raises what `submit` raises.
    """
    jobs = Jobs()
    try:
        for n, prompt in enumerate(prompts):
            name = key if key is None or n == 0 else f"{key}\n{n}"  # no client key holds a line break
            jobs.handles.append(await _submit(gateway, prompt, options, name))
        yield jobs
    finally:
        if not jobs.done and key is None:
            for handle in jobs.handles:
                gateway.background.spawn(_cancel(handle))


async def _submit(gateway: Gateway, prompt: Prompt, options: dict[str, Any], key: str | None) -> Handle:
    settings = gateway.settings
    task = asyncio.create_task(
        gateway.client.submit(
            token_ids=prompt.ids,
            max_tokens=prompt.max_tokens,
            model=gateway.served().name,
            timeout=settings.request_timeout,
            queue_timeout=settings.queue_timeout,
            idempotency_key=key,
            **options,
        )
    )
    try:
        async with asyncio.timeout(SUBMIT_SECONDS):
            return await asyncio.shield(task)
    except QueueFull as e:
        e.retry_after = await gateway.wait_estimate() or e.retry_after
        raise
    except IdConflict as e:
        text = "The Idempotency-Key belongs to a different request."
        raise IdConflict(text, param="Idempotency-Key") from e
    except BaseException as e:
        # Redis may have the request although nobody here got the handle.
        if key is None and not (task.done() and task.exception()):
            gateway.background.spawn(_cancel_late(task))
        if isinstance(e, TimeoutError):
            raise Unavailable(f"Redis did not answer within {SUBMIT_SECONDS:g} s") from e
        raise


async def _cancel_late(task: asyncio.Task[Handle]) -> None:
    await asyncio.wait({task})
    error = task.exception()
    if error is None:
        await _cancel(task.result())
    else:
        log.info("a submit nobody waited for was not accepted: %s", error)


async def _cancel(handle: Handle) -> None:
    try:
        async with asyncio.timeout(CANCEL_SECONDS):
            await handle.cancel()
    except (PdqError, TimeoutError) as e:
        log.info("request %s was left to its deadline: %s", handle.id, str(e) or "Redis does not answer")


async def _read(handle: Handle) -> AsyncGenerator[Event, None]:
    async with aclosing(handle.stream()) as events:
        async for event in events:
            yield event
            if event.terminal:
                return
    raise RequestFailed("the reply ended without a result")


async def _pump(number: int, handle: Handle, merged: asyncio.Queue[Numbered | Exception | None]) -> None:
    """Read one reply into `merged`: its events, then None, or the exception it ended with."""
    last: Exception | None = None
    try:
        async for event in _read(handle):
            await merged.put((number, event))
    except Exception as e:  # noqa: BLE001  raised again by the reader of `merged`
        last = e
    await merged.put(last)
