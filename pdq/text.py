"""Between text and tokens: the tokenizer interface and incremental detokenizing.

`Tokenizer` has two implementations: the model's own (`hf_tokenizer.py`) and `ByteTokenizer` (one token a byte, no model
files; for scripted engines). Neither torch nor Redis here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdq.errors import InvalidRequest
from pdq.messages import Message


class Tokenizer(Protocol):
    """What the pipeline wants from a tokenizer. Implementations are thread-safe."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a completion prompt, with the special tokens the model wants (BOS)."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation by the model's chat template, up to the assistant's turn.

        Raises InvalidRequest (param "messages") with the template's own sentence when it refuses.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out; an incomplete character shows as U+FFFD at the end."""
        ...


def check_text(param: str, text: str) -> None:
    """Raises InvalidRequest naming `param` if `text` is no text: JSON can spell half a surrogate pair, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        half = f"U+{ord(text[e.start]):04X} at character {e.start}"
        raise InvalidRequest(f"{param}: {half} is half of a surrogate pair, which is no text", param=param) from None


class ByteTokenizer:
    """One token a UTF-8 byte, ids 0-255; 256 ends a text. Chat turns are lines of `role: content`."""

    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogatepass"))

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise InvalidRequest("messages: must not be empty", param="messages")
        return self.encode("".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant:")

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", "replace")


class Detokenizer:
    """Text deltas from tokens pushed one at a time; never emits part of a character.

    Decodes a short window twice, with and without the new token, since tokens may join (a leading space, a merged
    character) with those before them. A window starts and ends at places where the text was complete.
    """

    __slots__ = ("_ids", "_read", "_shown", "_start", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._read = 0  # window: [_start, end); text of [_start, _read) is out
        self._shown = ""  # that text

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, "" while a character is incomplete."""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith("\ufffd") or len(text) <= len(self._shown):
            return ""
        delta = text[len(self._shown) :]
        self._start, self._read = self._read, len(self._ids)
        self._shown = self._tokenizer.decode(self._ids[self._start : self._read])
        return delta
