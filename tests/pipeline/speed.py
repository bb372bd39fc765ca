"""What the KV store costs, measured beside a raw socket and with a large index: `python -m tests.pipeline.speed`."""

from __future__ import annotations

import os
import statistics

from pdq import bulk, keys, prefix, process
from pdq.blocks import HEADER_BYTES, BlockCodec
from pdq.store import BlockStore
from tests.pipeline.test_bulk import RawSocket, seconds
from tests.servers import Server

SIZE, TOKEN_BYTES, BLOCKS = 32, 23_040, 31  # about 1,000 tokens of the built-in model
CODEC = BlockCodec(bytes(32), "bfloat16", "30x3x64+64", TOKEN_BYTES)


def chain(salt: str, count: int) -> list[bytes]:
    return prefix.chain(prefix.root(bytes(32), SIZE, salt), range(SIZE * count), SIZE)


def sealed(hashes: list[bytes], codec: BlockCodec = CODEC) -> list[tuple[bytes, memoryview]]:
    out = []
    for i, h in enumerate(hashes):
        value = memoryview(bytearray(HEADER_BYTES) + os.urandom(codec.payload_bytes(SIZE)))
        codec.seal(value, h, i * SIZE, (i + 1) * SIZE)
        out.append((h, value))
    return out


def bulk_path(server: Server, repeats: int = 15) -> dict[str, float]:
    """Bytes per second of the store as a share of the raw socket's, put and get; medians of alternating runs."""
    hashes = chain("a", BLOCKS)
    blocks = sealed(hashes)
    names = keys.BlockKeys(bytes(32))
    raw = RawSocket(server, [(names.block(h), value) for h, value in blocks])
    times: dict[str, list[float]] = {}
    with bulk.connect(server.url, 1, len(blocks[0][1])) as redis:
        store = BlockStore(redis, CODEC, block_size=SIZE, ttl=600)

        def put() -> None:
            store.put(blocks)

        def get() -> None:
            assert sum(1 for _ in store.get(hashes)) == BLOCKS

        for _ in range(repeats):
            for name, run in (("raw put", raw.put), ("put", put), ("raw get", raw.get), ("get", get)):
                times.setdefault(name, []).append(seconds(run))
    raw.close()
    medians = {name: statistics.median(found) for name, found in times.items()}
    total = sum(len(v) for _, v in blocks)
    for name, median in medians.items():
        print(f"{name:8} {total / median / 1e9:.2f} GB/s")
    return {name: medians["raw " + name] / medians[name] for name in ("put", "get")}


def with_an_index_of(server: Server, indexed: int, rounds: int = 200) -> dict[str, float]:
    """Milliseconds of a request's lookup, touch and put, and of a put that evicts, among `indexed` other blocks."""
    codec = BlockCodec(bytes([1]) * 32, "float32", "small", 8)
    index = keys.BlockKeys(codec.fingerprint).index
    with bulk.connect(server.url, 1, 1 << 20) as redis:
        redis.flushall()
        for at in range(0, indexed, 10_000):
            redis.zadd(index, {os.urandom(32): n for n in range(at, min(at + 10_000, indexed))})
        value = HEADER_BYTES + codec.payload_bytes(SIZE)
        free = BlockStore(redis, codec, block_size=SIZE, ttl=10**9)
        full = BlockStore(redis, codec, block_size=SIZE, ttl=10**9, budget=indexed * value)
        times: dict[str, list[float]] = {}
        for i in range(rounds):
            hashes = chain(f"{indexed} {i}", BLOCKS)
            blocks = sealed(hashes, codec)
            steps = (
                ("put", lambda b=blocks: free.put(b)),
                ("lookup", lambda h=hashes: free.longest_prefix(h)),
                ("touch", lambda h=hashes: free.touch(h)),
                ("evicting put", lambda b=blocks: full.put(b)),
            )
            for name, run in steps:
                times.setdefault(name, []).append(seconds(run))
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def main() -> None:
    process.prepare(threads=None)
    server = Server()
    try:
        print({name: f"{share:.0%}" for name, share in bulk_path(server).items()})
        for indexed in (1_000, 100_000, 1_000, 100_000):
            found = with_an_index_of(server, indexed)
            print(f"{indexed:7} blocks: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items()))
    finally:
        server.close()


if __name__ == "__main__":
    main()
