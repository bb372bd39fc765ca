"""Tiny random models of many architectures, made from configs alone: two layers, about a hundred tokens, fixed seed.

Weights are larger than usual initial ones, so that attention, positions and masks matter for the next token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCAB = 101
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": None}

WINDOW = 5
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | _HEADS,
    "qwen2": _SIZES | _HEADS,
    "qwen3": _SIZES | _HEADS | {"head_dim": 16},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": _SIZES | {"num_attention_heads": 4, "max_position_embeddings": 128, "rotary_pct": 0.5},
    "gemma2": _SIZES | _HEADS | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3_text": _SIZES
    | _HEADS
    | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": _SIZES | _HEADS,
    "mistral": _SIZES | _HEADS | {"sliding_window": WINDOW},
    "mixtral": _SIZES | _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": _SIZES
    | _HEADS
    | {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def tiny_model(arch: str, **overrides: Any) -> PreTrainedModel:
    """A model of `arch` (a transformers model type), float32, the same weights at every call."""
    settings = CONFIGS.get(arch, _SIZES | _HEADS) | _TOKENS | overrides
    config = CONFIG_MAPPING[arch](**settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 2.0 * parameter.shape[-1] ** -0.5, generator=generator)
    return model


def save_tiny(arch: str, folder: Path, **overrides: Any) -> Path:
    """Write `tiny_model(arch)` as config and safetensors into `folder`."""
    tiny_model(arch, **overrides).save_pretrained(folder)
    return folder
