"""Tiny random models of many architectures, made from configs alone: two layers, about a hundred tokens, fixed seed.

Weights are larger than usual initial ones and nothing is left at zero or one, so that attention, positions, masks and
biases all matter for the next token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB = 101
CONTEXT = 128
WINDOW = 5  # of the architectures with a sliding window

_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
_PLAIN = _SIZES | _HEADS
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": None}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN | {"head_dim": 16},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT},
    "gpt_neox": _SIZES | {"num_attention_heads": 4, "max_position_embeddings": CONTEXT, "rotary_pct": 0.5},
    "gemma2": _PLAIN | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3_text": _PLAIN
    | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": _PLAIN,
    "mistral": _PLAIN | {"sliding_window": WINDOW},
    "mixtral": _PLAIN | _EXPERTS,
    "gpt_oss": _PLAIN
    | _EXPERTS
    | {"head_dim": 8, "sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def tiny_model(arch: str, **overrides: Any) -> PreTrainedModel:
    """A model of `arch` (a transformers model type), float32, the same weights at every call."""
    settings = CONFIGS.get(arch, _PLAIN) | _TOKENS | overrides
    torch.manual_seed(0)
    config = CONFIG_MAPPING[arch](**settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.eval().requires_grad_(False).parameters():
        scale = 2.0 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def save_tiny(arch: str, folder: Path, **overrides: Any) -> Path:
    """Write `tiny_model(arch)` as config and safetensors into `folder`."""
    tiny_model(arch, **overrides).save_pretrained(folder)
    return folder
