"""TTFT of a long shared prefix: cold, warm, on another prefill worker, and after all workers were restarted.

    python -m tests.pipeline.warm

Real programs and the built-in model; 1,900 shared tokens and 40 of each request's own, over the gateway. The ratio is
to the median of the cold figures in the same run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time

import aiohttp

from tests.faults.programs import Program, Programs
from tests.servers import Server

SHARED, OWN, REPEATS = 1900, 40, 5


async def ttft(gateway: Program, tokens: list[int]) -> float:
    """Milliseconds from the request to its first content chunk."""
    body = {"prompt": tokens, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.perf_counter()
    first = 0.0
    async with aiohttp.ClientSession() as session, session.post(f"{gateway.url}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not first and line.startswith(b"data: {"):
                first = (time.perf_counter() - began) * 1e3
    return first


class Measurement:
    """The pool, and prompts of which no two share more than they should."""

    def __init__(self, server: Server) -> None:
        self.programs = Programs(server, max_model_len=4096, kv_memory="2GiB", threads=1)
        self._dice = random.Random(time.time_ns())
        self.gateway = self.programs.start("gateway")
        self.prefill = self.programs.start("prefill")
        self.decode = self.programs.start("decode")
        self.programs.wait(self.gateway, self.prefill, self.decode, seconds=120)

    def words(self, count: int) -> list[int]:
        return [self._dice.randrange(1000, 40_000) for _ in range(count)]

    async def cold(self) -> list[float]:
        return [await ttft(self.gateway, self.words(SHARED + OWN)) for _ in range(3)]

    async def warm(self, shared: list[int]) -> list[float]:
        return [await ttft(self.gateway, shared + self.words(OWN)) for _ in range(REPEATS)]

    def replace_prefill(self) -> None:
        second = self.programs.start("prefill")
        self.programs.wait(second, seconds=120)
        self.prefill.end()
        self.prefill = second

    def restart(self) -> None:
        self.prefill.end()
        self.decode.end()
        self.prefill, self.decode = self.programs.start("prefill"), self.programs.start("decode")
        self.programs.wait(self.prefill, self.decode, seconds=120)


async def measure(server: Server) -> dict[str, list[float]]:
    it = Measurement(server)
    try:
        await ttft(it.gateway, it.words(300))  # the first request of a process pays for its start
        shared = it.words(SHARED)
        found = {"cold": await it.cold()}
        await ttft(it.gateway, shared + it.words(OWN))
        found["warm, the same worker"] = await it.warm(shared)
        it.replace_prefill()
        await ttft(it.gateway, it.words(300))
        found["warm, a second prefill worker"] = await it.warm(shared)
        it.restart()
        await ttft(it.gateway, it.words(300))
        found["warm, after all workers restarted"] = await it.warm(shared)
        return found
    finally:
        it.programs.close()


def main() -> None:
    server = Server()
    try:
        found = asyncio.run(measure(server))
    finally:
        server.close()
    cold = statistics.median(found["cold"])
    for name, times in found.items():
        first, median = times[0], statistics.median(times)
        print(f"{name:36} first {first:7.1f} ms, median {median:7.1f} ms: 1/{cold / median:.1f} of cold")


if __name__ == "__main__":
    main()
