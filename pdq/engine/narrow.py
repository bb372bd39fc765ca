"""A config of the same architecture and the same layers, with every width small. Part of `check`.

Attributes are known by the names that transformers uses for many architectures alike. Where a family has further
widths, the copy cannot be built or run, and `check` says that nothing was compared.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from transformers import PreTrainedConfig

_HEADS, _HEAD_DIM = 4, 16
_WIDTHS = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": _HEADS * _HEAD_DIM,
    "word_embed_proj_dim": _HEADS * _HEAD_DIM,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_hidden_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_attention_heads": _HEADS,
    "num_attention_heads_per_layer": _HEADS,
    "head_dim": _HEAD_DIM,
    "global_head_dim": _HEAD_DIM,
    "kv_channels": _HEAD_DIM,
    "rotary_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "zero_expert_num": 2,
    "sliding_window": 5,
}
_AT_MOST = {"num_experts_per_tok": 2, "moe_k": 2, "top_k_experts": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


def narrowed(config: PreTrainedConfig) -> PreTrainedConfig:
    """See the module. `config` itself stays as it is."""
    narrow = deepcopy(config)
    per_layer: dict[str, dict[str, Any]] = config.to_dict().get("per_layer_config") or {}
    if per_layer:
        narrow.per_layer_config = None  # as long as it is there, nobody may read what differs
    heads = getattr(narrow, "num_attention_heads", None)
    for name, width in _WIDTHS.items():
        _set(narrow, name, width)
    for name, most in _AT_MOST.items():
        if isinstance(getattr(narrow, name, None), int):
            _set(narrow, name, min(most, getattr(narrow, name)))
    for name in _KV_HEADS:
        own = getattr(narrow, name, None)
        if isinstance(own, int):
            _set(narrow, name, 1 if own == 1 else _HEADS if own == heads else _HEADS // 2)
    if isinstance(rotated := getattr(narrow, "qk_rope_head_dim", None), int):
        _set(narrow, "head_dim", rotated)  # what latent attention calls so
    for name in _SPECIAL_TOKENS:
        _set(narrow, name, 0)
    parameters = getattr(narrow, "rope_parameters", None) or {}
    for rope in [parameters, *(p for p in parameters.values() if isinstance(p, dict))]:
        _shorten(rope, narrow)
    if per_layer:
        narrow.per_layer_config = {int(i): _overrides(own) for i, own in per_layer.items()}
    return narrow


def _overrides(own: dict[str, Any]) -> dict[str, Any]:
    """One layer's own widths: narrow, and still other than those of the model."""
    small = {"head_dim": 2 * _HEAD_DIM} | dict.fromkeys(_KV_HEADS, 1)
    return {name: small.get(name, _WIDTHS.get(name, value)) for name, value in own.items()}


def _set(config: Any, name: str, value: int) -> None:
    """Where the config has a number under `name`, or one per layer. Names that only compute it are left alone."""
    own = getattr(config, name, None)
    if isinstance(own, list | tuple):
        wanted: Any = [value] * len(own)
    elif isinstance(own, int) and not isinstance(own, bool):
        wanted = value
    else:
        return
    try:
        setattr(config, name, wanted)
    except AttributeError:  # a property of other widths
        return


def _shorten(rope: dict[str, Any], config: Any) -> None:
    """LongRoPE has a factor for every pair of rotated dimensions."""
    rotated = int(_HEAD_DIM * rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0))
    if hasattr(config, "qk_rope_head_dim"):
        rotated = config.qk_rope_head_dim
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            rope[name] = rope[name][: rotated // 2]
