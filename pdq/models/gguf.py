"""Converts one GGUF file to a model folder (Hugging Face layout): `python -m pdq.models.gguf SOURCE.gguf FOLDER`.

Run by `converted.py` in a process of its own. Needs numpy and `gguf`, not torch: tensors are dequantised a few rows at
a time and streamed to disk. What a file says is understood or refused: a guess would be a slightly wrong model.

Weights are stored as dequantised, in float32 (half-precision tensors as they are); models above WIDE_BYTES in bfloat16.

Prints lines `progress TEXT`, and last, if it fails, `unsupported TEXT` or `failed TEXT`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize

from pdq import bfloat16
from pdq.errors import ConfigError, ModelUnsupported, PdqError
from pdq.models.gguf_tokenizer import write_json, write_tokenizer

WIDE_BYTES = 4 * 2**30
CHUNK_BYTES = 16 * 2**20
TELL_SECONDS = 2.0

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NORMS = ("attn_q_norm", "attn_k_norm")
_BIASED = ("attn_q", "attn_k", "attn_v")

# Keys after "<architecture>." that are read below or say nothing about the computation.
_KNOWN_KEYS = frozenset({
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "expert_count", "expert_used_count",
    "feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "tensor_data_layout", "vocab_size",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to write. dtype: as safetensors names it, "F32", "F16" or "BF16". rows: their order, None as is."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: ReaderTensor
    rows: np.ndarray[Any, np.dtype[np.int64]] | None = None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * (4 if self.dtype == "F32" else 2)


def convert(source: Path, folder: Path, tell: Callable[[str], None]) -> None:
    """Write `source` as a model to the existing `folder`. Raises ModelUnsupported, ConfigError."""
    reader = GGUFReader(source)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {t.name: t for t in reader.tensors}
    config = model_config(meta, tensors)
    weights = plan(config, tensors)
    dtypes = {w.dtype for w in weights if len(w.shape) > 1}
    widest = next(d for d in _DTYPES if d in dtypes)
    write_json(folder / "config.json", config | {"dtype": _DTYPES[widest]})
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = sorted({int(e) for e in ends if e is not None})
    write_json(folder / "generation_config.json", {"bos_token_id": config["bos_token_id"], "eos_token_id": eos})
    write_tokenizer(meta, source, folder)
    write_safetensors(folder / "model.safetensors", weights, tell)


def model_config(meta: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    """config.json for this file. Raises ModelUnsupported for what cannot be expressed in it."""
    arch, own = _understood(meta)
    heads = own["attention.head_count"]
    head_dim = own.get("attention.key_length") or own["embedding_length"] // heads
    if own.get("rope.dimension_count", head_dim) != head_dim or own.get("attention.value_length", head_dim) != head_dim:
        raise _unsupported("its rotary or value dimension differs from its head dimension")
    return {
        "architectures": [_CLASSES[arch]],
        "model_type": arch,
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": own["context_length"],
        # 1e-05, not the 9.999999747378752e-06 that a float32 of it widens to
        "rms_norm_eps": float(str(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": _rope(own, head_dim, tensors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }


def plan(config: Mapping[str, Any], tensors: Mapping[str, ReaderTensor]) -> list[Weight]:
    """What to write, in the file's order. Raises ModelUnsupported if a tensor is missing or has no place."""
    wanted = _wanted(config)
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise _unsupported(f"its tensor {missing[0]} is missing")
    if unknown := sorted(tensors.keys() - wanted.keys() - {"rope_freqs.weight"}):
        raise _unsupported(f"its tensor {unknown[0]} has no place in the model")
    found = [t for name, t in tensors.items() if name in wanted]
    narrow = sum(4 * int(t.n_elements) for t in found) > WIDE_BYTES
    return [
        Weight(
            name=wanted[t.name],
            dtype=_dtype(t, narrow),
            shape=tuple(int(n) for n in reversed(t.shape)),
            source=t,
            rows=_row_order(config, t),
        )
        for t in found
    ]


def write_safetensors(path: Path, weights: list[Weight], tell: Callable[[str], None]) -> None:
    """Stream `weights` to `path`. Raises ConfigError when the disk has no room."""
    total = sum(w.nbytes for w in weights)
    if (free := shutil.disk_usage(path.parent).free) < total:
        raise ConfigError(f"the converted model takes {total / 1e9:.1f} GB, {path.parent} has {free / 1e9:.1f} GB free")
    entries, at = {}, 0
    for w in weights:
        entries[w.name] = {"dtype": w.dtype, "shape": w.shape, "data_offsets": [at, at + w.nbytes]}
        at += w.nbytes
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    start, told = 8 + len(header), time.monotonic()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for w in weights:
            for chunk in _chunks(w):
                file.write(chunk)
            if time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                tell(f"{100 * (file.tell() - start) // total} % converted")
        file.flush()
        os.fsync(file.fileno())


