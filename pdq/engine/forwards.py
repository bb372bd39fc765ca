"""Which forward computes a model here: compiled as a whole, where that can be, or its stock code with our attention.

The compiled one is put together from what modules a model has, so it is believed only where its logits are those of the
stock code. Used by `runner`, once at load.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pdq.engine import compiled, compiled_chunk, products
from pdq.engine.blocks import Decoder, find_decoder
from pdq.engine.compiled_product import supported
from pdq.engine.forward import OverSlots, StockForward
from pdq.engine.fused import FusedForward
from pdq.engine.kv import Layout, TorchSlot
from pdq.engine.probe import Probed, over_slots, short_text

log = logging.getLogger(__name__)

# How far results may be from those of the stock code, of their norm: of one block, and of a whole model, where errors
# of rounding grow from layer to layer.
_ONE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
_ALL = {torch.float32: 1e-3, torch.bfloat16: 0.25}
_HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # the stock code rounds what goes from block to block


def fastest_forward(model: PreTrainedModel, probed: Probed, may_compile: bool = True) -> OverSlots:
    """model: as `model.load_model` makes it; probed: of it. On a CPU this measures and compiles for about a second."""
    if model.device.type != "cpu":
        return StockForward(model, probed.layout.layers, probed.reads)
    kernel = may_compile and compiled.trial(model.dtype)
    stock = StockForward(model, probed.layout.layers, probed.reads, products.trial(model.dtype), kernel)
    return (fused(model, probed, stock) if kernel else None) or stock


@torch.inference_mode()
def fused(model: PreTrainedModel, probed: Probed, stock: OverSlots) -> FusedForward | None:
    """None where `model` is of another kind, is faster otherwise, or does what its modules do not show."""
    layers = probed.layout.layers
    if not supported(model.dtype) or not compiled_chunk.trial(model.dtype):
        return None
    decoder = find_decoder(model, layers, probed.reads)
    if decoder is None or not FusedForward.can(decoder, layers, model.dtype):
        return None
    ours = FusedForward(decoder, layers, model.dtype)
    ids = short_text(model)
    found, right = (over_slots(probed.layout, ids, (forward, forward)) for forward in (ours, stock))
    if not (_near(found, right, _ALL[model.dtype]) and _block_by_block(decoder, probed.layout, ids, stock)):
        log.info("%s is computed by its own code: it does more than its modules show", type(model).__name__)
        return None
    return ours


def _block_by_block(decoder: Decoder, layout: Layout, ids: Tensor, stock: OverSlots) -> bool:
    """Does each block, alone and given what the stock code gives it, make of that what the stock code makes?"""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(block: nn.Module, arguments: tuple[Any, ...], made: Any) -> None:
        first, result = arguments[:1], made[0] if isinstance(made, tuple) else made
        if first and first[0].dim() == result.dim() == 3:
            seen.append((first[0][0], result[0]))

    rows = torch.arange(len(ids))
    hooks = [module.register_forward_hook(see) for module in decoder.modules]
    try:
        logits = stock([(TorchSlot(layout, len(ids), ids.device), len(ids))], ids, rows, rows)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != len(decoder.blocks) or not _near(decoder.embed(ids), seen[0][0], 0.0):
        return False
    for block, shape, (given, made) in zip(decoder.blocks, layout.layers, seen, strict=True):
        one = FusedForward(replace(decoder, embed=_Given(given), blocks=(block,)), [shape], layout.dtype)
        slot = TorchSlot(Layout((shape,), layout.dtype), len(ids), ids.device)
        found = one([(slot, len(ids))], ids, rows, rows)
        added = (made - given).float().norm() * _ONE[layout.dtype] + made.float().norm() * _HALF_STEP[layout.dtype]
        if not float((one.hidden(len(ids)) - made.float()).norm()) <= added:
            return False
    return _near(found, logits, _ONE[layout.dtype])


class _Given(nn.Module):
    """Stands in for the embedding."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        return self._rows


def _near(found: Tensor, right: Tensor, part: float) -> bool:
    """Not so if there is anything but numbers."""
    return bool((found.float() - right.float()).norm() <= part * right.float().norm())
