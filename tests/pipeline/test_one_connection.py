"""The client that sends all commands over one connection: answers find their askers, and trouble stays short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Disconnected
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as Unanswered

from pdq import connection
from tests.faults.proxy import Proxy
from tests.servers import Server, free_port


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as made:
        yield made


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[connection.AsyncRedis]:
    made = connection.command(proxy.url)
    yield made
    await made.aclose()


def reads(server: Server) -> int:
    with server.client() as direct:
        info: dict[str, Any] = direct.info()  # type: ignore[assignment]
        return int(info["total_reads_processed"])


async def test_each_answer_goes_to_whoever_asked(client: connection.AsyncRedis, proxy: Proxy) -> None:
    answers = await asyncio.gather(*(client.echo(f"{i}") for i in range(500)))
    assert answers == [f"{i}".encode() for i in range(500)]
    assert proxy.accepted == 1, "one attempt to connect is everybody's"


async def test_commands_of_one_moment_are_sent_together(server: Server) -> None:
    client = connection.command(server.url)
    await client.ping()
    before = reads(server)
    await asyncio.gather(*(client.echo(f"{i}") for i in range(50)))
    assert reads(server) - before <= 5  # some are the look's own
    await client.aclose()


async def test_several_commands_in_one_call_have_each_its_own_error(client: connection.AsyncRedis) -> None:
    one, wrong, two = await client.execute_many([("ECHO", "1"), ("LPUSH", "k"), ("ECHO", "2")])
    assert (one, two) == (b"1", b"2")
    assert isinstance(wrong, ResponseError)


async def test_an_error_is_raised_to_its_own_asker_only(client: connection.AsyncRedis) -> None:
    good, bad = await asyncio.gather(client.echo("a"), client.execute_command("NONSENSE"), return_exceptions=True)
    assert good == b"a"
    assert isinstance(bad, ResponseError)


async def test_a_caller_who_gives_up_early_disturbs_nobody(client: connection.AsyncRedis, proxy: Proxy) -> None:
    await client.ping()
    tasks = [asyncio.create_task(client.echo(f"{i}")) for i in range(40)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert ends[1::2] == [f"{i}".encode() for i in range(1, 40, 2)]
    assert {type(e) for e in ends[::2]} == {asyncio.CancelledError}
    assert await client.echo("next") == b"next"
    assert proxy.accepted == 1


async def test_a_cut_connection_costs_a_reconnect(client: connection.AsyncRedis, proxy: Proxy) -> None:
    await client.ping()
    proxy.cut()
    assert await asyncio.gather(*(client.echo(f"{i}") for i in range(20))) == [f"{i}".encode() for i in range(20)]
    assert proxy.accepted <= 3


async def test_a_silent_server_is_given_up_after_the_timeout(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.connection.COMMAND_TIMEOUT", 0.2)
    client = connection.command(proxy.url)
    await client.ping()
    proxy.hole()
    began = time.monotonic()
    ends = await asyncio.gather(*(client.echo("x") for _ in range(5)), return_exceptions=True)
    assert {type(e) for e in ends} == {Unanswered}
    assert time.monotonic() - began < 3 * 0.2 + 1.5  # three tries, and the pauses between them
    proxy.hole(False)
    assert await client.echo("y") == b"y"
    await client.aclose()


async def test_a_read_given_up_takes_nothing_afterwards(server: Server) -> None:
    """The server must hear of it, or it would give the next entry to a reader who is gone."""
    client = connection.blocking(server.url)
    await client.xgroup_create("s", "g", mkstream=True)
    task = asyncio.create_task(client.xreadgroup("g", "c", {"s": ">"}, block=5000))
    with server.client() as direct:
        while not direct.info("clients")["blocked_clients"]:  # type: ignore[index]
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait([task])
        while direct.info("clients")["blocked_clients"]:  # type: ignore[index]
            await asyncio.sleep(0.005)
        direct.xadd("s", {"a": 1})
        assert direct.xpending("s", "g")["pending"] == 0  # type: ignore[index]
        direct.delete("s")
    await client.aclose()


async def test_refused_connections_are_an_error_for_all_who_wait(client: connection.AsyncRedis, proxy: Proxy) -> None:
    proxy.refuse()
    ends = await asyncio.gather(*(client.ping() for _ in range(10)), return_exceptions=True)
    assert {type(e) for e in ends} == {Disconnected}
    await proxy.listen()
    assert await client.ping()


async def test_connections_that_end_as_soon_as_they_are_made_are_an_error_for_all_who_wait(
    client: connection.AsyncRedis, proxy: Proxy
) -> None:
    target, proxy.target = proxy.target, free_port()
    async with asyncio.timeout(connection.COMMAND_TIMEOUT):
        ends = await asyncio.gather(*(client.ping() for _ in range(20)), return_exceptions=True)
    assert {type(e) for e in ends} == {Disconnected}
    proxy.target = target
    assert await client.ping()


async def test_nobody_hangs_while_connections_are_cut_again_and_again(
    client: connection.AsyncRedis, proxy: Proxy
) -> None:
    async def ask(i: int) -> object:
        try:
            return await client.echo(f"{i}")
        except Disconnected as e:
            return type(e)

    async with asyncio.timeout(connection.COMMAND_TIMEOUT):  # an answer that never comes would take longer
        for _ in range(50):
            tasks = [asyncio.create_task(ask(i)) for i in range(10)]
            for _ in range(3):
                await asyncio.sleep(0.001)
                proxy.cut()
            for i, answer in enumerate(await asyncio.gather(*tasks)):
                assert answer in (f"{i}".encode(), Disconnected)


async def test_a_closed_client_leaves_no_connection(server: Server) -> None:
    client = connection.command(server.url)
    await client.client_setname("one-connection")
    await client.aclose()
    with server.client() as direct:
        while any(c["name"] == "one-connection" for c in direct.client_list()):  # type: ignore[union-attr]
            await asyncio.sleep(0.005)