def _understood(meta: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The architecture and its own keys. Raises ModelUnsupported."""
    arch = str(meta.get("general.architecture"))
    if arch not in _CLASSES:
        raise _unsupported(f"its architecture is {arch!r} and not one of {', '.join(_CLASSES)}")
    if meta.get("split.count", 1) > 1:
        raise _unsupported("it is one part of a split file; merge the parts first")
    own = {key.removeprefix(arch + "."): value for key, value in meta.items() if key.startswith(arch + ".")}
    if unknown := sorted(own.keys() - _KNOWN_KEYS):
        raise _unsupported(f"its key {arch}.{unknown[0]} is not understood")
    if own.get("expert_count", 0):
        raise _unsupported("it is a mixture of experts")
    return arch, own


def _wanted(config: Mapping[str, Any]) -> dict[str, str]:
    """GGUF name -> Hugging Face name of every tensor the model has."""
    names = {
        f"{k}.weight": f"{v}.weight" for k, v in _TOP.items() if k != "output" or not config["tie_word_embeddings"]
    }
    kind = config["model_type"]
    biased = _BIASED if kind == "qwen2" else (*_BIASED, "attn_output") if config["attention_bias"] else ()
    for i in range(config["num_hidden_layers"]):
        for own, hf in _LAYER.items():
            if own not in _NORMS or kind == "qwen3":
                names[f"blk.{i}.{own}.weight"] = f"model.layers.{i}.{hf}.weight"
            if own in biased:
                names[f"blk.{i}.{own}.bias"] = f"model.layers.{i}.{hf}.bias"
    return names


def _dtype(tensor: ReaderTensor, narrow: bool) -> str:
    """Vectors (norms, biases) stay exact: they cost nothing."""
    if tensor.tensor_type.name in ("F16", "BF16"):
        return str(tensor.tensor_type.name)
    return "BF16" if narrow and len(tensor.shape) > 1 else "F32"


def _row_order(config: Mapping[str, Any], tensor: ReaderTensor) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Undoes llama.cpp's interleaving of the rotary halves of each head, which it applies to "llama" files only."""
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", tensor.name)
    if found is None or config["model_type"] != "llama":
        return None
    heads = config["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
    return np.arange(heads * config["head_dim"]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _chunks(weight: Weight) -> Iterator[bytes]:
    """The tensor's bytes, some rows at a time; a quantised row stands alone, so rows are reordered before unpacking."""
    kind = weight.source.tensor_type
    data = weight.source.data.reshape(weight.shape[0], -1)
    step = max(1, CHUNK_BYTES // (4 * int(np.prod(weight.shape[1:], dtype=np.int64))))
    for at in range(0, len(data), step):
        part = data[at : at + step] if weight.rows is None else data[weight.rows[at : at + step]]
        if kind.name == weight.dtype:
            yield part.tobytes()
            continue
        try:
            wide = dequantize(part, kind)
        except NotImplementedError as e:
            raise _unsupported(f"tensors of type {kind.name} cannot be unpacked") from e
        if weight.dtype != "F32":
            wide = bfloat16.rounded(np.ascontiguousarray(wide, dtype=np.float32))
        yield wide.tobytes()


def _rope(own: Mapping[str, Any], head_dim: int, tensors: Mapping[str, ReaderTensor]) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": float(own.get("rope.freq_base", 10000.0))}
    if "rope_freqs.weight" in tensors:
        return base | _llama3_rope(base["rope_theta"], head_dim, tensors["rope_freqs.weight"].data)
    kind = own.get("rope.scaling.type", "none")
    if kind == "none":
        return base
    factor = {"factor": float(own["rope.scaling.factor"])}
    if kind == "linear":
        return base | factor | {"rope_type": "linear"}
    if kind == "yarn":
        original = own["rope.scaling.original_context_length"]
        return base | factor | {"rope_type": "yarn", "original_max_position_embeddings": original}
    raise _unsupported(f"its rope scaling {kind!r} is not understood")


def _llama3_rope(theta: float, head_dim: int, divisors: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Llama 3's parameters, of which a GGUF keeps only the resulting divisor of each frequency.

    All published Llama 3 models share low and high factor and original context and differ in `factor`; the divisors are
    computed anew from these and must come out as in the file.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(np.max(divisors))
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / waves - low) / (high - low), 0.0, 1.0)
    if divisors.shape != smooth.shape or not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-3):
        raise _unsupported("its rope_freqs are not those of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _unsupported(reason: str) -> ModelUnsupported:
    return ModelUnsupported(f"this GGUF file cannot be converted: {reason}. Its safetensors folder may run.")


def main(argv: list[str]) -> int:
    def say(kind: str, text: str) -> None:
        sys.stdout.write(f"{kind} {' '.join(text.split())}\n")
        sys.stdout.flush()

    try:
        convert(Path(argv[0]), Path(argv[1]), lambda text: say("progress", text))
    except ModelUnsupported as e:
        say("unsupported", e.message)
    except PdqError as e:
        say("failed", e.message)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
        say("failed", f"not a sound GGUF file: {type(e).__name__}: {e}")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
