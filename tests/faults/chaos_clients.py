"""The clients of a chaos run, and the account of what became of their requests.

Each client submits one request after another. Requests differ in what their client does (read on, leave and come back,
cancel, ask through the gateway), in their deadline, and a few are poison: they end the process that computes them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import redis

from pdq.client import AsyncClient
from pdq.errors import DeadlineExceeded, PdqError, QueueFull, RequestCancelled, RequestFailed, Unavailable
from pdq.messages import Event
from tests.faults import audit, http_client
from tests.faults.pool import Pool

TIMEOUT = 90.0  # deadline of a request that nobody means to miss it
HANG = 20.0  # seconds after its deadline at which a request without an end is hung
POISON_SECONDS = 30.0  # between two poisoned requests
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(slots=True)
class Asked:
    """A request, what its client does, and how it may end. may_fail: the error that is as good as an answer."""

    kind: str
    id: str
    prompt: str
    count: int
    seed: int
    timeout: float = TIMEOUT
    may_fail: type[PdqError] | None = None
    tokens: int = 0  # seen
    text: str = ""
    leaves: list[int] = field(default_factory=list)  # after so many tokens, to come back

    def sampling(self) -> dict[str, object]:
        return {"max_tokens": self.count, "temperature": 1.0 if self.seed else 0.0, "seed": self.seed}


Expected = Callable[[Asked], str]
Case = tuple[str, int, int]  # prompt, count, seed


class Account:
    """What was promised, and what came of it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(("accepted", "ended_once"), 0))
        self.kinds: Counter[str] = Counter()
        self.bad: dict[str, list[str]] = {"lost": [], "repeated": [], "wrong": [], "hung": []}
        self.slowest = 0.0

    def note(self, verdict: str, asked: Asked, why: object) -> None:
        self.bad[verdict].append(f"{asked.kind} {asked.id}: {why}")

    @property
    def good(self) -> bool:
        return self.counts["accepted"] == self.counts["ended_once"] > 0 and not any(self.bad.values())

    def lines(self) -> list[str]:
        ended, bad = self.counts["ended_once"], " ".join(f" {k} {len(v)}" for k, v in self.bad.items())
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kinds.items()))
        return [
            f"accepted {self.counts['accepted']}  ended once {ended} {bad}",
            f"requests: {kinds}; slowest {self.slowest:.1f} s",
            *(f"{k}: {line}" for k, lines in self.bad.items() for line in lines[:10]),
        ]


