"""Large values: nothing is lost or mixed up, memory is bounded, and the speed is that of the socket."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from pdq import bulk
from pdq.bulk import Values
from pdq.connection import RedisError, SyncRedis
from tests.servers import Server

MIB = 1 << 20


@pytest.fixture
def redis(server: Server) -> Iterator[SyncRedis]:
    with bulk.connect(server.url, 2, MIB) as client:
        yield client
        client.flushdb()


SIZES = [0, 1, 100, (16 << 10) - 1, 16 << 10, (64 << 10) - 2, 64 << 10, (64 << 10) + 1, MIB - 1, MIB]


def test_values_of_every_size_come_back_as_they_were_sent(redis: SyncRedis) -> None:
    items = [(f"k{i}", memoryview(os.urandom(size))) for i, size in enumerate(SIZES * 2)]
    values = Values(redis, MIB)
    assert values.put(items, 60_000) == len(items)
    names = [name for name, _ in items]
    assert [bytes(v or b"") for v in values.get(names)] == [bytes(v) for _, v in items]
    mixed = [n for name in names for n in (name, "absent " + name)]
    assert [v is None for v in values.get(mixed)] == [False, True] * len(names)


def test_of_a_value_that_is_too_large_only_the_start_is_kept(redis: SyncRedis) -> None:
    redis.set("large", bytes(range(256)) * (100 * MIB // 256))
    redis.set("next", b"small")
    found = list(Values(redis, MIB).get(["large", "next"]))
    assert found == [bytes(range(128)), b"small"]


def test_whoever_stops_early_leaves_a_client_that_works(redis: SyncRedis) -> None:
    values = Values(redis, MIB)
    values.put([(f"k{i}", memoryview(os.urandom(MIB))) for i in range(6)], 60_000)
    for value in values.get([f"k{i}" for i in range(6)]):
        assert value is not None
        break
    assert redis.get("nothing") is None
    assert len(list(values.get([f"k{i}" for i in range(6)]))) == 6


def test_a_connection_that_breaks_in_the_middle_is_made_anew_once(redis: SyncRedis, server: Server) -> None:
    values = Values(redis, MIB)
    items = [(f"k{i}", memoryview(os.urandom(MIB))) for i in range(30)]
    values.put(items, 60_000)
    found = []
    with server.client() as other:
        for i, value in enumerate(values.get([name for name, _ in items])):
            found.append(bytes(value or b""))
            if i == 4:
                other.client_kill_filter(_type="normal", skipme=True)
    assert found == [bytes(v) for _, v in items]


def test_a_server_that_is_gone_is_an_error_of_redis(redis: SyncRedis) -> None:
    server = Server()
    with bulk.connect(server.url, 1, MIB) as client:
        client.ping()
        server.close()
        with pytest.raises(RedisError):
            list(Values(client, MIB).get(["a"]))
        with pytest.raises(RedisError):
            Values(client, MIB).put([("a", memoryview(b"x"))], 1000)


def test_errors_of_commands_are_those_of_redis_py(redis: SyncRedis) -> None:
    redis.lpush("list", "x")
    with pytest.raises(RedisError, match="WRONGTYPE"):
        list(Values(redis, MIB).get(["list"]))
    assert list(Values(redis, MIB).get(["absent"])) == [None]
    assert redis.zadd("z", {b"\x00\xff": 1.5}) == 1
    assert redis.zmscore("z", [b"\x00\xff", b"a"]) == [1.5, None]


class RawSocket:
    """The same SETs and GETs by hand, over one socket, with nothing done to the answers."""

    def __init__(self, server: Server, items: list[tuple[str, memoryview]]) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._items = items
        size = len(items[0][1])
        self._buffer = memoryview(bytearray(size))
        self._answer = len(items) * (size + len(b"$%d\r\n\r\n" % size))

    def put(self) -> None:
        for name, value in self._items:
            key = name.encode()
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(value)))
            self._socket.sendall(value)
            self._socket.sendall(b"\r\n")
        self._receive(5 * len(self._items))

    def get(self) -> None:
        keys = [name.encode() for name, _ in self._items]
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(k), k) for k in keys))
        self._receive(self._answer)

    def _receive(self, left: int) -> None:
        while left:
            left -= self._socket.recv_into(self._buffer[: min(left, len(self._buffer))])

    def close(self) -> None:
        self._socket.close()


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@pytest.mark.slow
def test_the_bulk_path_has_four_fifths_of_the_speed_of_the_raw_socket(server: Server) -> None:
    """1,000 tokens of the built-in model in bfloat16, checksums included: 31 blocks of 0.74 MB."""
    from tests.pipeline.speed import bulk_path

    shares = bulk_path(server)
    print({name: f"{share:.0%}" for name, share in shares.items()})
    assert min(shares.values()) >= 0.8
