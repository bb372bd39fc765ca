"""Keeps a request that kills its workers from taking its neighbours along into the dead letters.

Jobs that run side by side die side by side, and nobody can tell whose fault it was. A job whose attempts have come to
nothing twice is a suspect, and a worker takes one suspect at a time: the guilty one fails alone, or beside jobs that
have attempts left. Sits between the queue's reclaim and the claim; no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdq.connection import AsyncRedis
from pdq.keys import GROUP, Keys
from pdq.queue import Entry

TRIES = 2  # claims in this stage, none of which led to an end; with max_attempts 2, one


class Suspects:
    """The suspects of one worker process. owner: its name."""

    def __init__(self, redis: AsyncRedis, keys: Keys, owner: str, lease_seconds: float, max_attempts: int) -> None:
        self._redis = redis
        self._keys = keys
        self._owner = owner
        self._lease_ms = int(lease_seconds * 1000)
        self._tries = max(min(TRIES, max_attempts - 1), 1)
        self._taken: set[str] = set()

    async def sift(self, entries: Sequence[Entry], running: set[str]) -> list[Entry]:
        """Those of the reclaimed `entries` that may be claimed beside the requests `running` here; the others are left.

        Raises RedisError.
        """
        if not entries:
            return []
        asked = [("HGET", self._keys.request(name), "tries") for _, _, name in entries]
        found = await self._redis.execute_many(asked)
        tries = [0 if isinstance(n, Exception) else int(n or 0) for n in found]  # of a wrong key its claim will tell
        self._taken &= running
        chosen = []
        for entry, n in zip(entries, tries, strict=True):
            if n < self._tries:
                chosen.append(entry)
            elif not self._taken:
                self._taken.add(entry[2])
                chosen.append(entry)
            else:
                await self._leave(entry)
        return chosen

    async def _leave(self, entry: Entry) -> None:
        """Unclaimed and at once reclaimable, by us too when the other suspect has ended."""
        stream, entry_id, _ = entry
        await self._redis.xclaim(stream, GROUP, self._owner, 0, [entry_id], idle=self._lease_ms, justid=True)
