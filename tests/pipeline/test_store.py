"""The block store on every kind of server: prefixes, misses, lifetimes."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Iterator

import pytest

from pdq import bulk, connection, keys, prefix
from pdq.blocks import HEADER_BYTES, BlockCodec, KVMiss
from pdq.store import BlockStore
from tests.servers import Server

SIZE, TOKEN = 4, 32
FINGERPRINT = bytes([7] * 32)
TOKENS = list(range(40))
HASHES = prefix.chain(prefix.root(FINGERPRINT, SIZE), TOKENS, SIZE)
CODEC = BlockCodec(FINGERPRINT, "float32", "layout", TOKEN)
KEYS = keys.BlockKeys(FINGERPRINT)
VALUE = HEADER_BYTES + SIZE * TOKEN


def payload(i: int) -> bytes:
    return random.Random(i).randbytes(SIZE * TOKEN)


def value(i: int) -> memoryview:
    made = memoryview(bytearray(HEADER_BYTES) + payload(i))
    CODEC.seal(made, HASHES[i], i * SIZE, (i + 1) * SIZE)
    return made


@pytest.fixture
def redis(any_server: Server) -> Iterator[connection.SyncRedis]:
    with bulk.connect(any_server.url, 2, HEADER_BYTES + SIZE * TOKEN) as client:
        yield client


def read(store: BlockStore, hashes: list[bytes]) -> list[bytes]:
    """As a worker reads: fetch, then touch."""
    found = [bytes(p) for p in store.get(hashes)]
    store.touch(hashes[: len(found)])
    return found


@pytest.fixture
def store(redis: connection.SyncRedis) -> BlockStore:
    return BlockStore(redis, CODEC, block_size=SIZE, ttl=60)


def test_the_longest_prefix_is_found_and_read_back(store: BlockStore) -> None:
    assert store.longest_prefix(HASHES) == 0
    store.put([(HASHES[i], value(i)) for i in range(6)])
    assert store.longest_prefix(HASHES) == 6
    assert read(store, HASHES[:6]) == [payload(i) for i in range(6)]
    assert store.longest_prefix([]) == 0
    assert read(store, []) == []


def test_a_block_is_no_hit_without_those_before_it(store: BlockStore) -> None:
    store.put([(HASHES[i], value(i)) for i in (0, 1, 3)])
    assert store.longest_prefix(HASHES) == 2
    assert len(read(store, HASHES)) == 2


@pytest.mark.parametrize("gone", [0, 2, 5])
def test_a_missing_block_ends_the_prefix_and_leaves_the_index(
    store: BlockStore, redis: connection.SyncRedis, gone: int
) -> None:
    store.put([(HASHES[i], value(i)) for i in range(6)])
    redis.delete(KEYS.block(HASHES[gone]))
    assert len(read(store, HASHES[:6])) == gone
    assert store.longest_prefix(HASHES) == gone
    assert store.counters["miss_absent"] == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "other", "text", "pickle", "longer", "huge"])
def test_a_damaged_block_is_a_counted_miss(
    store: BlockStore, redis: connection.SyncRedis, any_server: Server, damage: str
) -> None:
    if damage == "huge" and any_server.kind == "fake":
        pytest.skip("fakeredis over a socket does not take values of some MiB")
    store.put([(HASHES[i], value(i)) for i in range(4)])
    good = bytes(value(2))
    bad = {"flip": good[:-1] + bytes([good[-1] ^ 4]), "truncate": good[:50], "other": bytes(value(1)), "text": b"hi"}
    bad |= {
        "pickle": pickle.dumps(list(range(50))),
        "longer": good + bytes(1),
        "huge": bytes(64 << 20 if damage == "huge" else 0),
    }
    redis.set(KEYS.block(HASHES[2]), bad[damage], keepttl=True)
    assert read(store, HASHES[:4]) == [payload(0), payload(1)]
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
        assert len(read(store, HASHES)) == n + 1


def test_every_key_has_a_ttl_and_reading_renews_it(store: BlockStore, redis: connection.SyncRedis) -> None:
    store.put([(HASHES[0], value(0))])
    assert 0 < redis.pttl(KEYS.index) <= 120_000
    redis.pexpire(KEYS.block(HASHES[0]), 1000)
    read(store, HASHES[:1])
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
    assert store.open_tail(store.fetch_tail("k"), name, 4, 6) == bytes(2 * TOKEN)
    assert store.open_tail(store.fetch_tail("k"), name, 4, 6) == bytes(2 * TOKEN)
    with pytest.raises(KVMiss):
        store.open_tail(store.fetch_tail("k"), prefix.tail_hash(HASHES[0], TOKENS[5:7]), 4, 6)
    store.drop_tail("k")
    with pytest.raises(KVMiss):
        store.open_tail(store.fetch_tail("k"), name, 4, 6)


def test_no_more_values_are_under_way_than_the_window_holds(
    redis: connection.SyncRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdq.bulk.WINDOW_BYTES", 3 * (HEADER_BYTES + SIZE * TOKEN))
    owed: list[int] = []
    receive = bulk._Line.receive
    monkeypatch.setattr(bulk._Line, "receive", lambda line: owed.append(line.owed) or receive(line))
    values, names = bulk.Values(redis, VALUE), [KEYS.block(h) for h in HASHES]
    assert values.put([(names[i], value(i)) for i in range(9)], 60_000) == 9
    assert list(values.get(names)) == [*(value(i) for i in range(9)), None]
    assert max(owed) == 3
    assert len(owed) == 9 + 10


def test_any_mix_of_put_delete_damage_and_read_never_gives_wrong_bytes(
    redis: connection.SyncRedis, any_server: Server
) -> None:
    dice = random.Random(5)
    rounds = 300 if any_server.kind != "fake" else 60  # slow over its socket
    kept = BlockStore(redis, CODEC, block_size=SIZE, ttl=60, budget=9 * VALUE, local=3 * VALUE)
    bare = BlockStore(redis, CODEC, block_size=SIZE, ttl=60)
    for _ in range(rounds):
        i = dice.randrange(len(HASHES))
        store = dice.choice((kept, bare))
        match dice.randrange(6):
            case 0:
                store.put([(HASHES[j], value(j)) for j in range(i, min(i + 3, len(HASHES)))], i)
            case 1:
                redis.delete(KEYS.block(HASHES[i]))
            case 2:
                redis.setrange(KEYS.block(HASHES[i]), dice.randrange(200), dice.randbytes(3))
            case 3:
                redis.zrem(KEYS.index, HASHES[i])
            case 4:
                redis.pexpire(KEYS.block(HASHES[i]), 1)
            case 5:
                store.unpin(HASHES[:i], store.pin(100))
        found = read(store, HASHES[: store.longest_prefix(HASHES)])
        assert found == [payload(j) for j in range(len(found))]
    redis.flushdb()  # damage done to a block that was gone has made a key of its own


def keys_left(redis: connection.SyncRedis) -> set[int]:
    return {i for i, h in enumerate(HASHES) if redis.exists(KEYS.block(h))}


def many(redis: connection.SyncRedis, blocks: int, **options: int) -> BlockStore:
    return BlockStore(redis, CODEC, block_size=SIZE, ttl=60, budget=blocks * VALUE, **options)


def test_over_its_budget_the_tail_of_the_least_used_chain_goes_first(redis: connection.SyncRedis) -> None:
    store = many(redis, 5)
    store.put([(HASHES[i], value(i)) for i in range(5)])
    other = prefix.chain(prefix.root(FINGERPRINT, SIZE, "other"), TOKENS, SIZE)
    store.put([(other[0], value(0)), (other[1], value(1))])
    assert keys_left(redis) == {0, 1, 2}
    assert store.longest_prefix(HASHES) == 3
    assert store.longest_prefix(other) == 2
    assert store.counters["evicted_blocks"] == 2
    assert redis.zcard(KEYS.index) == 5


def test_reading_makes_a_chain_the_last_to_go(redis: connection.SyncRedis) -> None:
    store = many(redis, 4)
    other = prefix.chain(prefix.root(FINGERPRINT, SIZE, "other"), TOKENS, SIZE)
    store.put([(HASHES[i], value(i)) for i in range(2)])
    time.sleep(0.005)
    store.put([(other[i], value(i)) for i in range(2)])
    time.sleep(0.005)
    read(store, HASHES[:2])
    store.put([(HASHES[i], value(i)) for i in range(2, 4)], 2)
    assert keys_left(redis) == {0, 1, 2, 3}
    assert store.longest_prefix(other) == 0


def test_what_a_living_request_needs_is_not_evicted_and_what_it_needed_is(redis: connection.SyncRedis) -> None:
    store = many(redis, 3)
    pin = store.pin(50)
    store.put([(HASHES[i], value(i)) for i in range(3)], 0, pin)
    assert redis.pttl(KEYS.block(HASHES[0])) > 49_000
    other = prefix.chain(prefix.root(FINGERPRINT, SIZE, "other"), TOKENS, SIZE)
    store.put([(other[i], value(i)) for i in range(2)])
    assert keys_left(redis) == {0, 1, 2}
    assert store.longest_prefix(other) == 0  # nothing else could go
    store.unpin(HASHES[:3], pin)
    time.sleep(0.005)
    store.put([(other[i], value(i)) for i in range(2)])
    assert keys_left(redis) == {0}
    assert store.longest_prefix(other) == 2


def test_the_end_of_one_request_leaves_the_longer_pin_of_another(redis: connection.SyncRedis) -> None:
    store = many(redis, 2)
    first, second = store.pin(20), store.pin(40)
    store.put([(HASHES[i], value(i)) for i in range(2)], 0, second)
    store.touch(HASHES[:2], first)
    store.unpin(HASHES[:2], first)
    assert redis.zscore(KEYS.index, HASHES[0]) == second
    store.unpin(HASHES[:2], second)
    assert redis.zscore(KEYS.index, HASHES[0]) < first


def test_a_pin_outlives_a_shorter_ttl(redis: connection.SyncRedis) -> None:
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=1)
    store.put([(HASHES[0], value(0))], 0, store.pin(30))
    assert redis.pttl(KEYS.block(HASHES[0])) > 29_000
    assert redis.pttl(KEYS.index) > 29_000
    assert store.longest_prefix(HASHES) == 1


def test_a_hot_block_costs_no_transfer_and_is_restored_where_redis_lost_it(redis: connection.SyncRedis) -> None:
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=60, local=10 * VALUE)
    BlockStore(redis, CODEC, block_size=SIZE, ttl=60).put([(HASHES[i], value(i)) for i in range(3)])
    assert len(read(store, HASHES[:3])) == 3
    redis.delete(KEYS.index, *(KEYS.block(h) for h in HASHES[:2]))
    assert store.longest_prefix(HASHES) == 3
    assert read(store, HASHES[:3]) == [payload(i) for i in range(3)]
    assert store.counters["hit_tokens_redis"] == store.counters["hit_tokens_local"] == 3 * SIZE
    assert store.counters["restored_blocks"] == 2
    assert len(read(BlockStore(redis, CODEC, block_size=SIZE, ttl=60), HASHES[:3])) == 3


def test_the_local_cache_keeps_to_its_size_and_keeps_heads(redis: connection.SyncRedis) -> None:
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=60, local=2 * VALUE)
    store.put([(HASHES[i], value(i)) for i in range(5)])
    redis.flushdb()
    assert store._local.size == 2 * VALUE
    assert store.longest_prefix(HASHES) == 2


def test_a_damaged_block_does_not_get_into_the_local_cache(redis: connection.SyncRedis) -> None:
    BlockStore(redis, CODEC, block_size=SIZE, ttl=60).put([(HASHES[0], value(0))])
    redis.setrange(KEYS.block(HASHES[0]), HEADER_BYTES + 3, b"x")
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=60, local=10 * VALUE)
    assert read(store, HASHES[:1]) == []
    assert store._local.size == 0


@pytest.mark.parametrize("any_server", ["valkey9", "redis7", "redis6"], indirect=True)
def test_without_memory_puts_are_dropped_and_counted(redis: connection.SyncRedis) -> None:
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=60)
    store.put([(HASHES[i], value(i)) for i in range(2)])
    redis.config_set("maxmemory", 1)
    assert store.put([(HASHES[i], value(i)) for i in range(2, 5)], 2) == 0
    assert not store.put_tail("k", value(5), 10)
    assert store.counters["dropped_blocks"] == 3
    assert store.counters["dropped_tails"] == 1
    redis.config_set("maxmemory", 0)
    assert read(store, HASHES[: store.longest_prefix(HASHES)]) == [payload(0), payload(1)]


def test_blocks_of_one_request_alone_are_in_no_index_and_go_when_dropped(redis: connection.SyncRedis) -> None:
    store = BlockStore(redis, CODEC, block_size=SIZE, ttl=60, local=10 * VALUE)
    assert store.put_private([(HASHES[i], value(i)) for i in range(3)], 5) == 3
    assert store.longest_prefix(HASHES) == 0
    assert 4000 < redis.pttl(KEYS.block(HASHES[0])) <= 5000
    assert [bytes(p) for p in store.get(HASHES[:3], indexed=False)] == [payload(i) for i in range(3)]
    assert store._local.size == 0
    store.drop(HASHES[:3])
    assert keys_left(redis) == set()
