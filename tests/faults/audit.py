"""What Redis itself says of a request that ended, and of a pool that is idle: read raw, past the SDK."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from struct import pack

import redis

from pdq.keys import Keys
from pdq.messages import Event, decode
from tests.hygiene import leaks

END = b"1-0"


def expected(prompt: bytes, count: int, seed: int = 0) -> str:
    """What the scripted engine answers in one undisturbed process. seed: 0 for temperature 0."""
    checksum, out = 0, ""
    for token in prompt:
        checksum = zlib.crc32(pack("<I", token), checksum)
    for position in range(count):
        token = 97 + zlib.crc32(pack("<Qq", position, seed), checksum) % 26
        checksum = zlib.crc32(pack("<I", token), checksum)
        out += chr(token)
    return out


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply stream from its beginning. faults: what must not be in one, in words."""

    text: str
    tokens: tuple[int, ...]
    end: Event | None
    faults: tuple[str, ...]


def reply(client: redis.Redis, keys: Keys, request_id: str) -> Reply:
    """Read a whole reply stream: positions without repetition or gap, one end and nothing after it."""
    faults: list[str] = []
    text, tokens, end = "", [], None
    for entry, data in client.xrange(keys.out(request_id)):
        event = decode(Event, data[b"e"])
        if end is not None:
            faults.append(f"{entry!r} after the end")
        if event.index != len(tokens) and event.error is None:
            faults.append(f"{entry!r} starts at {event.index}, {len(tokens)} tokens were there")
        text += event.text
        tokens += event.token_ids
        if event.terminal:
            end = event
        if entry != (END if event.terminal else b"0-%d" % len(tokens)):
            faults.append(f"entry {entry!r} with {len(tokens)} tokens, {event.finish_reason}")
    if end is not None and end.usage is not None and end.usage.completion_tokens != len(tokens):
        faults.append(f"usage of {end.usage.completion_tokens}, {len(tokens)} tokens")
    return Reply(text, tuple(tokens), end, tuple(faults))


def not_at_rest(client: redis.Redis, keys: Keys) -> list[str]:
    """What an idle pool would not have (tests/hygiene.py); keys of other pools are not looked at."""
    mine = keys.load.removesuffix("load")
    return [line for line in leaks(client) if line.startswith((mine, "pdq:"))]
