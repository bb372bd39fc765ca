"""Log probabilities in the shapes of OpenAI's two endpoints.

Every token of an answer is worded once, in order, also those whose text is held back or never shows (the end of the
text, a stop string). A wording is made per choice, since the older shape counts characters.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from pdq.messages import TokenLogprob, TopLogprob

Wording: TypeAlias = Callable[[Sequence[TokenLogprob]], dict[str, Any]]


class ChatLogprobs:
    """`logprobs` of a chat choice or chunk: one object a token, with text, bytes and the most likely tokens."""

    def __call__(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = [_chat_token(t) | {"top_logprobs": [_chat_token(o) for o in t.top]} for t in tokens]
        return {"content": content, "refusal": None}


def _chat_token(token: TokenLogprob | TopLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}


class CompletionLogprobs:
    """`logprobs` of a completion choice or chunk: four arrays, one entry a token.

    A token that is a part of a character is spelled by its bytes, as OpenAI does (see `_spelled`): U+FFFD would give
    several tokens the same name. text_offset: characters of the answer that are complete before the token.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def __call__(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
        return {
            "text_offset": offsets,
            "token_logprobs": [t.logprob for t in tokens],
            "tokens": [_spelled(t.raw) for t in tokens],
            "top_logprobs": [_top(t) for t in tokens],
        }


def _top(token: TokenLogprob) -> dict[str, float]:
    """The most likely tokens and the chosen one. Of several that are spelled alike the most likely is told."""
    found: dict[str, float] = {}
    for other in token.top:
        found.setdefault(_spelled(other.raw), other.logprob)
    found.setdefault(_spelled(token.raw), token.logprob)
    return found


def _spelled(raw: bytes) -> str:
    """The token's text, or bytes:\\xe2\\x80."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