class Client:
    """One client. gateway: the base URL to use now. expected: the right text of a request."""

    def __init__(
        self, pool: Pool, account: Account, expected: Expected, choose: Callable[[], Asked], gateway: Callable[[], str]
    ) -> None:
        self._pool = pool
        self._account = account
        self._expected = expected
        self._choose = choose
        self._gateway = gateway

    async def run(self, done: asyncio.Event) -> None:
        async with self._pool.client() as client, aiohttp.ClientSession() as http:
            while not done.is_set():
                await self._one(client, http, self._choose(), done)

    async def _one(self, client: AsyncClient, http: aiohttp.ClientSession, asked: Asked, done: asyncio.Event) -> None:
        account, started = self._account, time.monotonic()
        if asked.kind == "gateway":
            account.counts["accepted"] += 1  # a client with a key asks until it has the answer
            ask = self._over_http(http, asked)
        elif await self._accepted(client, asked, done):
            account.counts["accepted"] += 1
            ask = self._over_redis(client, asked)
        else:
            return
        account.kinds[asked.kind] += 1
        try:
            async with asyncio.timeout(asked.timeout + HANG):
                await ask
        except TimeoutError:
            account.note("hung", asked, await self._raw(asked))
            return
        account.slowest = max(account.slowest, time.monotonic() - started)
        self._judge(asked, await self._raw(asked))

    async def _accepted(self, client: AsyncClient, asked: Asked, done: asyncio.Event) -> bool:
        """Submit until Redis has it; the id makes that harmless. False if the run ended before."""
        while True:
            with suppress(Unavailable, QueueFull):
                await client.submit(
                    prompt=asked.prompt, id=asked.id, timeout=asked.timeout, **asked.sampling()  # type: ignore[arg-type]
                )  # fmt: skip
                return True
            if done.is_set():
                return False
            await asyncio.sleep(0.1)

    async def _over_redis(self, client: AsyncClient, asked: Asked) -> None:
        cancelling = asyncio.create_task(self._cancel(client, asked)) if asked.kind == "cancelled" else None
        while True:
            try:
                if await self._read(client, asked):
                    break
            except Unavailable:
                await asyncio.sleep(0.1)
            except PdqError as e:
                if asked.may_fail is None or not isinstance(e, asked.may_fail):
                    self._account.note("lost", asked, f"{type(e).__name__}: {e}")
                break
        if cancelling is not None:
            await cancelling

    async def _read(self, client: AsyncClient, asked: Asked) -> bool:
        """Read on from where the client stands; False if it leaves before the end."""
        stream = client.attach(asked.id).stream(asked.tokens)
        try:
            async for event in stream:
                self._take(asked, event)
                if event.terminal:
                    return True
                if asked.leaves and asked.tokens >= asked.leaves[0]:
                    asked.leaves.pop(0)
                    break
        finally:
            await stream.aclose()
        await asyncio.sleep(0.2)
        return False

    def _take(self, asked: Asked, event: Event) -> None:
        if event.index != asked.tokens:
            self._account.note("repeated", asked, f"an event at {event.index} after {asked.tokens} tokens")
        asked.tokens += len(event.token_ids)
        asked.text += event.text

    @staticmethod
    async def _cancel(client: AsyncClient, asked: Asked) -> None:
        await asyncio.sleep(asked.timeout / TIMEOUT * random.Random(asked.id).uniform(0, 2))
        while True:
            with suppress(Unavailable):
                await client.cancel(asked.id)
                return
            await asyncio.sleep(0.1)

    async def _over_http(self, http: aiohttp.ClientSession, asked: Asked) -> None:
        """Ask again under the same key while the stream breaks off or the gateway has no Redis."""
        key, asked.id = asked.id, http_client.request_id(asked.id)
        while True:
            with suppress(aiohttp.ClientError, ConnectionError):
                try:
                    answer = await http_client.stream(
                        http, self._gateway(), key, prompt=asked.prompt, **asked.sampling()
                    )
                    asked.text = answer[1]
                except http_client.Ended as e:
                    self._account.note("lost", asked, e)
                return
            await asyncio.sleep(0.2)

    async def _raw(self, asked: Asked) -> audit.Reply:
        """The reply as it stands in Redis, once Redis is there."""

        def look() -> audit.Reply:
            with self._pool.server.client() as client:
                return audit.reply(client, self._pool.keys, asked.id)

        while True:
            with suppress(redis.RedisError):
                return await asyncio.to_thread(look)
            await asyncio.sleep(0.1)

    def _judge(self, asked: Asked, reply: audit.Reply) -> None:
        note, right = self._account.note, self._expected(asked)
        for fault in reply.faults:
            note("repeated", asked, fault)
        if reply.end is None:
            note("lost", asked, "no terminal event")
            return
        if not reply.faults:
            self._account.counts["ended_once"] += 1
        if reply.end.error is None and (reply.text, asked.text) != (right, right):
            note("wrong", asked, f"{asked.text!r} was read of {reply.text!r}, {right!r} is right")
        elif not right.startswith(reply.text) or not reply.text.startswith(asked.text):
            note("wrong", asked, f"{asked.text!r} was read of {reply.text!r}, no beginning of {right!r}")


class Requests:
    """Chooses requests at random, the same ones for the same seed.

    poison: characters that end a worker. cases: to choose from; default: any.
    """

    def __init__(self, seed: int, poison: tuple[str, ...], cases: list[Case] | None = None) -> None:
        self._random = random.Random(seed)
        self._poison = poison
        self._cases = cases
        self._numbers = 0
        self._poison_at = 0.0

    def __call__(self) -> Asked:
        rnd, self._numbers = self._random, self._numbers + 1
        prompt, count, seed = rnd.choice(self._cases) if self._cases else self._case()
        asked = Asked(
            kind=rnd.choices(("plain", "returning", "cancelled", "late", "gateway"), (8, 3, 2, 1, 3))[0],
            id=f"chaos-{self._numbers}-{rnd.getrandbits(32):08x}", prompt=prompt,
            count=count, seed=seed,
        )  # fmt: skip
        if asked.kind == "returning":
            asked.leaves = sorted(rnd.randint(1, asked.count) for _ in range(3))
        elif asked.kind == "cancelled":
            asked.may_fail = RequestCancelled
        elif asked.kind == "late":
            asked.timeout, asked.may_fail = rnd.uniform(0.2, 2.0), DeadlineExceeded
        elif self._poison and time.monotonic() > self._poison_at:
            self._poison_at = time.monotonic() + POISON_SECONDS
            asked.kind, asked.may_fail = "poison", RequestFailed
            asked.prompt += rnd.choice(self._poison)
        return asked

    def _case(self) -> Case:
        """Some begin alike, so that blocks are shared."""
        rnd = self._random
        common = "the same beginning of many prompts, again and again " * 2
        prompt = common[: rnd.choice((0, 0, 16, 50, 90))] + "".join(rnd.choices(LETTERS, k=rnd.randint(1, 60)))
        return prompt, rnd.randint(1, 60), rnd.choice((0, rnd.randint(1, 1000)))
