"""Four requests, one in each place where a fault may find it, and what must come of them.

For pools whose decode worker has a batch of one and whose engine takes about a millisecond a prompt token.
"""

from __future__ import annotations

import asyncio

from pdq.client import AsyncClient, Handle
from tests.faults.audit import expected, not_at_rest, reply
from tests.faults.pool import read, submit, text_of, until
from tests.servers import Server

WORK = {
    "decoding": ("decodes while it happens", 400),
    "between": ("handed over, decode has no room", 20),
    "prefilling": ("p" * 500, 20),
    "queued": ("queued for prefill", 20),
}
RIGHT = {name: expected(prompt.encode(), count) for name, (prompt, count) in WORK.items()}
PLACES = {"decoding": ("decode", "running"), "between": ("decode", "queued"), "prefilling": ("prefill", "running")}

Readers = dict[str, asyncio.Task[str]]


async def text(handle: Handle) -> str:
    return text_of(await read(handle))


async def begin(client: AsyncClient) -> dict[str, Handle]:
    """Submit the four; each is in its place when this returns."""
    handles = {}
    for name, work in WORK.items():
        handles[name] = await submit(client, *work)
        async with asyncio.timeout(30):
            while name in PLACES and not await _in_place(handles[name], *PLACES[name]):
                await asyncio.sleep(0.005)
    return handles


async def _in_place(handle: Handle, stage: str, state: str) -> bool:
    now = await handle.status()
    assert now.stage != "done", "it ended too soon"
    return (now.stage, now.state) == (stage, state) and (now.tokens > 10 or stage != "decode" or state != "running")


def reading(handles: dict[str, Handle]) -> Readers:
    return {name: asyncio.create_task(text(handle)) for name, handle in handles.items()}


async def texts(readers: Readers) -> dict[str, str]:
    return dict(zip(readers, await asyncio.gather(*readers.values()), strict=True))


async def healed(server: Server, client: AsyncClient) -> None:
    """The pool becomes idle, serves the next request, and holds nothing more of either."""
    keys = client.keys
    with server.client() as direct:
        await until(lambda: not any("entries" in line for line in not_at_rest(direct, keys)))
        handle = await submit(client, "the next request", 20)
        assert await text(handle) == expected(b"the next request", 20)
        await until(lambda: not not_at_rest(direct, keys), 10, lambda: not_at_rest(direct, keys))
        assert reply(direct, keys, handle.id).faults == ()
