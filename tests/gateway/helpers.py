"""Bodies to send, and answers taken apart."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse

from .fakes import MODEL

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]} | more


def completion(prompt: Any = "Hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt} | more


async def error(response: ClientResponse) -> dict[str, Any]:
    """The error object of a response, its shape checked."""
    assert response.content_type == "application/json"
    body = await response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    assert response.headers["x-request-id"]
    return body["error"]


def frames(raw: str) -> list[Any]:
    """The data of each event of a stream, parsed; "[DONE]" and comments (": ping") as they are."""
    assert raw.endswith("\n\n")
    found = []
    for frame in raw[:-2].split("\n\n"):
        assert "\n" not in frame
        if frame.startswith(":"):
            found.append(frame)
        else:
            assert frame.startswith("data: ")
            data = frame.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found


def chat_text(chunks: list[Any], choice: int = 0) -> str:
    return "".join(
        c["delta"].get("content", "")
        for chunk in chunks
        if isinstance(chunk, dict)
        for c in chunk["choices"]
        if c["index"] == choice
    )
