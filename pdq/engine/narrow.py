"""A model of the same architecture and the same layers as a config's, with every width small and random weights.

It is computed in no time, in float32, so that what the modelling code does can be compared exactly, whatever the size
and the dtype of the model itself. Used by `check`, and at load by `forwards`.

Attributes are known by the names that transformers uses for many architectures alike. Where a family has further
widths, the copy cannot be built or run, and `check` says that nothing was compared.
"""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from pdq.engine.kv import LayerShape
from pdq.engine.probe import record

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class NarrowCopy:
    """A narrow copy in float32. layers, reads: as `probe.record` found them."""

    model: PreTrainedModel
    layers: tuple[LayerShape, ...]
    reads: tuple[int, ...]


@torch.inference_mode()
def narrow_copy(config: PreTrainedConfig, *, trust_remote_code: bool) -> NarrowCopy | None:
    """None if this architecture cannot have such widths."""
    state = torch.get_rng_state()
    try:
        model = build(narrowed(config), torch.float32, trust_remote_code=trust_remote_code)
        _randomize(model)
        return NarrowCopy(model, *record(model))
    except Exception as e:  # noqa: BLE001  whatever modelling code makes of widths that it does not expect
        log.debug("no narrow copy of %s: %s", config.model_type, e)
        return None
    finally:
        torch.set_rng_state(state)


def build(config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """A model of `config` with fresh weights, of its own attention."""
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(
        config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
    )
    model.train(False).requires_grad_(False)
    return model


def _randomize(model: PreTrainedModel) -> None:
    """Larger weights than fresh ones, so that attention and positions matter for the logits."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * 2.0 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(noise * 0.2)


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
        if factors := rope.get(name):
            rope[name] = [factors[min(i, len(factors) - 1)] for i in range(rotated // 2)]
