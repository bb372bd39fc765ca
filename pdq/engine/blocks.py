"""Finds in a stock model the transformer blocks of the usual kind, whose forward can be put together from other parts.

That is: root-mean-square norms, rotary positions, query, key and value from one product, a gated MLP with SiLU, and
nothing else, as in Llama, Mistral, Qwen 2 and 3. Only what modules the model has is looked at; whether the code that
calls them does nothing else is for `forwards` to try out. Knows nothing of machine code or memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pdq.engine.compiled_product import CompiledProduct
from pdq.engine.kv import LayerShape
from pdq.engine.packed import PackedLinear

_MODEL = {"model", "lm_head"}
_BASE = {"embed_tokens", "layers", "norm", "rotary_emb"}
_BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MIXED = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
_BOTH = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATION = ("act_fn", "activation_fn")
_SILU = {"SiLU", "SiLUActivation"}


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """weight: float32 `[width]`."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """One layer. mixed: query, key and value heads in one row; both: gates, then what is gated.

    queries: how many query heads. turned: by their positions? scaling: of the scores. query_norm, key_norm: of each
    head, or None.
    """

    before_attention: Norm
    mixed: CompiledProduct
    queries: int
    turned: bool
    query_norm: Norm | None
    key_norm: Norm | None
    scaling: float
    attended: CompiledProduct
    before_mlp: Norm
    both: CompiledProduct
    gated: CompiledProduct


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A whole model. embed: ids `[n]` -> `[n, hidden]`; rotary: as in transformers; head: hidden -> vocabulary.

    modules: of the stock code, what `blocks` stand for.
    """

    modules: tuple[nn.Module, ...]
    embed: nn.Module
    rotary: nn.Module
    blocks: tuple[Block, ...]
    norm: Norm
    head: CompiledProduct


def find_decoder(model: PreTrainedModel, layers: Sequence[LayerShape], reads: Sequence[int]) -> Decoder | None:
    """What `model`, with products of `compiled_product`, is made of; None if it is of another kind.

    layers, reads: as the probe found them.
    """
    base: Any = getattr(model, "model", None)
    if base is None or not _has(model, _MODEL) or not _has(base, _BASE) or list(reads) != list(range(len(layers))):
        return None
    head = _product([model.get_output_embeddings()])  # type: ignore[no-untyped-call]
    norm = _norm(base.norm)
    blocks = [_block(block, shape) for block, shape in zip(base.layers, layers, strict=True)]
    if head is None or norm is None or not blocks or not all(blocks):
        return None
    return Decoder(tuple(base.layers), base.embed_tokens, base.rotary_emb, tuple(b for b in blocks if b), norm, head)


def _block(block: Any, shape: LayerShape) -> Block | None:
    if shape.derived or not _has(block, _BLOCK):
        return None
    attention, mlp = block.self_attn, block.mlp
    mixed, both = _first_there(attention, _MIXED), _first_there(mlp, _BOTH)
    activation = [name for name in _ACTIVATION if hasattr(mlp, name)]
    normed = hasattr(attention, "q_norm")
    if (
        not _has(attention, {*mixed, "o_proj"} | (_HEAD_NORMS if normed else set()))
        or not _has(mlp, {*both, *activation, "down_proj"})
        or [type(getattr(mlp, name)).__name__ in _SILU for name in activation] != [True]
    ):
        return None
    norms = [_norm(m) for m in (block.input_layernorm, block.post_attention_layernorm)]
    head_norms = [_norm(attention.q_norm), _norm(attention.k_norm)] if normed else []
    products = [
        _product([getattr(attention, name) for name in mixed]),
        _product([attention.o_proj]),
        _product([getattr(mlp, name) for name in both]),
        _product([mlp.down_proj]),
    ]
    if None in (*norms, *head_norms, *products):
        return None
    found: list[Any] = [*norms, *(head_norms or [None, None]), *products]
    before, after, query_norm, key_norm, qkv, attended, gates, gated = found
    heads = attended.inputs // shape.value_dim
    scaling = float(getattr(attention, "scaling", shape.key_dim**-0.5))
    turned = bool(getattr(attention, "use_rope", True))
    return Block(before, qkv, heads, turned, query_norm, key_norm, scaling, attended, after, gates, gated)


def _first_there(module: nn.Module, choices: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return next((names for names in choices if hasattr(module, names[0])), ())


def _has(module: nn.Module, names: set[str]) -> bool:
    """Are these all of its children, but for what does nothing here?"""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)} == names


def _norm(module: nn.Module) -> Norm | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if [name for name, _ in module.named_parameters()] != ["weight"] or not isinstance(epsilon, float):
        return None
    return Norm(weight.detach().to(torch.float32).contiguous(), epsilon) if isinstance(weight, Tensor) else None


def _product(linears: Sequence[Any]) -> CompiledProduct | None:
    """What computes these layers, all at once and nothing else."""
    if not all(isinstance(linear, PackedLinear) for linear in linears):
        return None
    shared = linears[0].shared
    same = all(linear.shared is shared for linear in linears)
    widths = [linear.out_features for linear in linears]
    return shared.product if same and shared.widths == widths and isinstance(shared.product, CompiledProduct) else None
