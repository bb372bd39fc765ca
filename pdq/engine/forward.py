"""How the forward of a stock model is called with our cache: architectures differ in what arguments they take.

Used by `runner` for every forward and by `probe` for its own; knows nothing of slots or layouts.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from pdq.engine.attention import Attending, running
from pdq.errors import ModelUnsupported


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


def takes_positions(cls: type[PreTrainedModel]) -> bool:
    return "position_ids" in inspect.signature(cls.forward).parameters
