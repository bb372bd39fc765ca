"""Tiny random models of many architectures, made from configs alone: two layers, about a hundred tokens, fixed seed.

Weights are larger than usual initial ones and nothing is left at zero or one, so that attention, positions, masks and
biases all matter for the next token.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from pdq.engine import cpu, kernel_selection
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.model import replace
from pdq.engine.probe import layout_of
from pdq.engine.siblings import families

VOCAB = 101
CONTEXT = 128
WINDOW = 5  # of the architectures with a sliding window

_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
_PLAIN = _SIZES | _HEADS
_GPT: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
_SMALL_HEADS = _PLAIN | {"head_dim": 8}
_MIXED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 6, "head_dim": 4,
}  # fmt: skip
_ALIBI = {"hidden_size": 32, "vocab_size": VOCAB}
_GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "intermediate_size": [64] * 6, "activation_sparsity_pattern": [0.5] + [0.0] * 5, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4, "altup_num_inputs": 2, "sliding_window": WINDOW,
}  # fmt: skip
_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "sliding_window": WINDOW,
    "global_head_dim": 16,
}  # fmt: skip


def rope_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0} | more}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

_TOKENS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": None}

# A transformers model type, with what makes the variant different behind a space.
CONFIGS: dict[str, dict[str, Any]] = {
    # learned positions
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "opt": _PLAIN | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "biogpt": _PLAIN,
    # linear biases
    "bloom": _ALIBI | {"n_layer": 2, "n_head": 4},
    "bloom 6-heads": _ALIBI | {"n_layer": 2, "n_head": 6, "hidden_size": 48},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
    "falcon alibi": _PLAIN | {"alibi": True, "multi_query": False, "parallel_attn": False},
    # rotary positions, on all of a head or part of it
    "falcon": _PLAIN,
    "falcon grouped": _PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": _PLAIN | {"rotary_pct": 0.5},
    "gptj": _GPT | {"rotary_dim": 4},
    "phi": _PLAIN | {"partial_rotary_factor": 0.5},
    "stablelm": _PLAIN | {"partial_rotary_factor": 0.5},
    "nemotron": _PLAIN,
    "glm4": _SMALL_HEADS,
    "llama": _PLAIN,
    "llama tied": _PLAIN | {"tie_word_embeddings": True},
    "llama linear": _PLAIN | rope_of("linear"),
    "llama llama3": _PLAIN | rope_of("llama3", **LLAMA3),
    "llama yarn": _PLAIN | rope_of("yarn", original_max_position_embeddings=32),
    "llama dynamic": _PLAIN | rope_of("dynamic"),
    "phi3": _PLAIN,
    "qwen2": _PLAIN,
    "qwen3": _PLAIN | {"head_dim": 16},
    "olmo2": _PLAIN,
    "granite": _PLAIN | {"attention_multiplier": 0.3, "residual_multiplier": 0.7},
    "cohere": _PLAIN,
    "smollm3": _PLAIN | {"no_rope_layers": [1, 0]},
    "diffllama": _PLAIN,
    # windows, sinks, soft caps, shared KV
    "mistral": _PLAIN | {"sliding_window": WINDOW},
    "starcoder2": _PLAIN | {"sliding_window": WINDOW},
    "cohere2": _PLAIN | _MIXED,
    "exaone4": _PLAIN | _MIXED,
    "gemma": _SMALL_HEADS,
    "gemma2": _SMALL_HEADS | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3_text": _SMALL_HEADS | _MIXED,
    "gemma3n_text": _SMALL_HEADS | _GEMMA3N,
    "gemma4_text": _SMALL_HEADS | _GEMMA4,
    # experts
    "mixtral": _PLAIN | _EXPERTS,
    "phimoe": _PLAIN | _EXPERTS | {"sliding_window": WINDOW},
    "qwen2_moe": _PLAIN | _EXPERTS,
    "qwen3_moe": _PLAIN | _EXPERTS | {"head_dim": 16},
    "olmoe": _PLAIN | _EXPERTS,
    "granitemoe": _PLAIN | _EXPERTS,
    "glm4_moe": _SMALL_HEADS | _EXPERTS | {"first_k_dense_replace": 1},
    "ernie4_5_moe": _PLAIN | _EXPERTS,
    "gpt_oss": _SMALL_HEADS | _EXPERTS | {"sliding_window": WINDOW} | rope_of("default"),
    "mimo_v2_flash": _PLAIN | _EXPERTS | _MIXED | {"head_dim": 12, "v_head_dim": 8, "n_group": 1},
    # latent attention
    "minicpm3": _PLAIN | _LATENT,
    "deepseek_v2": _PLAIN | _LATENT | _EXPERTS | {"first_k_dense_replace": 1},
    "deepseek_v3": _PLAIN | _LATENT | _EXPERTS | {"first_k_dense_replace": 1},
    "glm4_moe_lite": _PLAIN | _LATENT | _EXPERTS,
}


# Those whose forward is compiled as a whole, by the names under which the tests know them so.
_FUSED = ("llama", "llama tied", "llama llama3", "llama yarn", "phi3", "qwen2", "qwen3", "smollm3", "mistral")
COMPILED = {f"{name} compiled": name for name in _FUSED} if cpu.host().avx2 else {}


def tiny_model(arch: str, **overrides: Any) -> PreTrainedModel:
    """A model of `arch` (of CONFIGS, or another model type), float32, the same weights at every call."""
    settings = deepcopy(CONFIGS.get(arch, _PLAIN) | _TOKENS | overrides)  # some configs change what they are given
    torch.manual_seed(0)
    config = CONFIG_MAPPING[arch.split()[0]](**settings)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.eval().requires_grad_(False).parameters():
        scale = 2.0 * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.2
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def compiled_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """name: of COMPILED. With the products that loading gives it."""
    return loaded(tiny_model(COMPILED[name]).to(dtype))


def loaded(model: PreTrainedModel, kernels: KernelSet | None = None) -> PreTrainedModel:
    """With the products that loading gives it. kernels: others than those of this CPU."""
    kernels = kernels or kernel_selection.select(model.dtype)
    replace(model, families(model, lambda: layout_of(model)), kernel_selection.maker(kernels))
    return model


def save_tiny(arch: str, folder: Path, **overrides: Any) -> Path:
    """Write `tiny_model(arch)` as config and safetensors into `folder`."""
    tiny_model(arch, **overrides).save_pretrained(folder)
    return folder
