"""Runs the Lua scripts in `lua/`: every state transition of a request is one of them, atomic and idempotent.

A request is at every moment in exactly one place: queued or running in one stage, or done. Running work is fenced: the
claim raises `attempt`, and renew, append, handoff, finish, fail, release and requeue do nothing unless attempt and
owner are the current ones ("lost"). The contract of each script stands at its head; queue.py and client.py give them
types. Sent again after a lost reply, each transition answers as it did the first time and repeats nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

from redis.exceptions import NoScriptError

from pdq.connection import AsyncRedis, SyncRedis

Arg = str | bytes | int | float


class Scripted(Protocol):
    """What runs scripts as redis-py's client does."""

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any: ...

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation of a script: what to run on which keys with which arguments."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Arg]

    def evalsha(self) -> tuple[Any, ...]:
        return (self.script.sha, len(self.keys), *self.keys, *self.args)

    def eval(self) -> tuple[Any, ...]:
        return (self.script.text, len(self.keys), *self.keys, *self.args)

    async def run(self, redis: AsyncRedis) -> Any:
        """Run it; the script is sent along if the server does not know it yet (a restart forgets it)."""
        try:
            return await redis.evalsha(*self.evalsha())
        except NoScriptError:
            return await redis.eval(*self.eval())

    def run_sync(self, redis: SyncRedis | Scripted) -> Any:
        """The same from a thread."""
        try:
            return redis.evalsha(*self.evalsha())
        except NoScriptError:
            return redis.eval(*self.eval())


class Script:
    """One file of `lua/`, with `common.lua` before it."""

    __slots__ = ("sha", "text")

    def __init__(self, name: str) -> None:
        folder = files("pdq") / "lua"
        self.text = (folder / "common.lua").read_text() + (folder / f"{name}.lua").read_text()
        self.sha = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str], *args: Arg) -> Call:
        return Call(self, keys, args)


submit = Script("submit")
claim = Script("claim")
renew = Script("renew")
append = Script("append")
handoff = Script("handoff")
finish = Script("finish")
fail = Script("fail")
release = Script("release")
requeue = Script("requeue")
cancel = Script("cancel")
check = Script("check")
leave_group = Script("leave_group")
sweep = Script("sweep")

# Of the block index, which is not of a pool; what they lose is a cache.
evict = Script("evict")
unpin = Script("unpin")


async def run_many(redis: AsyncRedis, calls: Sequence[Call]) -> list[Any]:
    """Run several calls in one round trip. An entry of the result is an exception where its call failed."""
    results = await redis.execute_many([("EVALSHA", *c.evalsha()) for c in calls])
    unknown = [i for i, r in enumerate(results) if isinstance(r, NoScriptError)]
    if unknown:
        again = await redis.execute_many([("EVAL", *calls[i].eval()) for i in unknown])
        for i, result in zip(unknown, again, strict=True):
            results[i] = result
    return results
