"""From what the client wrote to token ids, and whether they fit the model's context.

Short texts are tokenized on the spot; templates and long texts go to a thread, under a time limit. The queue gets token
ids, so a prompt is tokenized once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdq.errors import ContextTooLong, InvalidRequest
from pdq.gateway.context import Gateway
from pdq.gateway.offload import TooSlow
from pdq.messages import Message
from pdq.text import Tokenizer

INLINE_CHARS = 4096
TEMPLATE_SECONDS = 5.0
TOKENIZE_SECONDS = 30.0
# No vocabulary in use has a token of more characters (the longest are runs of 128 blanks), so a text of more than this
# per token of context cannot fit, and is not worth the seconds it would take to tokenize.
MAX_TOKEN_CHARS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt that fits. max_tokens: of its completion; None: until the context is full."""

    ids: list[int]
    max_tokens: int | None


async def chat_tokens(gateway: Gateway, messages: Sequence[Message], limit: int) -> list[int]:
    """Token ids of a conversation; `limit` is the context in tokens. Raises InvalidRequest, ContextTooLong, Busy."""
    tokenizer = gateway.served().tokenizer
    _check_size(_least_tokens(sum(len(m.content) for m in messages)), limit, "messages")
    try:
        ids = await gateway.threads.run(TEMPLATE_SECONDS, tokenizer.encode_chat, messages)
    except TooSlow as e:
        text = f"The chat template took more than {TEMPLATE_SECONDS:g} s on these messages."
        raise InvalidRequest(text, param="messages") from e
    if not ids:
        raise InvalidRequest("messages give no tokens.", param="messages")
    return ids


async def completion_tokens(
    gateway: Gateway, prompts: list[str] | list[list[int]], limit: int
) -> list[tuple[str, list[int]]]:
    """(field name, token ids) of each prompt. Raises as `chat_tokens`."""
    names = ["prompt"] if len(prompts) == 1 else [f"prompt.{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        if isinstance(prompt, str):
            _check_size(_least_tokens(len(prompt)), limit, name)
    encoded = await _encode(gateway, prompts)
    for name, ids in zip(names, encoded, strict=True):
        if not ids:
            raise InvalidRequest(f"{name} gives no tokens.", param=name)
    return list(zip(names, encoded, strict=True))


async def _encode(gateway: Gateway, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    tokenizer = gateway.served().tokenizer
    if sum(len(p) for p in prompts if isinstance(p, str)) <= INLINE_CHARS:
        return _encode_all(tokenizer, prompts)
    try:
        return await gateway.threads.run(TOKENIZE_SECONDS, _encode_all, tokenizer, prompts)
    except TooSlow as e:
        raise InvalidRequest(f"Tokenizing took more than {TOKENIZE_SECONDS:g} s.", param="prompt") from e


def _encode_all(tokenizer: Tokenizer, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    return [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


def check_room(prompt_tokens: int, prompt_name: str, needed: tuple[str, int | None], limit: int) -> None:
    """Raises ContextTooLong unless the prompt and what is needed after it (None: one token) fit `limit`.

    needed: the field that says so, and the tokens.
    """
    wanted_name, wanted = needed
    if prompt_tokens >= limit:
        raise ContextTooLong(
            f"This model's context is {limit} tokens, but {prompt_name} has {prompt_tokens} tokens, "
            "which leaves no room for a completion.",
            param=prompt_name,
        )
    if wanted is not None and prompt_tokens + wanted > limit:
        raise ContextTooLong(
            f"This model's context is {limit} tokens, but {prompt_tokens + wanted} were requested: "
            f"{prompt_tokens} in {prompt_name} and {wanted} as {wanted_name}.",
            param=wanted_name,
        )


def _least_tokens(chars: int) -> int:
    return -(-chars // MAX_TOKEN_CHARS)


def _check_size(least: int, limit: int, name: str) -> None:
    if least >= limit:
        raise ContextTooLong(
            f"This model's context is {limit} tokens, but {name} has at least {least} tokens.", param=name
        )
