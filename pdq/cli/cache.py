"""`pdq cache stats` and `pdq cache clear`: the work is in pdq.cache_admin, here it is shown."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer

from pdq.cache_admin import CacheStats, clear, stats
from pdq.config import RedisSettings

app = typer.Typer()
RedisUrl = Annotated[str | None, typer.Option(help="Redis of the queues. (PDQ_REDIS_URL)", show_default=False)]
KvUrl = Annotated[
    str | None, typer.Option(help="Redis of the KV blocks; default: --redis-url. (PDQ_KV_URL)", show_default=False)
]
Pool = Annotated[str | None, typer.Option(help="Pool whose workers are asked. (PDQ_POOL)", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="As one JSON object.")]


@app.callback(invoke_without_command=True)
def _cache(context: typer.Context) -> None:
    """Look at the shared KV cache, or empty it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command("stats")
def show(redis_url: RedisUrl = None, kv_url: KvUrl = None, pool: Pool = None, as_json: Json = False) -> int:
    """What the KV store holds, by model, and what the pool's workers found in it."""
    found = stats(RedisSettings.load(redis_url=redis_url, kv_url=kv_url, pool=pool))
    typer.echo(json.dumps(found.plain() | {"hit_ratio": found.hit_ratio}) if as_json else _text(found))
    return 0


@app.command("clear")
def empty(
    redis_url: RedisUrl = None,
    kv_url: KvUrl = None,
    model: Annotated[str | None, typer.Option(help="Only this one, as named by stats.", show_default=False)] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Also what running requests need.")] = False,
    as_json: Json = False,
) -> int:
    """Delete KV blocks; running requests are not harmed."""
    deleted = clear(RedisSettings.load(redis_url=redis_url, kv_url=kv_url), model, pinned=pinned)
    typer.echo(json.dumps({"deleted_blocks": deleted}) if as_json else f"deleted {deleted} blocks")
    return 0


def _text(found: CacheStats) -> str:
    limit = _bytes(found.max_memory) if found.max_memory else "no limit"
    lines = [f"Redis uses {_bytes(found.used_memory)} of {limit} ({found.policy}), {found.tails} handoffs wait"]
    for m in found.models:
        idle = "" if m.longest_idle is None else f", used up to {m.longest_idle:.0f} s ago"
        lines.append(
            f"model {m.model}: {m.blocks} blocks, {_bytes(m.bytes)}, {m.indexed} indexed, {m.pinned} pinned{idle}"
        )
    if found.hit_ratio is not None:
        lines.append(f"hit ratio {found.hit_ratio:.1%} of {found.counters['prompt_tokens']} prompt tokens")
    lines += [f"{name} {n}" for name, n in found.counters.items()]
    return "\n".join(lines)


def _bytes(size: float) -> str:
    power = min(max(int(math.log2(size)) // 10, 0), 4) if size >= 1 else 0
    return f"{size / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
