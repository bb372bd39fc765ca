"""Builds tokenizer.json and its companions from the metadata of a GGUF file. Part of `gguf.py`.

A GGUF keeps vocabulary, merges and the *name* of how text is split before merging (`tokenizer.ggml.pre`). The split
must be the one the merges were learned with, or text is cut into tokens the model has rarely seen; a name that is not
known here is refused. Splits: llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pdq.errors import ConfigError, ModelUnsupported

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "llama3": _CONTRACTIONS + r"\p{N}{1,3}" + _REST,
    "qwen2": _CONTRACTIONS + r"\p{N}" + _REST,
}
_PRE = {
    "llama3": "llama3",
    "llama-v3": "llama3",
    "llama-bpe": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "codeshell": "digits",
    "gpt-2": "plain",
}


def write_tokenizer(meta: Mapping[str, Any], source: Path, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. Raises ModelUnsupported."""
    kind = meta.get("tokenizer.ggml.model")
    if kind == "llama":
        _write_sentencepiece(source, folder)
        return
    if kind != "gpt2":
        raise ModelUnsupported(f"this GGUF file cannot be converted: its tokenizer {kind!r} is not understood")
    tokenizer = byte_level(meta)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        name: tokens[meta[key]] for k, name in names.items() if (key := f"tokenizer.ggml.{k}_token_id") in meta
    }
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", config)
    if template := meta.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def byte_level(meta: Mapping[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer of this file. Raises ModelUnsupported, ConfigError."""
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in _PRE:
        raise ModelUnsupported(f"this GGUF file cannot be converted: its text split {pre!r} is not understood")
    split = _PRE[pre]
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama3"))
    except Exception as e:  # the library raises bare Exception
        raise ConfigError(f"its tokenizer is not sound: {e}") from e
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get("tokenizer.ggml.token_type", ())
    tokenizer.add_special_tokens(_added(tokens, kinds, CONTROL))
    tokenizer.add_tokens(_added(tokens, kinds, USER_DEFINED))
    bos: int | None = meta.get("tokenizer.ggml.bos_token_id")
    if bos is not None and meta.get("tokenizer.ggml.add_bos_token", split == "llama3"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    if split == "plain":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLITS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _added(tokens: list[str], kinds: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, k in zip(tokens, kinds, strict=False)
        if k == kind
    ]


def _write_sentencepiece(source: Path, folder: Path) -> None:
    """By transformers' own conversion, which loads torch: sentencepiece files have no text split to get wrong."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
