"""What goes wrong in a chaos run: one function a fault, chosen at random, several at once. Puts right what it broke.

Two of each kind of worker serve; a fault takes at most one of a kind away for good and starts another in its place.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress

import redis

from pdq.blocks import HEADER_BYTES
from pdq.keys import GROUP
from pdq.messages import LANES
from tests.faults.pool import LEASE, Pool
from tests.faults.programs import Program

POISONED = 137  # exit code of a scripted engine that met its crash_on

STAGES = ("prefill", "decode")
# In one go: a request whose KV is lost, made again and lost again may end with an error.
LOSE = "for _, name in ipairs(ARGV) do redis.call('DEL', name) end"
DAMAGE = f"""
for _, name in ipairs(ARGV) do
  if redis.call('EXISTS', name) == 1 then redis.call('SETRANGE', name, {HEADER_BYTES + 1}, '?') end
end"""


class Busy(Exception):
    """What the fault would happen to is in trouble already."""


class Chaos:
    """The programs that serve, and the faults done to them. problems: what no fault excuses, in words."""

    def __init__(self, pool: Pool, counts: dict[str, int], seed: int) -> None:
        self.pool = pool
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []
        self._fleet = {kind: [pool.start(kind) for _ in range(n)] for kind, n in counts.items()}
        pool.programs.wait(*(p for group in self._fleet.values() for p in group))
        self._up = {p for group in self._fleet.values() for p in group}  # those that have begun to serve
        self._away: set[Program] = set()  # frozen or draining
        self._redis_away = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def gateway(self) -> str:
        return self.random.choice(self._fleet["gateway"]).url

    async def run(self, calm: asyncio.Event) -> None:
        """Break things until `calm` is set, and have everything whole again on return."""
        faults: list[Callable[[], Awaitable[None]]] = [
            *[self.kill] * 3, *[self.freeze] * 3, *[self.drain] * 3, self.kill_gateway, self.kill_redis,
            self.freeze_redis, self.kill_clients, self.flush_scripts, self.drop_group, self.lose_kv, self.damage_kv,
        ]  # fmt: skip
        while not calm.is_set():
            fault = self.random.choice(faults)
            task = asyncio.create_task(self._do(fault))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            await asyncio.gather(self.mend(), asyncio.sleep(self.random.uniform(0.1, 0.9)))
        await asyncio.gather(*self._tasks)
        await self.mend()

    async def _do(self, fault: Callable[[], Awaitable[None]]) -> None:
        try:
            await fault()
            self.done[fault.__name__] += 1  # type: ignore[attr-defined]
        except (Busy, redis.RedisError):  # the next fault comes soon
            self.done["missed"] += 1

    async def mend(self) -> None:
        """Start anew what has crashed by itself, as an orchestrator would, and see what has come up."""
        for kind, group in self._fleet.items():
            for i, program in enumerate(group):
                if program.poll() is not None and program not in self._away:
                    self.done["restarted"] += 1
                    group[i] = self.pool.start(kind)
        with suppress(redis.RedisError):
            for program in {p for group in self._fleet.values() for p in group} - self._up:
                if await asyncio.to_thread(self.pool.programs.is_up, program):
                    self._up.add(program)

    @contextmanager
    def _victim(self, kind: str) -> Iterator[Program]:
        """A serving program, which no other fault takes meanwhile."""
        free = [p for p in self._fleet[kind] if p in self._up and p not in self._away]
        if not free:
            raise Busy
        program = self.random.choice(free)
        self._away.add(program)
        try:
            yield program
        finally:
            self._away.discard(program)

    def _replace(self, program: Program) -> None:
        group = self._fleet[program.kind]
        if program in group:
            group[group.index(program)] = self.pool.start(program.kind)

    async def kill(self, kind: str = "") -> None:
        with self._victim(kind or self.random.choice(STAGES)) as program:
            program.kill()
            await asyncio.to_thread(program.wait)
            await asyncio.sleep(self.random.uniform(0, LEASE))
            self._replace(program)

    async def kill_gateway(self) -> None:
        await self.kill("gateway")

    async def freeze(self) -> None:
        """Past the lease, mostly; then it wakes up and goes on."""
        with self._victim(self.random.choice(STAGES)) as program:
            program.freeze()
            await asyncio.sleep(self.random.uniform(0.5, 2.5) * LEASE)
            program.thaw()

    async def drain(self) -> None:
        """SIGTERM; another starts at once."""
        with self._victim(self.random.choice(STAGES)) as program:
            program.terminate()
            self._replace(program)
            code = await asyncio.to_thread(program.wait)
            if code not in (0, POISONED):
                self.problems.append(f"{program.name} drained with exit code {code}")

    async def kill_redis(self) -> None:
        """kill -9, and a start from the append-only file, to which each write went before its answer."""
        if self._redis_away:
            raise Busy
        self._redis_away = True
        self.pool.server.kill()
        await asyncio.sleep(self.random.uniform(0, LEASE))
        await asyncio.to_thread(self.pool.server.start)
        self._redis_away = False

    async def freeze_redis(self) -> None:
        if self._redis_away:
            raise Busy
        self._redis_away = True
        self.pool.server.freeze()
        await asyncio.sleep(self.random.uniform(0.3, 1.5) * LEASE)
        self.pool.server.freeze(False)
        self._redis_away = False

    async def kill_clients(self) -> None:
        """Every connection, those that wait in a blocking read included."""
        await self._redis(lambda r: r.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"))

    async def flush_scripts(self) -> None:
        await self._redis(lambda r: r.script_flush())

    async def drop_group(self) -> None:
        """With it go all pending lists: what runs runs on, and is handed out again."""
        keys = self.pool.keys
        stream = self.random.choice([*map(keys.prefill, LANES), keys.decode])
        await self._redis(lambda r: r.xgroup_destroy(stream, GROUP) if r.exists(stream) else None)

    async def lose_kv(self) -> None:
        """Delete a part of all blocks and tails, as eviction does."""
        await self._redis(lambda r: r.eval(LOSE, 0, *self._some_kv(r)))

    async def damage_kv(self) -> None:
        await self._redis(lambda r: r.eval(DAMAGE, 0, *self._some_kv(r)))

    def _some_kv(self, client: redis.Redis) -> list[bytes]:
        """Not while a request is on its second way through prefill: losing KV twice is allowed to end it."""
        for name in client.scan_iter(self.pool.keys.request("*"), count=1000):
            state, requeues = client.hmget(name, "state", "requeues")
            if state != b"done" and requeues is not None:
                return []
        names = [n for pattern in ("pdq:kv:*", "pdq:tail:*") for n in client.scan_iter(pattern, count=1000)]
        return [n for n in sorted(names) if not n.endswith(b":index") and self.random.random() < 0.3]

    async def _redis(self, call: Callable[[redis.Redis], object]) -> None:
        def connected() -> None:
            with self.pool.server.client() as client:
                call(client)

        await asyncio.to_thread(connected)
