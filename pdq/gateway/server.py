"""The gateway as a process: listen at once, load the tokenizer meanwhile, serve, and end well.

The first SIGTERM or SIGINT drains: nothing new is accepted, running answers may finish for a while, what is left is
cancelled. The second ends the process on the spot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web

from pdq.config import GatewaySettings
from pdq.gateway.app import PING_SECONDS, app_of
from pdq.gateway.context import Gateway, Served
from pdq.text import ByteTokenizer

if TYPE_CHECKING:
    from pdq.client import AsyncClient

log = logging.getLogger(__name__)

SCRIPTED_CONTEXT = 8192
BACKLOG = 1024  # connections of a burst over this wait a second for their next try
_SHUTDOWN_SECONDS = 0.1  # the drain has waited for the handlers; those left are cancelled


def run(settings: GatewaySettings) -> None:
    """Serve until a signal says stop. Raises what `load_model` raises, and OSError if the port is taken."""
    asyncio.run(_run(settings))


async def _run(settings: GatewaySettings) -> None:
    from pdq.client import AsyncClient

    client = AsyncClient(settings, max_queued=settings.max_queued, max_queued_tokens=settings.max_queued_tokens)
    try:
        await serve(settings, client, load_model)
    finally:
        await client.aclose()


async def serve(settings: GatewaySettings, client: AsyncClient, load: Callable[[GatewaySettings], Served]) -> None:
    """Listen, call `load` in a thread, and serve until the first signal and the drain after it."""
    stop = _stop_signal()
    gateway = Gateway(settings, client, None, PING_SECONDS)
    runner = web.AppRunner(
        app_of(gateway), handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
        host, port = runner.addresses[0][:2]
        log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        if await _loaded(gateway, load, stop):
            await stop.wait()
            await _drain(gateway, runner)
    finally:
        await runner.cleanup()
    log.info("stopped")


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


async def _loaded(gateway: Gateway, load: Callable[[GatewaySettings], Served], stop: asyncio.Event) -> bool:
    """Load the model into `gateway`; False if a signal came first."""
    loading = asyncio.create_task(gateway.threads.run(None, load, gateway.settings))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not loading.done():
        loading.cancel()
        return False
    gateway.model = loading.result()
    log.info("ready to serve %s, context %d tokens", gateway.model.name, gateway.model.max_model_len)
    return True


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
