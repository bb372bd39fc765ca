"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pdq.gateway import prompts
from pdq.gateway.body import read_body
from pdq.gateway.context import GATEWAY
from pdq.gateway.logprobs import ChatLogprobs
from pdq.gateway.replies import Endpoint, answer
from pdq.gateway.schemas import ChatBody
from pdq.gateway.sse import Shape


def _message(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


CHAT = Endpoint(
    shape=Shape(
        id_prefix="chatcmpl-",
        chunk_object="chat.completion.chunk",
        opening=b'"delta":{"role":"assistant","content":""}',
        before=b'"delta":{"content":',
        after=b"}",
        empty=b'"delta":{}',
    ),
    object="chat.completion",
    prompt_field="messages",
    whole=_message,
    logprobs=ChatLogprobs,
)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = await read_body(request, ChatBody)
    limit = await gateway.context_limit(body.model)
    ids = await prompts.chat_tokens(gateway, [m.message() for m in body.messages], limit)
    _, wanted = body.wanted_tokens
    prompts.check_room(len(ids), "messages", body.needed_tokens, limit)
    return await answer(request, CHAT, [prompts.Prompt(ids, wanted)], body)
