"""What may be left in Redis when all work is done, and a way to end what a test leaves running.

The rules are the table in `pdq/keys.py`, a row each; a key of no row is a leak.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import redis

from pdq import scripts
from pdq.end_events import CANCELLED
from pdq.keys import CANCELS, DEAD_LETTERS, GROUP, Keys
from pdq.messages import LANES

NODE = 128  # entries of a stream's node: trimming with "~" takes whole nodes only
WORKERS = 1000
END_TTL_MS = 60_000


def _has_ttl(client: redis.Redis, key: str) -> str:
    return "has no TTL" if client.pttl(key) == -1 else ""


def _is_empty(client: redis.Redis, key: str) -> str:
    """Of a stage's stream: no entries, and nothing pending (an entry deleted without its ack would be)."""
    if length := client.xlen(key):
        return f"still has {length} entries"
    groups: Any = client.xinfo_groups(key)
    pending = sum(g["pending"] for g in groups)
    return f"has {pending} entries pending that do not exist" if pending else ""


def _is_zero(client: redis.Redis, key: str) -> str:
    sums: Any = client.hgetall(key)
    off = {k.decode(): int(v) for k, v in sums.items() if int(v)}
    return f"counts what is not there: {off}" if off else ""


def _is_at_most(most: int) -> Callable[[redis.Redis, str], str]:
    def check(client: redis.Redis, key: str) -> str:
        count: Any = client.xlen(key) if client.type(key) == b"stream" else client.zcard(key)
        return f"has {count} entries" if count > most else ""

    return check


# Rows of the table in keys.py -> what is wrong with a key of the row in an idle pool ("": nothing).
RULES: dict[str, Callable[[redis.Redis, str], str]] = {
    "{pdq:P}:prefill:<lane>": _is_empty,
    "{pdq:P}:decode": _is_empty,
    "{pdq:P}:req:<id>": _has_ttl,
    "{pdq:P}:out:<id>": _has_ttl,
    "{pdq:P}:load": _is_zero,
    "{pdq:P}:dead": _is_at_most(DEAD_LETTERS + NODE),
    "{pdq:P}:cancels": _is_at_most(CANCELS + NODE),
    "{pdq:P}:workers": _is_at_most(WORKERS),
    "{pdq:P}:worker:<name>": _has_ttl,
    "{pdq:P}:took:<name>": _has_ttl,
    "{pdq:P}:wake:<reader>": _has_ttl,
    "pdq:kv:<fp>:<hash>": _has_ttl,
    "pdq:kv:<fp>:index": _has_ttl,
    "pdq:kv:<fp>:epoch": _has_ttl,
    "pdq:tail:<id>:<attempt>": _has_ttl,
}


def pattern(row: str) -> re.Pattern[str]:
    """Which keys a row of the table stands for."""
    text = re.escape(row).replace("\\{pdq:P\\}", r"\{pdq:[\w-]+\}").replace("<fp>", "[0-9a-f]{16}")
    text = text.replace("<hash>", "[0-9a-f]{64}").replace("<attempt>", "[0-9]+")
    return re.compile(re.sub("<[a-z]+>", ".+", text))


_PATTERNS = {row: pattern(row) for row in RULES}


def row_of(key: str) -> str | None:
    """The row of the table that `key` belongs to."""
    return next((row for row, p in _PATTERNS.items() if p.fullmatch(key)), None)


def leaks(client: redis.Redis) -> list[str]:
    """Keys without an owner, and what is wrong with each."""
    found = []
    for raw in client.scan_iter(count=1000):
        key = raw.decode(errors="replace")
        row = row_of(key)
        try:
            wrong = "is in no row of the table in pdq/keys.py" if row is None else RULES[row](client, key)
        except redis.ResponseError:
            if client.exists(key):  # it may have expired since the scan
                raise
            continue
        if wrong and client.exists(key):
            found.append(f"{key} {wrong}")
    return found


def end_all(client: redis.Redis, pool: str = "default") -> None:
    """End every request of the pool by the product's own transitions: the queued by a cancel, the running by a finish.

    For tests of single transitions, which leave requests in the middle of things.
    """
    keys = Keys(pool)
    head = keys.request("")
    for raw in list(client.scan_iter(f"{head}*", count=1000)):
        request_id = raw.decode().removeprefix(head)
        _end(client, keys, request_id)


def _end(client: redis.Redis, keys: Keys, request_id: str) -> None:
    place = [keys.request(request_id), keys.out(request_id), keys.load]
    lanes = [*map(keys.prefill, LANES), keys.decode]
    cancel = scripts.cancel([*place, keys.cancels, *lanes], GROUP, request_id, CANCELLED, END_TTL_MS, CANCELS, *LANES)
    if cancel.run_sync(client) != b"running":
        return
    names = ["stage", "lane", "attempt", "owner", "entry", "pos"]
    stage, lane, attempt, owner, entry, pos = client.hmget(place[0], names)
    stream = keys.decode if stage == b"decode" else keys.prefill(lane.decode())
    fence = (attempt, owner, pos, pos, CANCELLED, GROUP, entry, "cancelled", END_TTL_MS)
    assert scripts.finish([*place, stream], *fence).run_sync(client) == b"ok"
