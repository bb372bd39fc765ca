"""What a request costs when the model costs nothing: `python -m tests.pipeline.null_engine`.

One Valkey, one prefill and one decode worker with the scripted engine, and this process as the client. Requests a
second with 1, 16 and 64 in flight, milliseconds from submit to the first event, the milliseconds of CPU that a request
takes of each process, and how often Redis reads from a socket for it (the round trips of all processes together). With
max_tokens 1 prefill ends a request alone; with 4 it goes through both stages. Linux only.

`--step-ms 25` measures the decode loop instead: 16 streams, and the share of a step that is not the forward.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from pdq import AsyncClient
from tests.faults.programs import Program, Programs
from tests.servers import Server

PROMPT = "a prompt without blocks"  # a token a byte, and less than --block-size


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. The times are of one request each: p50 and p99 in ms, CPU in ms by process."""

    in_flight: int
    max_tokens: int
    per_second: float
    first_p50: float
    first_p99: float
    reads: float
    cpu_ms: dict[str, float]

    def __str__(self) -> str:
        cpu = ", ".join(f"{name} {ms:.2f}" for name, ms in self.cpu_ms.items())
        return (
            f"{self.in_flight:3} in flight, {self.max_tokens} tokens: {self.per_second:6.0f} requests/s, first event "
            f"p50 {self.first_p50:.2f} p99 {self.first_p99:.2f} ms, {self.reads:.1f} reads, CPU ms: {cpu}"
        )


class Meter:
    """What the processes have used so far."""

    def __init__(self, server: Server, workers: list[Program]) -> None:
        self._redis = server.client()
        self._pids = {"client": os.getpid(), **{w.kind: w.pid for w in workers}}

    def read(self) -> tuple[int, dict[str, float]]:
        """Reads from sockets by the server, and CPU seconds by process."""
        info: dict[str, Any] = self._redis.info()  # type: ignore[assignment]
        used = {name: _cpu_seconds(pid) for name, pid in self._pids.items()}
        used["server"] = info["used_cpu_user"] + info["used_cpu_sys"]
        return info["total_reads_processed"], used


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def first_event(client: AsyncClient, prompt: str, max_tokens: int) -> float:
    """Seconds from submit to the first event; returns after the last one."""
    began = time.perf_counter()
    first = 0.0
    handle = await client.submit(prompt=prompt, max_tokens=max_tokens)
    async for _ in handle.stream():
        first = first or time.perf_counter() - began
    return first


async def requests(client: AsyncClient, meter: Meter, count: int, in_flight: int, max_tokens: int) -> Figures:
    """`count` requests, `in_flight` of them at any time."""
    firsts: list[float] = []

    async def lane(share: int) -> None:
        for _ in range(share):
            firsts.append(await first_event(client, f"{len(firsts)} {PROMPT}"[:31], max_tokens))

    reads, used = meter.read()
    began = time.perf_counter()
    await asyncio.gather(*(lane(count // in_flight) for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    reads_after, used_after = meter.read()
    done = len(firsts)
    return Figures(
        in_flight, max_tokens, done / seconds, median(firsts) * 1e3, quantiles(firsts, n=100)[98] * 1e3,
        (reads_after - reads) / done, {name: (used_after[name] - used[name]) / done * 1e3 for name in used},
    )  # fmt: skip


async def throughput(server: Server, workers: list[Program], runs: list[tuple[int, int, int]]) -> list[Figures]:
    """runs: requests, in flight, max_tokens; after a short one to warm up."""
    meter = Meter(server, workers)
    async with AsyncClient(redis_url=server.url) as client:
        await requests(client, meter, 64, 16, 4)
        return [await requests(client, meter, *run) for run in runs]


async def outside_forwards(server: Server, step_ms: float, streams: int = 16, tokens: int = 200) -> float:
    """The share of a decode step in which no forward runs, while `streams` answers are made."""
    async with AsyncClient(redis_url=server.url) as client:

        async def step() -> float:
            handle = await client.submit(prompt=PROMPT[:8], max_tokens=tokens)
            return (await handle.result()).timings.decode_ms / (tokens - 1)

        found = await asyncio.gather(*(step() for _ in range(streams)))
    return 1 - step_ms / median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600, help="of each run with 16 or 64 in flight")
    parser.add_argument("--step-ms", type=float, help="measure the decode loop with forwards of this length")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    server = Server()
    try:
        engine = "scripted" if options.step_ms is None else f"scripted:step_ms={options.step_ms}"
        with Programs(server, engine=engine) as programs:
            workers = [programs.start("prefill"), programs.start("decode")]
            programs.wait(*workers)
            if options.step_ms is not None:
                print(f"{asyncio.run(outside_forwards(server, options.step_ms)):.1%} of a step is outside the forward")
                return
            n = options.requests
            runs = [(n // 4, 1, 1), (n, 16, 1), (n, 64, 1), (n // 4, 1, 4), (n, 16, 4), (n, 64, 4)]
            found = asyncio.run(throughput(server, workers, runs))
        print(json.dumps([asdict(f) for f in found]) if options.json else "\n".join(map(str, found)))
    finally:
        server.close()


if __name__ == "__main__":
    main()
