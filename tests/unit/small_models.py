"""Small tokenizers and model folders, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 259,
    "eos_token_id": 258,
}


def byte_alphabet() -> list[str]:
    """The 256 letters that stand for bytes in a byte-level vocabulary, in the order of the bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def byte_level(merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Byte-level BPE: ids 0-255 are the bytes, then the special tokens, then what is merged."""
    letters = byte_alphabet()
    words = letters + SPECIAL + [a + b for a, b in merges]
    tokenizer = Tokenizer(BPE(vocab={w: i for i, w in enumerate(words)}, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """SentencePiece as Llama 2 has it: `▁` for a space, bytes for the unknown, a leading space that decoding eats."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdefgh", "▁a", "▁b"]
    merges = [("▁", "a"), ("▁", "b")]
    vocab = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_tokenizer(
    folder: Path, tokenizer: Tokenizer | None = None, template: str | None = None, **config: Any
) -> Path:
    """tokenizer.json and tokenizer_config.json in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"} | config
    if template is not None:
        config["chat_template"] = template
    write_json(folder / "tokenizer_config.json", config)
    return folder


def write_model(folder: Path, *, seed: int = 0, **config: Any) -> Path:
    """A complete folder: config, tokenizer, one small weight file (not the tensors of a real model)."""
    write_tokenizer(folder)
    write_json(folder / "config.json", LLAMA | config)
    write_weights(folder / "model.safetensors", seed=seed)
    return folder


def hub_copy(cache: Path, model: str) -> Path:
    """Put a complete copy of `model` into a hub cache."""
    repo = cache / f"models--{model.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    return write_model(repo / "snapshots" / ("0" * 40))


def write_weights(path: Path, *, seed: int = 0, rows: int = 8, tensors: int = 3) -> None:
    random = np.random.default_rng(seed)
    save_file({f"w{i}": random.standard_normal((rows, 16)).astype(np.float32) for i in range(tensors)}, path)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
