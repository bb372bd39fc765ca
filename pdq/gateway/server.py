"""The gateway as a process: listen at once, load the tokenizer meanwhile, serve, and end well.

The first SIGTERM or SIGINT drains: nothing new is accepted, running answers may finish for a while, what is left is
cancelled. The second ends the process on the spot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pdq import event_loop
from pdq.config import GatewaySettings
from pdq.connection import RedisError
from pdq.gateway.app import PING_SECONDS, app_of
from pdq.gateway.context import Gateway, Served
from pdq.gateway.queue_redis import QueueRedis
from pdq.text import ByteTokenizer

if TYPE_CHECKING:
    from pdq.client import AsyncClient

log = logging.getLogger(__name__)

SCRIPTED_CONTEXT = 8192
BACKLOG = 1024  # connections of a burst over this wait a second for their next try
CHECK_SECONDS = 0.5  # between two tries to look at a Redis that is away
_SHUTDOWN_SECONDS = 0.1  # the drain has waited for the handlers; those left are cancelled


def run(settings: GatewaySettings) -> None:
    """Serve until a signal says stop. Raises what `load_model` raises, and OSError if the port is taken."""
    event_loop.run(_run(settings))


async def _run(settings: GatewaySettings) -> None:
    from pdq.client import AsyncClient

    client = AsyncClient(settings, max_queued=settings.max_queued, max_queued_tokens=settings.max_queued_tokens)
    redis = QueueRedis(settings)
    try:
        await serve(settings, client, load_model, redis)
    finally:
        await redis.aclose()
        await client.aclose()


async def serve(
    settings: GatewaySettings,
    client: AsyncClient,
    load: Callable[[GatewaySettings], Served],
    redis: QueueRedis | None = None,
) -> None:
    """Listen, call `load` in a thread, check `redis`, and serve until the first signal and the drain after it.

    SIGHUP has the keys file read again. Raises what `load` raises, and ConfigError for a Redis that may evict requests
    and for a keys file without keys.
    """
    stop = _stop_signal()
    gateway = Gateway(settings, client, None, PING_SECONDS, redis)
    if gateway.keys.from_file:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.keys.forget)
    runner = web.AppRunner(
        app_of(gateway),
        handler_cancellation=True,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
        host, port = runner.addresses[0][:2]
        log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        await _until_stopped(gateway, load, stop)
        await _drain(gateway, runner)
    finally:
        await runner.cleanup()
    log.info("stopped")


class _Unquoted(logging.Filter):
    """Bytes that are no HTTP may be a piece of a prompt, or a key: aiohttp would log them."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args, record.exc_info = "not HTTP: %s", (type(error).__name__,), None
        return True


def _http_log() -> logging.Logger:
    """The log of what fails before a request is a request."""
    found = logging.getLogger(f"{__name__}.http")
    if not found.filters:
        found.addFilter(_Unquoted())
    return found


def load_model(settings: GatewaySettings) -> Served:
    """The model's name, tokenizer and context. Blocks, and may fetch files.

    Raises ConfigError, ModelNotFound, ModelUnsupported, Unavailable.
    """
    if settings.engine.partition(":")[0] == "scripted":
        name = settings.served_model_name or "scripted"
        return Served(name, ByteTokenizer(), settings.max_model_len or SCRIPTED_CONTEXT)
    from pdq.models import context_limit, find_model, load_tokenizer

    files = find_model(settings.model, served_model_name=settings.served_model_name, say=log.info, tokenizer_only=True)
    tokenizer = load_tokenizer(settings.engine, files.folder)
    return Served(files.name, tokenizer, context_limit(files.folder, settings.max_model_len))


async def _until_stopped(gateway: Gateway, load: Callable[[GatewaySettings], Served], stop: asyncio.Event) -> None:
    """Get ready and serve, until a signal or a reason why this cannot be, which is raised."""
    work: list[Coroutine[Any, Any, object]] = [_load(gateway, load), _check(gateway), stop.wait()]
    tasks = [asyncio.create_task(w) for w in work]
    stopping, left = tasks[-1], set(tasks)
    try:
        while not stopping.done():
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _load(gateway: Gateway, load: Callable[[GatewaySettings], Served]) -> None:
    gateway.model = await gateway.threads.run(None, load, gateway.settings)
    log.info("ready to serve %s, context %d tokens", gateway.model.name, gateway.model.max_model_len)


async def _check(gateway: Gateway) -> None:
    """See whether the queue's Redis is safe, as soon as it answers. Raises ConfigError if it is not."""
    while gateway.redis is not None and not gateway.redis.safe:
        try:
            await gateway.redis.check()
        except RedisError as e:
            log.debug("Redis does not answer: %s", e)
            await asyncio.sleep(CHECK_SECONDS)


async def _drain(gateway: Gateway, runner: web.AppRunner) -> None:
    seconds = gateway.settings.drain_seconds
    gateway.draining = True  # for connections that are already open
    for site in list(runner.sites):
        await site.stop()
    log.info("draining: running answers have %g s", seconds)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await gateway.activity.wait_idle()


def _stop_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second kills the process."""
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if not stop.is_set():
            stop.set()
            return
        log.warning("killed by a second signal")
        logging.shutdown()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    return stop
