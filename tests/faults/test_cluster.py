"""A pool on a Redis Cluster of three real nodes: where its keys lie, and what a moved slot or a lost node costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
from redis.crc import key_slot

from pdq import bulk, cache_admin, connection
from pdq.client import AsyncClient
from pdq.config import RedisSettings
from pdq.errors import ConfigError, RequestCancelled
from pdq.keys import BlockKeys, Keys
from tests.cluster import Cluster
from tests.faults.audit import expected
from tests.faults.pool import read, submit, text_of, until
from tests.hygiene import leaks
from tests.pipeline.local import LocalPool, LocalWorker
from tests.servers import Server, binary

pytestmark = pytest.mark.usefixtures("quick_drain")

KEYS = Keys("default")
PROMPT = "a prompt whose KV is in so many blocks that some of them lie on each of the three nodes"
BLOCKS = len(PROMPT) // 4
SLOW = "scripted:step_ms=5"


@pytest.fixture(scope="module")
def _cluster() -> Iterator[Cluster]:
    if binary("valkey9") is None:
        pytest.skip("no server program")
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def cluster(_cluster: Cluster) -> Iterator[Cluster]:
    _cluster.clear()
    yield _cluster
    for node in _cluster.masters:
        assert leaks(_cluster.at(node)) == []


def pool_on(cluster: Cluster, **options: object) -> LocalPool:
    return LocalPool(cluster, **{"local_cache_bytes": "0", **options})  # type: ignore[arg-type]


def hits(worker: LocalWorker) -> int:
    return worker.store.counters["hit_tokens_redis"]


def others(cluster: Cluster, key: str) -> list[Server]:
    return [node for node in cluster.masters if node is not cluster.owner(key)]


async def test_a_pool_has_its_control_keys_on_one_node_and_its_blocks_on_all(cluster: Cluster) -> None:
    async with pool_on(cluster) as pool:
        handle = await submit(pool.client, PROMPT, 20)
        assert text_of(await read(handle)) == expected(PROMPT.encode(), 20)
        control = {node for node, keys in cluster.keys("{pdq:default}").items() if keys}
        assert control == {cluster.owner(KEYS.home)}
        blocks = cluster.keys("pdq:kv:").values()
        assert all(blocks)
        index = next(key for keys in blocks for key in keys if key.endswith(":index"))
        await until(lambda: sum(map(len, cluster.keys("pdq:kv:").values())) == (len(PROMPT) + 19) // 4 + 1)
        assert cluster.at(cluster.owner(index)).zcard(index) == (len(PROMPT) + 19) // 4
        again = await (await submit(pool.client, PROMPT, 20)).result(20)
        assert again.text == expected(PROMPT.encode(), 20)
        assert again.usage.cached_tokens == (len(PROMPT) - 1) // 4 * 4
        await until(lambda: not any(cluster.keys("pdq:tail:").values()))


async def test_the_cache_commands_see_and_empty_all_nodes(cluster: Cluster) -> None:
    async with pool_on(cluster) as pool:
        await (await submit(pool.client, PROMPT, 20)).result(20)
        blocks = (len(PROMPT) + 19) // 4
        await until(lambda: sum(map(len, cluster.keys("pdq:kv:").values())) == blocks + 1)
        settings = RedisSettings(redis_url=cluster.url)
        (model,) = (await asyncio.to_thread(cache_admin.stats, settings)).models
        assert (model.blocks, model.indexed) == (blocks, blocks)
        assert await asyncio.to_thread(cache_admin.clear, settings) == blocks
        assert {key for keys in cluster.keys("pdq:kv:").values() for key in keys} == {f"pdq:kv:{model.model}:epoch"}
        assert (await (await submit(pool.client, PROMPT, 20)).result(20)).usage.cached_tokens == 0


async def test_a_cancel_reaches_what_is_decoded(cluster: Cluster) -> None:
    async with pool_on(cluster, decode_engine=SLOW) as pool:
        handle = await submit(pool.client, PROMPT, 2000)
        events = handle.stream()
        await anext(events)
        assert await handle.cancel()
        with pytest.raises(RequestCancelled):
            async for _ in events:
                pass
        await until(lambda: not any(cluster.keys("pdq:tail:").values()))


async def test_the_slot_of_a_pool_moves_under_a_running_stream(cluster: Cluster) -> None:
    slot = key_slot(KEYS.home.encode())
    async with pool_on(cluster, decode_engine=SLOW) as pool:
        handle = await submit(pool.client, PROMPT, 300)
        reader = asyncio.create_task(read(handle))
        for _ in range(2):
            tokens = (await handle.status()).tokens
            await until(lambda tokens=tokens: stream_length(cluster, handle.id) > tokens)
            source = cluster.owner(KEYS.home)
            await asyncio.to_thread(cluster.move, slot, slot, source, others(cluster, KEYS.home)[0])
            assert not cluster.at(source).keys("{pdq:default}*")
        events = await reader
        assert text_of(events) == expected(PROMPT.encode(), 300)
        assert (await handle.status()).attempt == 2  # prefill's and decode's: no job was lost on the way


def stream_length(cluster: Cluster, request_id: str) -> int:
    return int(cluster.at(cluster.owner(KEYS.home)).hget(KEYS.request(request_id), "pos") or 0)


async def test_blocks_that_moved_are_misses_once_and_then_found_where_they_are(cluster: Cluster) -> None:
    async with pool_on(cluster) as pool:
        right = expected(PROMPT.encode(), 20)
        assert (await (await submit(pool.client, PROMPT, 20)).result(20)).text == right
        source = others(cluster, KEYS.home)[0]
        first, last = cluster.range_of(source)
        await asyncio.to_thread(cluster.move, first, (first + last) // 2, source, cluster.owner(KEYS.home))
        cached = []
        for _ in range(3):
            result = await (await submit(pool.client, PROMPT, 20)).result(20)
            assert result.text == right
            cached.append(result.usage.cached_tokens)
        assert cached[0] < cached[-1] == (len(PROMPT) - 1) // 4 * 4


def test_values_on_three_nodes_come_in_the_order_they_are_asked_for(cluster: Cluster) -> None:
    dice, names = random.Random(3), BlockKeys(bytes(32))
    values = {names.block(dice.randbytes(32)): dice.randbytes(dice.choice((10, 30_000))) for _ in range(90)}
    server = bulk.connect(cluster.url, 2, 30_000)
    line = bulk.Values(server, 10_000_000 // 7)
    assert line.put(list(values.items()), 60_000) == 90
    assert all(len(keys) > 10 for keys in cluster.keys("pdq:kv:").values())
    gone = set(dice.sample(list(values), 20))
    line.run(*(("UNLINK", name) for name in gone))
    order = dice.sample(list(values), 90)
    assert list(line.get(order)) == [None if name in gone else values[name] for name in order]
    assert line.run(*(("STRLEN", name) for name in order)) == [0 if n in gone else len(values[n]) for n in order]
    server.close()


async def test_a_pool_outlives_the_failover_of_its_own_node(cluster: Cluster) -> None:
    old = cluster.owner(KEYS.home)
    replica = await asyncio.to_thread(cluster.replica_of, old)
    async with pool_on(cluster, decode_engine=SLOW) as pool:
        handle = await submit(pool.client, PROMPT, 300)
        reader = asyncio.create_task(read(handle))
        await until(lambda: stream_length(cluster, handle.id) > 9)
        cluster.at(replica).execute_command("CLUSTER FAILOVER")
        await until(lambda: cluster.owner(KEYS.home) is replica)
        old.kill()
        assert text_of(await reader) == expected(PROMPT.encode(), 300)
        assert cluster.at(replica).hget(KEYS.request(handle.id), "attempt") == b"2"


async def test_a_node_that_dies_with_its_blocks_costs_no_request(cluster: Cluster) -> None:
    async with pool_on(cluster) as pool:
        right = expected(PROMPT.encode(), 20)
        assert (await (await submit(pool.client, PROMPT, 20)).result(20)).text == right
        others(cluster, KEYS.home)[0].kill()
        for count in (20, 21, 22):
            result = await (await submit(pool.client, PROMPT, count)).result(20)
            assert result.text == expected(PROMPT.encode(), count)
            assert result.usage.cached_tokens < (len(PROMPT) - 1) // 4 * 4
        other = "another prompt, whose blocks have in part no node to go to"
        assert (await (await submit(pool.client, other, 20)).result(20)).text == expected(other.encode(), 20)


@pytest.mark.parametrize("role", ["queue", "kv"])
async def test_a_url_of_the_wrong_kind_is_refused_and_the_right_one_named(
    cluster: Cluster, server: Server, role: str
) -> None:
    wrong = {
        cluster.url.replace("+cluster", ""): r"write redis\+cluster://",
        server.url.replace("redis", "redis+cluster"): "write redis://",
    }
    for url, advice in wrong.items():
        async with connection.command(url, home=KEYS.home) as client:
            with pytest.raises(ConfigError, match=advice):
                await connection.check_server(client, role)


async def test_a_worker_whose_blocks_url_names_a_node_ends(cluster: Cluster, server: Server) -> None:
    worker = LocalWorker("prefill", server, kv_url=cluster.url.replace("+cluster", ""))
    with pytest.raises(ConfigError, match=r"kv_url: .* write redis\+cluster://"):
        await asyncio.wait_for(worker.task, 10)
    for client in (worker.worker._redis, worker.worker._waiting, worker.worker._hints):
        await client.aclose()


async def test_the_sdk_names_the_scheme_a_cluster_needs(cluster: Cluster) -> None:
    node = others(cluster, KEYS.home)[0]
    async with AsyncClient(RedisSettings(redis_url=node.url)) as client:
        with pytest.raises(ConfigError, match=r"write redis\+cluster://"):
            await submit(client, "to a node", 1)
