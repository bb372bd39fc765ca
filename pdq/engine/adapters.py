"""Attention for architectures whose modelling code computes it itself instead of asking for a registered function.

All three are from the time of ALiBi: BLOOM, MPT and Falcon. Their attention modules get a `forward` that makes query,
key and value with the stock layers and hands them to the running step, as `attention.attention_forward` does for all
others; the slopes come from the stock code too. ALiBi knows distances only, so BLOOM and MPT need no position ids: the
places in the slots are enough. Part of `probe`, which checks the result against the stock forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.models.falcon import modeling_falcon

from pdq.engine.attention import current
from pdq.engine.kernels import Alibi

PLACEHOLDER = "pdq_placeholder"  # attention implementation for which a mask that nobody reads is made


def adapt(model: PreTrainedModel) -> bool:
    """Give the attention modules of `model` a forward over slots; False, and nothing is done, if it needs none.

    The stock forward comes back with `restore`.
    """
    if type(model).__name__ not in _ADAPTED:
        return False
    name, slopes, forward = _ADAPTED[type(model).__name__]
    alibi = slopes(model)
    for module in _attention_modules(model, name):
        module.forward = partial(forward, module, alibi)
    return True


def restore(model: PreTrainedModel) -> None:
    """Undo `adapt`."""
    if type(model).__name__ in _ADAPTED:
        for module in _attention_modules(model, _ADAPTED[type(model).__name__][0]):
            module.__dict__.pop("forward", None)


def adaptable(cls: type[PreTrainedModel]) -> bool:
    return cls.__name__ in _ADAPTED and cls.__module__.startswith("transformers.")


def reference(cls: type[PreTrainedModel]) -> str:
    """The implementation of the stock code that is right: Falcon's eager attention adds its biases twice."""
    return "sdpa" if cls.__name__ == "FalconForCausalLM" else "eager"


def _attention_modules(model: PreTrainedModel, name: str) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__ == name]


def _bloom(
    module: Any, bias: Alibi, /, hidden_states: Tensor, residual: Tensor, *, layer_past: Any, **options: Any
) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    key, value = layer_past.update(key, value, module.layer_idx)
    found = current().attend(query, key, value, None, module=module, scaling=module.inv_norm_factor, alibi=bias)
    return residual + module.dense(found.flatten(2)), None


def _mpt(module: Any, bias: Alibi, /, hidden_states: Tensor, *, cache: Any, **options: Any) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = (x.view(*x.shape[:2], module.n_heads, -1).transpose(1, 2) for x in mixed.chunk(3, dim=2))
    key, value = cache.update(key, value, module.layer_idx)
    found = current().attend(query, key, value, None, module=module, scaling=module.softmax_scale, alibi=bias)
    return module.out_proj(found.flatten(2)), None


def _falcon(
    module: Any,
    bias: Alibi | None,
    /,
    hidden_states: Tensor,
    *,
    layer_past: Any,
    position_embeddings: tuple[Tensor, Tensor],
    **options: Any,
) -> tuple[Tensor, None]:
    query, key, value = _split_falcon(module, module.query_key_value(hidden_states))
    if bias is None:
        query, key = _rotate(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, module.layer_idx)
    found = current().attend(query, key, value, None, module=module, scaling=module.inv_norm_factor, alibi=bias)
    return module.dense(found.flatten(2)), None


_rotate: Any = modeling_falcon.apply_rotary_pos_emb


def _split_falcon(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[1, heads, tokens, dim]` each. Unlike the stock code, shared heads are not repeated, so they are stored once."""
    if module.new_decoder_architecture:
        groups = fused.view(*fused.shape[:2], module.num_kv_heads, -1, module.head_dim)
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    else:
        query, key, value = module._split_heads(fused)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _bloom_slopes(model: Any) -> Alibi:
    stock = model.transformer
    two = torch.ones((1, 2), dtype=torch.long, device=model.device)
    return Alibi(stock.build_alibi_tensor(two, stock.num_heads, torch.float32)[:, 0, 1])


def _mpt_slopes(model: Any) -> Alibi:
    stock = model.transformer
    return Alibi(-stock.build_mpt_alibi_tensor(stock.num_heads, 2, device=model.device)[:, 0, 0])


def _falcon_slopes(model: Any) -> Alibi | None:
    """Falcon was trained with slope times position rounded to bfloat16, and scales the sum of score and bias."""
    stock = model.transformer
    if not stock.use_alibi:
        return None
    two = torch.ones((1, 2), dtype=torch.long, device=model.device)
    slopes = modeling_falcon.build_alibi_tensor(two, stock.num_heads, torch.bfloat16)[:, 0, 1]
    return Alibi(slopes, (model.config.hidden_size // stock.num_heads) ** -0.5)


_Adapter = tuple[str, Callable[[Any], Alibi | None], Callable[..., tuple[Tensor, None]]]
_ADAPTED: Mapping[str, _Adapter] = MappingProxyType({
    "BloomForCausalLM": ("BloomAttention", _bloom_slopes, _bloom),
    "MptForCausalLM": ("MptAttention", _mpt_slopes, _mpt),
    "FalconForCausalLM": ("FalconAttention", _falcon_slopes, _falcon),
})  # fmt: skip


def _no_mask(*, device: torch.device, **options: Any) -> Tensor:
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


AttentionMaskInterface.register(PLACEHOLDER, _no_mask)
