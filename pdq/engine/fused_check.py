"""Compares a forward that is compiled as a whole with the stock modelling code, before it is believed.

Modules show what a model is made of, not what the code that calls them does with positions: `Ministral3` has Llama's
modules and scales its queries beyond its original context. So the comparison is made near the beginning of a text and
far into it, beyond every threshold that the config names, behind KV that is there already; block by block, where each
is given what the stock code gives it, and of the logits as a whole.

A model in bfloat16 is compared within what rounding makes of that, which could hide a few percent. So its config is
compared too, as a narrow copy with random weights in float32, within 1e-4.

Used by `forwards`, at load and for `check`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pdq.engine.blocks import Decoder
from pdq.engine.forward import OverSlots, Pieces
from pdq.engine.fused import FusedForward
from pdq.engine.kv import Layout, TorchSlot
from pdq.engine.probe import far_starts, over_slots, short_text

# How far results may be from those of the stock code, of their norm: of one block, and of a whole model, where errors
# of rounding grow from layer to layer.
_ONE = {torch.float32: 1e-4, torch.bfloat16: 0.03}
_ALL = {torch.float32: 1e-3, torch.bfloat16: 0.25}
_HALF_STEP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}  # the stock code rounds what goes from block to block
_HISTORY = 24  # tokens of made-up KV before the text that is compared


@dataclass(frozen=True, slots=True)
class Pair:
    """A compiled forward of `decoder`, and the stock one of the same model."""

    model: PreTrainedModel
    decoder: Decoder
    layout: Layout
    ours: FusedForward
    stock: OverSlots


@torch.inference_mode()
def difference(pair: Pair, max_positions: int | None) -> str | None:
    """Where the two differ by more than rounding; None: nowhere. max_positions: of a text; None: any."""
    ids, dtype = short_text(pair.model), pair.layout.dtype
    for start in (0, *far_starts(pair.model.config, len(ids) + _HISTORY, max_positions)):
        found, right = (over_slots(pair.layout, ids, (forward, forward), start) for forward in (pair.ours, pair.stock))
        if not _near(found, right, _ALL[dtype]):
            return f"the logits of a text from position {start} on"
        if part := _part_that_differs(pair, ids, start):
            return f"{part} in a text from position {start} on"
    return None


def _part_that_differs(pair: Pair, ids: Tensor, start: int) -> str | None:
    """Each block alone, given what the stock code gives it: a token of one sequence, and several of another.

    The text crosses the threshold that `start` is before; in front of it there is KV of _HISTORY tokens.
    """
    decoder, layout = pair.decoder, pair.layout
    text = _Text(layout, ids, start)
    with _Watcher(decoder.modules) as seen:
        logits = pair.stock(text.pieces(), ids, text.positions, text.rows)
    if len(seen.blocks) != len(decoder.blocks) or not _near(decoder.embed(ids), seen.blocks[0][0], 0.0):
        return "what comes before the first block"
    for i, (block, (given, made)) in enumerate(zip(decoder.blocks, seen.blocks, strict=True)):
        alone = replace(decoder, embed=_Given(given), blocks=(block,))
        one = FusedForward(alone, layout.layers[i : i + 1], layout.dtype)
        found = one(text.pieces(i), ids, text.positions, text.rows)
        allowed = (made - given).float().norm() * _ONE[layout.dtype] + made.float().norm() * _HALF_STEP[layout.dtype]
        if not float((one.hidden(len(ids)) - made.float()).norm()) <= allowed:
            return f"block {i}"
    return None if _near(found, logits, _ONE[layout.dtype]) else "the head"


class _Text:
    """The new tokens of two sequences: one of the first, the others of the second, behind KV that is made up."""

    def __init__(self, layout: Layout, ids: Tensor, start: int) -> None:
        self._layout, self._count = layout, len(ids)
        self.rows = torch.arange(len(ids))
        self.positions = torch.cat([torch.arange(n) for n in (1, len(ids) - 1)]) + (start + _HISTORY)
        generator = torch.Generator().manual_seed(start)
        sizes = [[(s.heads, _HISTORY, dim) for dim in (s.key_dim, s.value_dim)] for s in layout.layers]
        self._history = [[torch.randn(size, generator=generator).to(layout.dtype) for size in pair] for pair in sizes]

    def pieces(self, layer: int | None = None) -> Pieces:
        """New slots of all layers, or of one."""
        chosen = slice(None) if layer is None else slice(layer, layer + 1)
        layout = Layout(self._layout.layers[chosen], self._layout.dtype)
        return [(self._slot(layout, self._history[chosen], n), n) for n in (1, self._count - 1)]

    def _slot(self, layout: Layout, history: Sequence[Sequence[Tensor]], count: int) -> TorchSlot:
        slot = TorchSlot(layout, _HISTORY + count, torch.device("cpu"))
        planes = slot.planes(0, _HISTORY)
        for plane, made in zip(planes, (made for pair in history for made in pair), strict=True):
            plane[0] = made
        slot.length = _HISTORY
        return slot


class _Watcher:
    """Notes what stock blocks are given and make, in the order of their calls."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.blocks: list[tuple[Tensor, Tensor]] = []
        self._modules = modules

    def __enter__(self) -> _Watcher:
        self._hooks = [module.register_forward_hook(self._see) for module in self._modules]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _see(self, block: nn.Module, arguments: tuple[Any, ...], made: Any) -> None:
        first, result = arguments[:1], made[0] if isinstance(made, tuple) else made
        if first and first[0].dim() == result.dim() == 3:
            self.blocks.append((first[0][0], result[0]))


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
