"""The block store on every kind of server: prefixes, misses, lifetimes."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from pdq import connection, keys, prefix
from pdq.blocks import HEADER_BYTES, BlockCodec, KVMiss
from pdq.store import BlockStore
from tests.servers import Server

SIZE, TOKEN = 4, 32
FINGERPRINT = bytes([7] * 32)
TOKENS = list(range(40))
HASHES = prefix.chain(prefix.root(FINGERPRINT, SIZE), TOKENS, SIZE)
CODEC = BlockCodec(FINGERPRINT, "float32", "layout", TOKEN)
KEYS = keys.BlockKeys(FINGERPRINT)


def payload(i: int) -> bytes:
    return random.Random(i).randbytes(SIZE * TOKEN)


def value(i: int) -> memoryview:
    made = memoryview(bytearray(HEADER_BYTES) + payload(i))
    CODEC.seal(made, HASHES[i], i * SIZE, (i + 1) * SIZE)
    return made


@pytest.fixture
def redis(any_server: Server) -> Iterator[connection.SyncRedis]:
    with connection.bulk(any_server.url, 2) as client:
        yield client


@pytest.fixture
def store(redis: connection.SyncRedis) -> BlockStore:
    return BlockStore(redis, CODEC, block_size=SIZE, ttl=60)


def test_the_longest_prefix_is_found_and_read_back(store: BlockStore) -> None:
    assert store.longest_prefix(HASHES) == 0
    store.put([(HASHES[i], value(i)) for i in range(6)])
    assert store.longest_prefix(HASHES) == 6
    assert [bytes(p) for p in store.get(HASHES[:6])] == [payload(i) for i in range(6)]
    assert store.longest_prefix([]) == 0
    assert store.get([]) == []


def test_a_block_is_no_hit_without_those_before_it(store: BlockStore) -> None:
    store.put([(HASHES[i], value(i)) for i in (0, 1, 3)])
    assert store.longest_prefix(HASHES) == 2
    assert len(store.get(HASHES)) == 2


@pytest.mark.parametrize("gone", [0, 2, 5])
def test_a_missing_block_ends_the_prefix_and_leaves_the_index(
    store: BlockStore, redis: connection.SyncRedis, gone: int
) -> None:
    store.put([(HASHES[i], value(i)) for i in range(6)])
    redis.delete(KEYS.block(HASHES[gone]))
    assert len(store.get(HASHES[:6])) == gone
    assert store.longest_prefix(HASHES) == gone
    assert store.counters["miss_absent"] == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "other", "text"])
def test_a_damaged_block_is_a_counted_miss(store: BlockStore, redis: connection.SyncRedis, damage: str) -> None:
    store.put([(HASHES[i], value(i)) for i in range(4)])
    good = bytes(value(2))
    bad = {"flip": good[:-1] + bytes([good[-1] ^ 4]), "truncate": good[:50], "other": bytes(value(1)), "text": b"hi"}
    redis.set(KEYS.block(HASHES[2]), bad[damage], keepttl=True)
    assert [bytes(p) for p in store.get(HASHES[:4])] == [payload(0), payload(1)]
    assert sum(n for name, n in store.counters.items() if name.startswith("miss_")) == 1


@pytest.mark.parametrize("any_server", ["valkey9"], indirect=True)
def test_workers_whose_clocks_disagree_do_not_throw_out_each_others_blocks(
    redis: connection.SyncRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.time
    for n, skew in enumerate((0, 7200, -7200)):
        monkeypatch.setattr(time, "time", lambda skew=skew: true() + skew)
        store = BlockStore(redis, CODEC, block_size=SIZE, ttl=3600)
        store.put([(HASHES[n], value(n))])
        assert store.longest_prefix(HASHES) == n + 1
        assert len(store.get(HASHES)) == n + 1


def test_every_key_has_a_ttl_and_reading_renews_it(store: BlockStore, redis: connection.SyncRedis) -> None:
    store.put([(HASHES[0], value(0))])
    assert 0 < redis.pttl(KEYS.index) <= 120_000
    redis.pexpire(KEYS.block(HASHES[0]), 1000)
    store.get(HASHES[:1])
    assert 50_000 < redis.pttl(KEYS.block(HASHES[0])) <= 60_000


def test_the_index_forgets_what_has_expired(redis: connection.SyncRedis) -> None:
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=0.05)
    store.put([(HASHES[i], value(i)) for i in range(3)])
    time.sleep(0.1)
    store.put([(HASHES[3], value(3))])
    assert redis.zcard(KEYS.index) == 1


def test_a_tail_opens_only_as_what_it_is(store: BlockStore) -> None:
    tail = memoryview(bytearray(HEADER_BYTES) + bytes(2 * TOKEN))
    name = prefix.tail_hash(HASHES[0], TOKENS[4:6])
    CODEC.seal(tail, name, 4, 6)
    store.put_tail("k", tail, 10)
    assert store.get_tail("k", name, 4, 6) == bytes(2 * TOKEN)
    assert store.get_tail("k", name, 4, 6) == bytes(2 * TOKEN)
    with pytest.raises(KVMiss):
        store.get_tail("k", prefix.tail_hash(HASHES[0], TOKENS[5:7]), 4, 6)
    store.drop_tail("k")
    with pytest.raises(KVMiss):
        store.get_tail("k", name, 4, 6)


def test_large_prefixes_go_in_bounded_batches(redis: connection.SyncRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdq.store.BATCH_BYTES", 2 * SIZE * TOKEN)
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=60)
    store.put([(HASHES[i], value(i)) for i in range(9)])
    asked: list[int] = []
    mget = redis.mget
    monkeypatch.setattr(redis, "mget", lambda names: asked.append(len(names)) or mget(names))
    assert [bytes(p) for p in store.get(HASHES)] == [payload(i) for i in range(9)]
    assert asked == [2, 2, 2, 2, 2]


def test_any_mix_of_put_delete_damage_and_read_never_gives_wrong_bytes(
    store: BlockStore, redis: connection.SyncRedis
) -> None:
    dice = random.Random(5)
    for _ in range(300):
        i = dice.randrange(len(HASHES))
        match dice.randrange(4):
            case 0:
                store.put([(HASHES[j], value(j)) for j in range(i, min(i + 3, len(HASHES)))])
            case 1:
                redis.delete(KEYS.block(HASHES[i]))
            case 2:
                redis.setrange(KEYS.block(HASHES[i]), dice.randrange(200), dice.randbytes(3))
            case 3:
                redis.zrem(KEYS.index, HASHES[i])
        found = store.get(HASHES[: store.longest_prefix(HASHES)])
        assert [bytes(p) for p in found] == [payload(j) for j in range(len(found))]
