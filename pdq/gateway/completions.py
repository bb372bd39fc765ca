"""POST /v1/completions: text or token ids in, text out; several prompts give several choices."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pdq.gateway import prompts
from pdq.gateway.body import read_body
from pdq.gateway.context import GATEWAY
from pdq.gateway.logprobs import CompletionLogprobs
from pdq.gateway.replies import Endpoint, answer
from pdq.gateway.schemas import CompletionBody
from pdq.gateway.sse import Shape

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


COMPLETION = Endpoint(
    shape=Shape(
        id_prefix="cmpl-",
        chunk_object="text_completion",
        opening=b"",
        before=b'"text":',
        after=b"",
        empty=b'"text":""',
    ),
    object="text_completion",
    prompt_field="prompt",
    whole=_text,
    logprobs=CompletionLogprobs,
)


async def completions(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = await read_body(request, CompletionBody)
    limit = await gateway.context_limit(body.model)
    named = await prompts.completion_tokens(gateway, body.prompts, limit)
    for name, ids in named:
        prompts.check_room(len(ids), name, body.needed_tokens, limit)
    fitting = [prompts.Prompt(ids, _max_tokens(body, limit - len(ids))) for _, ids in named]
    return await answer(request, COMPLETION, fitting, body)


def _max_tokens(body: CompletionBody, room: int) -> int:
    """Nobody asked for the default, so it gives way to the end of the context, and to min_tokens."""
    if body.max_tokens is not None:
        return body.max_tokens
    return max(min(DEFAULT_MAX_TOKENS, room), body.min_tokens or 0)
