"""A client of the gateway that comes back for its answer under the same idempotency key."""

from __future__ import annotations

import hashlib
import json

import aiohttp

FINAL = (400, 404, 409, 499, 500, 504)


class Ended(Exception):
    """The request ended with an error, which it will have under this key from now on."""


def request_id(key: str) -> str:
    """The id that an idempotency key gives."""
    return hashlib.sha256(f"\0{key}".encode()).hexdigest()[:32]


async def stream(http: aiohttp.ClientSession, url: str, key: str, **body: object) -> tuple[str, str]:
    """(id, text) of a streamed completion. Raises Ended, and ClientError for what asking again may change."""
    body = {"model": "scripted", "temperature": 0, "stream": True, **body}
    async with http.post(f"{url}/v1/completions", json=body, headers={"Idempotency-Key": key}) as response:
        if response.status in FINAL:
            raise Ended(await response.text())
        response.raise_for_status()
        found, text = "", ""
        async for line in response.content:
            if line == b"data: [DONE]\n":
                return found, text
            if line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    if chunk["error"]["code"] != "unavailable":
                        raise Ended(chunk["error"]["message"])
                    raise aiohttp.ClientPayloadError(chunk["error"]["message"])
                found = chunk["id"]
                text += "".join(c["text"] for c in chunk["choices"])
    raise aiohttp.ClientPayloadError("no end")
