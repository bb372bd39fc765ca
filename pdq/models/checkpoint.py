"""What a model folder says of itself: is it complete, can it run here, its context, its end tokens, its fingerprint.

Reads config.json and the outside of the weight files (names, sizes, headers, samples), never whole weights of a big
model. No torch, no network: the gateway and the workers both ask here before anything is loaded.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from pdq.errors import ConfigError, ModelUnsupported
from pdq.prefix import WIRE_VERSION

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "max_sequence_length")
ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
LAYER_KEYS = ("layer_types", "layers_block_type", "block_types")

# Model types whose layers keep a state that is not one K and one V per token, however their config is written.
STATEFUL_TYPES = frozenset({
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "mamba", "mamba2", "minimax",
    "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya",
})  # fmt: skip
# Keys of such layers in the configs of types that are not listed above and that do not name each layer.
STATE_KEYS = ("conv_L_cache", "linear_conv_kernel_dim", "lru_width", "mamba_d_state", "ssm_state_size", "state_size")
TOWER_KEYS = ("vision_config", "audio_config", "text_config", "thinker_config")

# Keys of config.json that say nothing about what the model computes.
UNRELATED_KEYS = frozenset({
    "_name_or_path", "_model_name_or_path", "_commit_hash", "name_or_path", "architectures", "auto_map", "dtype",
    "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "use_cache",
    "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip
WHOLE_FILE_BYTES = 16 * 2**20  # files up to this size are hashed whole
WINDOW_BYTES = 4096  # of each tensor of a bigger file, at its start and in its middle
MAX_HEADER_BYTES = 100 * 10**6  # the limit of the safetensors format


def read_text(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"model: cannot read {path}: {e}") from e


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`, {} if there is no such file. Raises ConfigError."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as e:
        raise ConfigError(f"model: {path} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ConfigError(f"model: {path} is not a JSON object")
    return found


def missing_part(folder: Path, *, tokenizer_only: bool = False) -> str | None:
    """What keeps `folder` from being a model (from having a tokenizer and a config, with `tokenizer_only`)."""
    if not (folder / "config.json").is_file():
        return "config.json"
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return "tokenizer.json"
    if tokenizer_only:
        return None
    weights = weight_files(folder)
    if not weights:
        return "a .safetensors file (pickled weights are not read)"
    return next((path.name for path in weights if not path.is_file()), None)


def weight_files(folder: Path) -> list[Path]:
    """The model's weight files in order of name: what the index lists, else model.safetensors, else all there are."""
    listed = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(listed, dict):
        return sorted({folder / str(name) for name in listed.values()})
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def check_supported(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Raises ModelUnsupported, naming layer or key, for a model that cannot be split into prefill and decode."""
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type", "unknown"))
    if reason := _obstacle(kind, config, trust_remote_code and bool(config.get("auto_map"))):
        classes = config.get("architectures")
        name = f"{classes[0]} of " if isinstance(classes, list) and classes else ""
        raise ModelUnsupported(f"{name}model type {kind!r} is not supported: {reason}")


def context_limit(folder: Path, max_model_len: int | None) -> int:
    """Tokens of prompt + completion: `max_model_len` if given, else all the model has. Raises ConfigError."""
    config = read_json(folder / "config.json")
    sizes = (config.get(key) for key in CONTEXT_KEYS)
    own = next((size for size in sizes if type(size) is int and size > 0), None)
    if own is None:
        if max_model_len is None:
            raise ConfigError("max_model_len: this model states no context limit, so one must be given")
        return max_model_len
    own = _stable(config) or max(own, _stretched(config))
    if max_model_len is not None and max_model_len > own:
        raise ConfigError(f"max_model_len: {max_model_len} is more than the model's context of {own} tokens")
    return max_model_len or own


def has_chat_template(folder: Path) -> bool:
    config = read_json(folder / "tokenizer_config.json")
    return (folder / "chat_template.jinja").is_file() or bool(config.get("chat_template"))


def eos_token_ids(folder: Path) -> frozenset[int]:
    """Tokens that end a completion: of generation_config.json, config.json and the tokenizer's own, together."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        found.update(v for v in (value if isinstance(value, list) else [value]) if type(v) is int)
    if (own := _tokenizer_eos(folder)) is not None:
        found.add(own)
    return frozenset(found)


def fingerprint(
    folder: Path, *, dtype: str, block_size: int, quantization: str = "none", trust_remote_code: bool = False
) -> bytes:
    """32 bytes that are equal exactly if KV blocks of two workers may be exchanged. Raises ConfigError.

    SHA-256 over the KV wire version, dtype, block size, quantization at load, the computing part of config.json (rope
    and its own quantisation are in it) and each weight file: whole up to 16 MiB, else its size, its header and two
    windows of every tensor, so that a fine-tune of any one layer shows: a few thousand small reads for a dense model of
    100 GB. Of a model whose own code may run, the code too.
    """
    config = {k: v for k, v in read_json(folder / "config.json").items() if k not in UNRELATED_KEYS}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(b"pdq-model")
    for part in (struct.pack("<II", WIRE_VERSION, block_size), dtype.encode(), canonical.encode()):
        _add(digest, part)
    if quantization != "none":
        _add(digest, f"quantization {quantization}".encode())
    weights = weight_files(folder)
    if not weights:
        raise ConfigError(f"model: no .safetensors file in {folder}")
    code = sorted(folder.glob("*.py")) if trust_remote_code else []
    for path in [*weights, *code]:
        _add(digest, path.name.encode())
        try:
            with path.open("rb") as file:
                for part in _samples(path, file):
                    _add(digest, part)
        except OSError as e:
            raise ConfigError(f"model: cannot read {path}: {e}") from e
    return digest.digest()


def _add(digest: hashlib._Hash, part: bytes) -> None:
    digest.update(struct.pack("<Q", len(part)))
    digest.update(part)


def _samples(path: Path, file: BinaryIO) -> Iterator[bytes]:
    size = os.fstat(file.fileno()).st_size
    yield struct.pack("<Q", size)
    if size <= WHOLE_FILE_BYTES:
        yield file.read()
        return
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ConfigError(f"model: {path} is not a safetensors file")
    header = file.read(length)
    yield header
    for start, stop in _tensor_spans(path, header):
        for at in (start, (start + stop) // 2):
            file.seek(8 + length + at)
            yield file.read(min(WINDOW_BYTES, stop - at))


def _tensor_spans(path: Path, header: bytes) -> list[tuple[int, int]]:
    """[start, stop) of every tensor, in bytes after the header."""
    try:
        entries: dict[str, Any] = json.loads(header)
        return sorted(
            (int(e["data_offsets"][0]), int(e["data_offsets"][1])) for k, e in entries.items() if k[:2] != "__"
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as e:
        raise ConfigError(f"model: {path} is not a safetensors file: {e}") from e


def _obstacle(kind: str, config: Mapping[str, Any], own_code: bool) -> str | None:
    """Why the pipeline cannot run this model, or None. own_code: its repository's code may say what it is."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder (is_encoder_decoder); its cross-attention state does not fit KV blocks"
    for key in TOWER_KEYS:
        if config.get(key):
            return f"it is multimodal ({key}); only text models run here"
    if reason := _stateful(kind, config):
        return reason
    if own_code:
        return None
    known = causal_lm_classes()
    if known is not None and kind not in known:
        if config.get("auto_map"):
            return "it needs code from its repository (auto_map), which runs only with --trust-remote-code"
        return "transformers has no causal language model of this type"
    classes = config.get("architectures")
    if (
        isinstance(classes, list)
        and classes
        and not any(str(c).endswith(("ForCausalLM", "LMHeadModel")) for c in classes)
    ):
        return f"{classes[0]} has no causal language model head"
    return None


def _stateful(kind: str, config: Mapping[str, Any]) -> str | None:
    """The layer, key or type that keeps other state than one K and one V per token."""
    layers = next((config[key] for key in LAYER_KEYS if isinstance(config.get(key), list)), None)
    for i, layer in enumerate(layers or ()):
        if layer not in ATTENTION_LAYERS:
            return f"layer {i} is {layer!r}, whose state does not fit KV blocks"
    if kind in STATEFUL_TYPES:
        return "its recurrent or linear-attention layers keep state that does not fit KV blocks"
    if layers is None:
        for key in STATE_KEYS:
            if config.get(key):
                return f"it has state-space or convolution layers ({key}), whose state does not fit KV blocks"
    return None


def _stable(config: Mapping[str, Any]) -> int:
    """The length at which LongRoPE changes all positions and with them stored KV. 0 without."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or not {"longrope", "su"} & {rope.get("rope_type"), rope.get("type")}:
        return 0
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return original if isinstance(original, int) else 0


def _stretched(config: Mapping[str, Any]) -> int:
    """Context that YaRN gives; its configs may state the length before stretching. 0 without."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    return int(original * factor) if isinstance(original, int) and isinstance(factor, int | float) else 0


def _tokenizer_eos(folder: Path) -> int | None:
    config = read_json(folder / "tokenizer_config.json")
    eos = config.get("eos_token", read_json(folder / "special_tokens_map.json").get("eos_token"))
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str):
        return None
    tokenizer = read_json(folder / "tokenizer.json")
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if token.get("content") == text:
            return int(token["id"])
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        if token.get("content") == text:
            return int(key)
    vocab = (tokenizer.get("model") or {}).get("vocab")
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None


@cache
def causal_lm_classes() -> Mapping[str, str] | None:
    """Model type -> class of every causal language model in the installed transformers; None if that cannot be told.

    Read from the source of its table: importing the table would load torch.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    try:
        source = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES" in ast.unparse(node.targets[0]):
                value = node.value
                pairs = ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)
                return {str(kind): str(name) for kind, name in dict(pairs).items()}
    except (OSError, SyntaxError, ValueError, TypeError, IndexError):
        return None
    return None
