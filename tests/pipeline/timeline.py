"""When a prefill worker computes, and when it stores: `python -m tests.pipeline.timeline`.

One prompt of the built-in model through the prefill stage. Each line is one piece of work with its start and end, in ms
since the first forward: the put of chunk i lies within the forward of chunk i+1.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from pdq import kv_transfer
from pdq.engine.model import load_model
from pdq.engine.runner import TorchEngine
from pdq.models import find_model
from tests.pipeline.local import LocalPool
from tests.servers import Server

TOKENS, CHUNK = 1000, 256


def engine() -> TorchEngine:
    model = load_model(find_model("smollm2-135m-instruct").folder, dtype="bfloat16", device="cpu")
    return TorchEngine(
        model, fingerprint=bytes(32), dtype="bfloat16", max_model_len=4096, eos_ids=frozenset(),
        kv_memory_bytes=1 << 30, threads=1,
    )  # fmt: skip


async def timeline(server: Server) -> list[tuple[str, float, float]]:
    """(what, start, end) of the second of two prompts, in ms since its first forward."""
    done: list[tuple[str, float, float]] = []

    def timed(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            done.append((what, began, time.perf_counter()))
            return result

        return run

    def timed_task(what: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        @wraps(call)
        async def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = await call(*args)
            done.append((what, began, time.perf_counter()))
            return result

        return run

    it = engine()
    it.forward = timed("forward", it.forward)  # type: ignore[method-assign]
    async with LocalPool(server, prefill=0, decode=0) as pool:
        worker = pool.add("prefill", engine=lambda: it, chunk_tokens=CHUNK, block_size=32, kv_memory="1GiB")
        transfer: kv_transfer.KVTransfer = worker.stage._parts.transfer
        transfer.publish = timed_task("put", transfer.publish)  # type: ignore[method-assign]
        transfer.publish_tail = timed_task("tail", transfer.publish_tail)  # type: ignore[method-assign]
        for first in (1000, 3000):
            done.clear()
            handle = await pool.client.submit(token_ids=range(first, first + TOKENS), max_tokens=8, temperature=0)
            while (await handle.status()).stage != "decode":
                await asyncio.sleep(0.005)
            await handle.cancel()
    zero = min(began for _, began, _ in done)
    return [
        (what, (began - zero) * 1e3, (ended - zero) * 1e3) for what, began, ended in sorted(done, key=lambda d: d[1])
    ]


def main() -> None:
    server = Server()
    try:
        found = asyncio.run(timeline(server))
    finally:
        server.close()
    for what, began, ended in found:
        print(f"{what:8} {began:7.1f} to {ended:7.1f} ms ({ended - began:.1f})")
    computing = sum(ended - began for what, began, ended in found if what == "forward")
    last = max(ended for what, _, ended in found if what == "forward")
    print(
        f"{TOKENS} tokens: forwards {computing:.0f} ms; after the last one {found[-1][2] - last:.1f} ms to the handoff"
    )


if __name__ == "__main__":
    main()
