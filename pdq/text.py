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

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a single token in the middle of a text, which may be a part of a character.

        A special token's are those of its name; b"" for an id without a token.
        """
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
        check_text("prompt", text)
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise InvalidRequest("messages: must not be empty", param="messages")
        for i, m in enumerate(messages):
            check_text(f"messages.{i}.role", m.role)
            check_text(f"messages.{i}.content", m.content)
        return self.encode("".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant:")

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == self.eos_id:
            return b"<eos>"
        return bytes([token_id]) if 0 <= token_id < 256 else b""


MANY_PENDING = 16  # tokens without visible text; far more than any character has, so they are no character
CHARACTER_TOKENS = 3  # an incomplete character has at most 3 bytes, so at most 3 tokens


class Detokenizer:
    """Text deltas from tokens pushed one at a time; never emits part of a character.

    Decodes a short window twice, with and without the new token, since tokens may join (a leading space, a merged
    character) with those before them. A window starts and ends at places where the text was complete. It stays short
    whatever a model emits: endless invalid bytes and endless special tokens included.
    """

    __slots__ = ("_ids", "_read", "_shown", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window
        self._read = 0  # the text of _ids[:_read] is out
        self._shown = ""  # that text

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, "" while a character is incomplete."""
        self._ids.append(token_id)
        many = len(self._ids) - self._read >= MANY_PENDING
        text = self._text(len(self._ids))
        if text.endswith("\ufffd"):
            return self._give_up_on(text) if many else ""
        if text == self._shown:
            if many:
                del self._ids[self._read :]  # special tokens: they have no text in any company
            return ""
        return self._advance(len(self._ids), text)

    def _text(self, end: int) -> str:
        """Of the window up to `end`. Byte-fallback decoders let an invalid byte spoil the valid ones before it."""
        text = self._tokenizer.decode(self._ids[:end])
        if text.startswith(self._shown):
            return text
        return self._shown + self._tokenizer.decode(self._ids[self._read : end])

    def _give_up_on(self, text: str) -> str:
        """Show invalid bytes as the U+FFFD they are, all but those that may begin a character yet."""
        for end in range(len(self._ids) - CHARACTER_TOKENS, self._read, -1):
            settled = self._text(end)
            if text.startswith(settled):
                return self._advance(end, settled)
        return self._advance(len(self._ids), text)

    def _advance(self, end: int, text: str) -> str:
        """Emit what `text`, of the window up to `end`, has beyond the shown; the next window starts at what was new."""
        delta = text[len(self._shown) :]
        self._ids, self._read = self._ids[self._read :], end - self._read
        self._shown = self._tokenizer.decode(self._ids[: self._read])
        return delta
