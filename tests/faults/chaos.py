"""`python -m tests.faults.chaos --minutes 5 --seed 7`: everything goes wrong at once, and every request ends well.

Real processes on a real Valkey; clients that ask, leave, come back and cancel (chaos_clients.py); and faults of all
kinds at random (chaos_faults.py). Exit code 0 only if every accepted request ended exactly once, with the right text or
with the error it had coming, and the pool is at rest afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.faults import audit
from tests.faults.chaos_clients import Account, Asked, Case, Client, Requests
from tests.faults.chaos_faults import Chaos
from tests.faults.pool import Pool
from tests.hygiene import leaks

POISON = {"prefill": "#", "decode": "@"}
ATTEMPTS = 8  # more than by default: here it is not the request's fault that its workers die
REST_SECONDS = 30.0


def scripted_pool() -> Pool:
    """Steps of a few milliseconds, little KV memory, and in each stage a token that ends the process."""
    engines = {
        f"{stage}_engine": f"scripted:step_ms=5,load_ms=5,crash_on={ord(token)}" for stage, token in POISON.items()
    }
    return Pool(
        **engines, prefill_chunk_tokens=32, decode_max_batch=4, kv_memory="6KiB", max_model_len=512,
        max_attempts=ATTEMPTS, drain_seconds=0.5,
    )  # fmt: skip


@contextmanager
def pool_of(engine: str) -> Iterator[Pool]:
    with tempfile.TemporaryDirectory() as folder:
        pool = scripted_pool() if engine == "scripted" else torch_pool(Path(folder) / "tiny")
        try:
            yield pool
        finally:
            pool.close()


def torch_pool(folder: Path) -> Pool:
    """A tiny llama."""
    from tests.engine.tiny import save_tiny
    from tests.unit.small_models import write_tokenizer

    save_tiny("llama", folder, vocab_size=259, max_position_embeddings=512)
    return Pool(
        engine="torch", model=write_tokenizer(folder), served_model_name="scripted", dtype="float32", block_size=16,
        prefill_chunk_tokens=32, decode_max_batch=4, kv_memory="64MiB", max_attempts=ATTEMPTS, drain_seconds=0.5,
    )  # fmt: skip


async def references(pool: Pool, seed: int) -> dict[Case, str]:
    """Requests and the answers of the undisturbed pool, for a model that nobody can compute here."""
    found = {}
    draw = Requests(seed, ())
    async with pool.client() as client:
        for _ in range(24):
            asked = draw()
            handle = await client.submit(prompt=asked.prompt, **asked.sampling())  # type: ignore[arg-type]
            found[asked.prompt, asked.count, asked.seed] = (await handle.result(60)).text
    return found


async def run(options: argparse.Namespace, pool: Pool) -> bool:
    """The whole run; prints what came of it. True if all is well."""
    counts = {"gateway": 1, "prefill": options.prefill, "decode": options.decode}
    chaos, account = Chaos(pool, counts, options.seed), Account()
    expected, choose = computed, Requests(options.seed, tuple(POISON.values()))
    if options.engine == "torch":
        known = await references(pool, options.seed)
        expected, choose = lambda a: known[a.prompt, a.count, a.seed], Requests(options.seed, (), list(known))
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(options.minutes * 60, over.set)
    clients = [Client(pool, account, expected, choose, lambda: chaos.gateway).run(over) for _ in range(options.clients)]
    work = asyncio.gather(*clients)
    await chaos.run(over)
    while not work.done():  # what is still under way may hold a request that crashes its workers
        await chaos.mend()
        await asyncio.sleep(0.2)
    await work
    with suppress(TimeoutError):
        await pool.at_rest(REST_SECONDS)
    problems = [*chaos.problems, *leaks(pool.redis)]
    print(f"faults: {', '.join(f'{n} {name}' for name, n in sorted(chaos.done.items()))}")
    print("\n".join([*account.lines(), *problems]), flush=True)
    return account.good and not problems


def computed(asked: Asked) -> str:
    return audit.expected(asked.prompt.encode(), asked.count, asked.seed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.chaos", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--engine", choices=("scripted", "torch"), default="scripted")
    options = parser.parse_args(arguments)
    logging.getLogger("pdq").setLevel(logging.ERROR)  # the clients' own: outages are no news here
    print(f"seed {options.seed}, {options.minutes:g} minutes, {options.engine} engine", flush=True)
    with pool_of(options.engine) as pool:
        well = asyncio.run(run(options, pool))
        if not well:
            print(pool.programs.report())
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
