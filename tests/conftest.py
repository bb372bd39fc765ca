"""Fixtures for all tests: servers that live for the session and are emptied for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import KINDS, Server, binary


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Server]]:
    running: dict[str, Server] = {}
    yield running
    for server in running.values():
        server.close()


def _fresh(running: dict[str, Server], kind: str) -> Server:
    if kind != "fake" and binary(kind) is None:
        pytest.skip(f"no server program for {kind}")
    if kind not in running:
        running[kind] = Server(kind)
    server = running[kind]
    with server.client() as client:
        client.flushall()
    return server


@pytest.fixture(params=KINDS)
def any_server(request: pytest.FixtureRequest, _servers: dict[str, Server]) -> Server:
    """An empty server, once for each kind."""
    return _fresh(_servers, request.param)


@pytest.fixture
def server(_servers: dict[str, Server]) -> Server:
    """An empty Valkey."""
    return _fresh(_servers, "valkey9")
