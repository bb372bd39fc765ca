"""The forward of a stock model over pieces of KV slots: architectures differ in how it is called.

Used by `runner` where `fused` cannot compute a model, and by `probe`; `attention.Step` is the model's cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from pdq.engine.attention import Attending, Step, running
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.kv import LayerShape, TorchSlot
from pdq.errors import ModelUnsupported

Pieces: TypeAlias = Sequence[tuple[TorchSlot, int]]
# Of pieces, (slot, new tokens), those of one token first, with their ids and positions, `[tokens]`: logits `[n, vocab]`
# of the rows `keep` `[n]`. The KV of the new tokens is written from `slot.length` on, wherever their positions are; the
# lengths stay.
OverSlots: TypeAlias = Callable[[Pieces, Tensor, Tensor, Tensor], Tensor]


class Forward:
    """The forward of `model`. Raises ModelUnsupported if it takes no cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        names = inspect.signature(model.forward).parameters
        caches = [name for name in ("cache", "past_key_values") if name in names]
        if not caches:
            raise ModelUnsupported(f"{type(model).__name__} takes no KV cache")
        self._model = model
        self._cache = caches[0]
        self._takes_positions = takes_positions(type(model))
        self._keeps_logits = "logits_to_keep" in names

    def __call__(self, cache: Attending, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Logits `[n, vocab]` of the rows `keep` `[n]`; ids and positions: `[tokens]`. `cache` attends."""
        arguments: dict[str, Any] = {self._cache: cache, "use_cache": True}
        if self._takes_positions:
            arguments["position_ids"] = positions.unsqueeze(0)
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        with running(cache):
            logits: Tensor = self._model(ids.unsqueeze(0), **arguments).logits[0]
        return logits if self._keeps_logits else logits[keep]


class StockForward:
    """The forward of `model` over slots: an `OverSlots`. The rest is for `attention.Step`, or the class `step`."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerShape],
        reads: Sequence[int],
        kernels: KernelSet | None = None,
        step: type[Step] = Step,
    ) -> None:
        self._forward = Forward(model)
        self._step, self._layers, self._reads = step, layers, reads
        self._kernels = kernels or KernelSet()

    def __call__(self, pieces: Pieces, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        step = self._step(self._layers, self._reads, pieces, self._kernels)
        return self._forward(step, ids, positions, keep)


def takes_positions(cls: type[PreTrainedModel]) -> bool:
    return "position_ids" in inspect.signature(cls.forward).parameters
