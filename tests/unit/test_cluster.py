"""What a client knows of a Redis Cluster, and when it asks again."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis.exceptions import MovedError

from pdq.cluster import SLOTS, Address, Cluster, Home, Nodes, slot_of

A, B, C = ("a", 1), ("b", 2), ("c", 3)


class Asked:
    """Answers CLUSTER SLOTS. halves: who has them; away: who does not answer."""

    def __init__(self, *halves: Address | None) -> None:
        self.halves = halves
        self.away: set[Address] = set()
        self.asked: list[Address] = []

    def __call__(self, node: Address) -> list[Any]:
        self.asked.append(node)
        if node in self.away:
            raise redis.ConnectionError("away")
        edges = ((0, SLOTS // 2 - 1), (SLOTS // 2, SLOTS - 1))
        return [
            [*edge, [owner[0].encode(), owner[1], b"id", []], [b"replica", 9, b"id", []]]
            for edge, owner in zip(edges, self.halves, strict=True)
            if owner is not None
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one entry is the time."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_seed_is_asked_once_for_all_slots(clock: list[float]) -> None:
    ask = Asked(A, B)
    cluster = Cluster(C, ask)
    assert [cluster.owner(s) for s in (0, SLOTS // 2 - 1, SLOTS // 2, SLOTS - 1)] == [A, A, B, B]
    clock[0] += 1000
    assert cluster.owner(0) == A
    assert ask.asked == [C]


def test_a_doubt_is_looked_into_by_another_node_and_at_most_once_a_second(clock: list[float]) -> None:
    ask = Asked(A, B)
    cluster = Cluster(A, ask)
    cluster.owner(0)
    ask.halves = (B, B)
    cluster.doubt()
    assert cluster.owner(0) == A
    clock[0] += 1
    assert cluster.owner(0) == B
    assert ask.asked == [A, B]


def test_a_moved_slot_is_known_at_once(clock: list[float]) -> None:
    ask = Asked(A, B)
    cluster = Cluster(A, ask)
    cluster.owner(0)
    cluster.redirected(MovedError("7 c:3"))
    assert [cluster.owner(s) for s in (6, 7, 8)] == [A, C, A]
    assert ask.asked == [A]


def test_nodes_that_are_away_are_passed_over_and_the_seed_is_never_forgotten(clock: list[float]) -> None:
    ask = Asked(A, B)
    cluster = Cluster(C, ask)
    cluster.owner(0)
    ask.away, ask.halves = {A, B}, (C, C)
    cluster.doubt()
    clock[0] += 1
    assert cluster.owner(0) == C
    assert ask.asked == [C, A, B, C]


def test_a_node_without_a_name_is_the_one_that_was_asked(clock: list[float]) -> None:
    assert Cluster(("seed", 7), Asked(("", 7), None)).owner(0) == ("seed", 7)


def test_a_slot_without_an_owner_is_a_lost_connection_that_says_why(clock: list[float]) -> None:
    ask = Asked(A, None)
    key = next(k for k in map(str, range(100)) if slot_of(k) >= SLOTS // 2)
    with pytest.raises(redis.ConnectionError, match=f"slot {slot_of(key)} of the cluster: no node has it"):
        Home(Cluster(A, ask), key).address()
    ask.away = {A}
    with pytest.raises(redis.ConnectionError, match="away"):
        Home(Cluster(A, ask), key).address()


def test_a_home_is_looked_for_at_every_connect(clock: list[float]) -> None:
    ask = Asked(A, A)
    home = Home(Cluster(A, ask), "k")
    assert home.address() == A
    ask.halves = (B, B)
    clock[0] += 1
    assert home.address() == B


def test_a_node_that_does_not_answer_is_left_alone_for_a_second_and_closed_when_it_leaves(clock: list[float]) -> None:
    ask, closed = Asked(A, B), []

    class Client(redis.Redis):
        def close(self) -> None:
            closed.append(self.get_connection_kwargs()["host"])

    nodes = Nodes(Cluster(A, ask), lambda node: Client(*node))
    first, second = (next(k for k in map(str, range(100)) if slot_of(k) * 2 // SLOTS == half) for half in (0, 1))
    kept, lost = nodes.of(first), nodes.of(second)
    assert kept is not None
    assert lost is not None
    nodes.lost(lost)
    assert nodes.of(second) is None
    assert nodes.of(first) is kept
    ask.halves = (A, C)
    clock[0] += 1
    assert nodes.of(second) not in (None, kept, lost)
    assert closed == ["b"]
