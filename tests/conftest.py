"""Fixtures for all tests: servers that live for the session, emptied for each test; nothing may be left in them."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from unittest import mock

import pytest
import redis

from tests.hygiene import leaks
from tests.servers import COMES_FROM, KINDS, Server, binary

_USED = pytest.StashKey[list[Server]]()
_PASSED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job: children would ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "leaves_keys(reason): the test means to leave keys that nobody will end.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture(autouse=True)
def _no_key_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which a server holds keys without an owner (tests/hygiene.py).

    Looks at the session's servers that the test used, after all its other fixtures have ended, and at each server that
    the test closes. A test that means to leave something is marked `leaves_keys("why")`.
    """
    used = request.node.stash[_USED] = []
    found: list[str] = []
    close = Server.close

    def look_and_close(server: Server) -> None:
        found.extend(_leaks(server))
        close(server)

    with mock.patch.object(Server, "close", look_and_close):
        yield
    for server in used:
        found += _leaks(server)
    marker = request.node.get_closest_marker("leaves_keys")
    if marker is not None:
        assert marker.args, "leaves_keys needs a reason"
    elif found and request.node.stash.get(_PASSED, False):
        pytest.fail("keys were left behind:\n  " + "\n  ".join(sorted(found)[:20]), pytrace=False)


@pytest.fixture
def quick_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers in this process that drain do not first read for a second."""
    monkeypatch.setattr("pdq.worker.READ_SECONDS", 0.2)


def _leaks(server: Server) -> list[str]:
    try:
        with server.client() as client:
            return leaks(client)
    except (redis.ConnectionError, redis.TimeoutError):
        return []  # killed or frozen: it takes its keys along


@pytest.fixture(scope="session")
def _servers() -> Iterator[dict[str, Server]]:
    running: dict[str, Server] = {}
    yield running
    for server in running.values():
        server.close()


def _fresh(request: pytest.FixtureRequest, kind: str) -> Server:
    if kind != "fake" and binary(kind) is None:
        pytest.skip(f"no server program for {kind}: it comes from {COMES_FROM[kind]}")
    running: dict[str, Server] = request.getfixturevalue("_servers")
    if kind not in running or not running[kind].alive:  # a test that kills it may have failed halfway
        running[kind] = Server(kind)
    server = running[kind]
    with server.client() as client:
        client.flushall()
    request.node.stash[_USED].append(server)
    return server


@pytest.fixture(params=KINDS)
def any_server(request: pytest.FixtureRequest) -> Server:
    """An empty server, once for each kind."""
    return _fresh(request, request.param)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """An empty Valkey."""
    return _fresh(request, "valkey9")
