"""Each test builds its own small app around a fake client and talks to it over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from pdq.config import GatewaySettings
from pdq.gateway.app import create_app
from pdq.text import ByteTokenizer

from .fakes import CONTEXT, MODEL, FakeClient, both

Start = Callable[..., Awaitable[TestClient[web.Request, web.Application]]]


@pytest.fixture
def fake() -> FakeClient:
    return FakeClient(workers_now=both())


@pytest.fixture
async def start(fake: FakeClient) -> AsyncIterator[Start]:
    """Starts a gateway; keywords are settings, or `tokenizer`, `ping_seconds`, `max_model_len`."""
    running: list[TestClient[web.Request, web.Application]] = []

    async def begin(**options: Any) -> TestClient[web.Request, web.Application]:
        extra = {k: options.pop(k) for k in ("ping_seconds",) if k in options}
        tokenizer = options.pop("tokenizer", ByteTokenizer())
        context = options.pop("max_model_len", CONTEXT)
        app = create_app(
            GatewaySettings(**options),
            client=fake,
            tokenizer=tokenizer,
            model_name=MODEL,
            max_model_len=context,
            **extra,
        )
        client = TestClient(TestServer(app))
        await client.start_server()
        running.append(client)
        return client

    yield begin
    for client in running:
        await client.close()


@pytest.fixture
async def http(start: Start) -> TestClient[web.Request, web.Application]:
    return await start()
