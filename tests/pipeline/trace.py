"""A seeded trace of conversations through a pool: hits of the shared cache beside those of per-worker caches.

    python -m tests.pipeline.trace --conversations 200 --seed 1

Conversations open with one of a few system prompts, some far more often than others, and each turn carries all before
it. The shared figure is what a pool with two prefill workers answers; the other one is what two workers with a cache
of their own (unbounded, answers included) would hit with the same requests, each taken by either of them at random.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass

from pdq import prefix
from pdq.client import Result
from tests.pipeline.local import LocalPool
from tests.servers import Server

BLOCK = 16
ANSWER = 24  # tokens, one a byte


@dataclass
class Figures:
    """Tokens: of all prompts, and those of them found in the shared cache and in per-worker ones."""

    prompt: int = 0
    shared: int = 0
    per_worker: int = 0


def conversations(count: int, seed: int) -> list[list[str]]:
    """What the user says, turn by turn; the first turn opens with the system prompt."""
    dice = random.Random(seed)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randrange(2, 9))) for _ in range(300)]
    systems = [" ".join(dice.choices(words, k=dice.randrange(20, 60))) for _ in range(6)]
    weights = [1 / (i + 1) for i in range(len(systems))]
    out = []
    for _ in range(count):
        turns = [" ".join(dice.choices(words, k=dice.randrange(4, 20))) for _ in range(dice.randrange(1, 6))]
        turns[0] = dice.choices(systems, weights)[0] + " " + turns[0]
        out.append(turns)
    return out


class OwnCaches:
    """Unbounded caches of two workers."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._known: list[set[bytes]] = [set(), set()]

    def hits(self, prompt: bytes, answer: bytes) -> int:
        """Prompt tokens that the worker which takes the request has; it keeps the request's blocks."""
        known = self._dice.choice(self._known)
        chain = prefix.chain(bytes(32), list(prompt + answer[:-1]), BLOCK)
        usable = chain[: (len(prompt) - 1) // BLOCK]
        found = next((i for i, h in enumerate(usable) if h not in known), len(usable))
        known.update(chain)
        return found * BLOCK


async def replay(server: Server, trace: list[list[str]], seed: int, at_once: int = 4) -> Figures:
    figures, own = Figures(), OwnCaches(seed)
    gate = asyncio.Semaphore(at_once)
    async with LocalPool(server, prefill=2, block_size=BLOCK, kv_memory="64MiB", local_cache_bytes="0") as pool:

        async def ask(prompt: str) -> Result:
            async with gate:
                handle = await pool.client.submit(prompt=prompt, max_tokens=ANSWER, temperature=0)
                return await handle.result(30)

        async def talk(turns: list[str]) -> None:
            prompt = ""
            for turn in turns:
                prompt += turn + "\n"
                result = await ask(prompt)
                figures.prompt += result.usage.prompt_tokens
                figures.shared += result.usage.cached_tokens
                figures.per_worker += own.hits(prompt.encode(), result.text.encode())
                prompt += result.text

        await asyncio.gather(*map(talk, trace))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    server = Server()
    try:
        trace = conversations(options.conversations, options.seed)
        found = asyncio.run(replay(server, trace, options.seed))
    finally:
        server.close()
    print(
        f"{sum(map(len, trace))} requests, {found.prompt} prompt tokens: "
        f"shared cache {found.shared / found.prompt:.1%}, a cache per worker {found.per_worker / found.prompt:.1%}"
    )


if __name__ == "__main__":
    main()
