"""A model's own tokenizer, from the files in its folder (`tokenizer.json`, `tokenizer_config.json`, chat template).

Built on the `tokenizers` library alone: importing transformers' AutoTokenizer would load torch into the gateway (3 s,
250 MB). Only a folder that has no `tokenizer.json` falls back to it. Knows nothing of models, weights or Redis.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pdq.errors import ConfigError, InvalidRequest, ModelUnsupported
from pdq.messages import Message
from pdq.models.chat_template import ChatTemplate
from pdq.models.checkpoint import read_json, read_text
from pdq.text import check_text


class HFTokenizer:
    """The tokenizer of the model in `folder` (Hugging Face layout). Thread-safe.

    eos_id: the tokenizer's end-of-text token, if it names one. Raises ConfigError when files are missing or broken,
    ModelUnsupported when the model has only a tokenizer written in Python.
    """

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "tokenizer_config.json")
        special = {**special_tokens(read_json(folder / "special_tokens_map.json")), **special_tokens(config)}
        self._backend = _load_backend(folder)
        # A client's prompt must reach the model whole, whatever the file was saved with.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._template = ChatTemplate(_template_source(folder, config), special)
        eos = special.get("eos_token")
        self.eos_id: int | None = None if eos is None else self._backend.token_to_id(eos)
        self._bytes: dict[int, bytes] = {}  # as many as the vocabulary has tokens

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's output may be wider (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        check_text("prompt", text)
        return self._encode(text, special=True)  # BOS is tokenizer.json's matter, as for transformers 5

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise InvalidRequest("messages: must not be empty", param="messages")
        for i, m in enumerate(messages):
            for field, value in (("role", m.role), ("content", m.content), ("name", m.name or "")):
                check_text(f"messages.{i}.{field}", value)
        return self._encode(self._template.render(messages), special=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = _bytes_of(self._backend, token_id)
            if found:
                self._bytes[token_id] = found
        return found

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # A batch of one: unlike `encode`, it lets other threads run meanwhile.
        ids: list[int] = self._backend.encode_batch([text], add_special_tokens=special)[0].ids
        return ids


def _bytes_of(backend: Backend, token_id: int) -> bytes:
    """See `Tokenizer.token_bytes`.

    A decoder shows the token as it is in a text, but shows parts of characters as U+FFFD; for those the spelling in the
    vocabulary tells the bytes: "<0xE2>" (byte fallback), or one of GPT-2's stand-in characters for each byte.
    """
    name = backend.id_to_token(token_id)
    if name is None:
        return b""
    once = backend.decode([token_id], skip_special_tokens=False)
    twice = backend.decode([token_id, token_id], skip_special_tokens=False)
    # Some decoders drop the blank before the first word of a text; the second time it is there.
    text: str = twice[len(once) :] if twice.startswith(once) else once
    if "\ufffd" not in text:
        return text.encode()
    if found := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(found[1])
    if all(c in _BYTES for c in name):
        return bytes(_BYTES[c] for c in name)
    return text.encode()


def _stand_ins() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 stands for itself, the rest for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _stand_ins()


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... of a tokenizer_config.json: plain strings or saved AddedToken objects."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _load_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _load_slow(folder)
    try:
        return Backend.from_file(str(path))
    except Exception as e:  # the library raises bare Exception for every fault of the file
        raise ConfigError(f"model: {path} is not a tokenizer: {e}") from e


def _load_slow(folder: Path) -> Backend:
    """For folders of older models with vocabulary files only: transformers converts them, and loads torch to do so."""
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, OSError, ValueError, KeyError) as e:
        raise ConfigError(f"model: no tokenizer.json in {folder}, and no other tokenizer files work: {e}") from e
    backend = getattr(found, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise ModelUnsupported(
            f"{folder.name}: its {type(found).__name__} exists in Python only, without tokenizer.json"
        )
    return backend


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja, or the (default) template of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
