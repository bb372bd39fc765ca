"""Stands in for cache and attention during one forward and writes down what a model asks of them.

Computes nothing: attention gives zeros, so that a model on the "meta" device, which has shapes but no numbers, can be
recorded as well. What cannot be kept in slots is refused by the layer's name. Part of `probe`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pdq.engine.attention import Lengthless, attention_forward, current
from pdq.engine.kv import LayerShape
from pdq.errors import ModelUnsupported

PROBING = "pdq_probe"  # like attention.IMPLEMENTATION, but the modelling code makes masks for it


class Recorder(Lengthless):
    """Cache and attention of one forward over one sequence."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self._shapes: dict[int, LayerShape] = {}  # of layers that have been attended to
        self._calls: list[tuple[int, nn.Module]] = []
        self._masks: list[tuple[Tensor, int]] = []

    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of all KV that is stored. Raises ModelUnsupported if some layer keeps none or does not attend."""
        attending = {id(module) for _, module in self._calls}
        for i, layer in enumerate(_decoder_layers(self._model)):
            if not attending & {id(module) for module in layer.modules()}:
                self._refuse(i, "does not attend to KV by a pluggable attention function")
        for i in range(max(self._written, default=-1) + 1):
            if i not in self._shapes:
                self._refuse(i, "keeps KV that is not attended to" if i in self._written else "keeps no KV of its own")
        if not self._shapes:
            raise ModelUnsupported(f"{type(self._model).__name__} keeps no KV")
        return tuple(self._shapes[i] for i in range(len(self._shapes)))

    def reads(self) -> tuple[int, ...]:
        """For each attention call, in order, the layer whose KV it saw."""
        return tuple(index for index, _ in self._calls)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self._written:
            self._refuse(layer_idx, "writes KV more than once")
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            self._refuse(layer_idx, f"keeps KV of shapes {tuple(key.shape)} and {tuple(value.shape)}")
        self._written[layer_idx] = key, value
        return key, value

    def make_mask(
        self, mask_function: Callable[..., Any], q_length: int, device: torch.device, local_size: int | None
    ) -> Tensor | None:
        """A tensor that stands for a sliding window of `local_size`, or None for plain causality."""
        if not _is_causal_window(mask_function, local_size):
            name = type(self._model).__name__
            raise ModelUnsupported(f"{name} asks for a mask that is neither causal nor a sliding window")
        if local_size is None:
            return None
        mark = torch.empty((1, 1, q_length, q_length), dtype=torch.bool, device=device)
        self._masks.append((mark, local_size))
        return mark

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        module: nn.Module,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        index, derived = self._source(key, value, module)
        if position_bias is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            self._refuse(index, "is not causal, or biased by position")
        stored_key, stored_value = self._written[index]
        shape = LayerShape(
            stored_key.shape[1], stored_key.shape[3], stored_value.shape[3], self._window(index, mask), derived
        )
        if self._shapes.setdefault(index, shape) != shape:
            self._refuse(index, "has its KV read through different windows or in different forms")
        self._calls.append((index, module))
        return query.new_zeros((*query.shape[:1], query.shape[2], query.shape[1], value.shape[3]))

    def _source(self, key: Tensor, value: Tensor, module: nn.Module) -> tuple[int, bool]:
        """The layer whose KV this is, and whether the model has made something of it since it was stored."""
        for index, (stored_key, stored_value) in self._written.items():
            if key is stored_key and value is stored_value:
                return index, False
        last = max(self._written, default=-1)
        if last < 0 or (last in self._shapes and not self._shapes[last].derived):
            self._refuse(getattr(module, "layer_idx", last + 1), "attends to KV that it did not write itself")
        if key.dim() != 4 or value.dim() != 4 or not key.shape[2] == value.shape[2] == self._written[last][0].shape[2]:
            self._refuse(last, "attends to another number of tokens than it stored")
        return last, True

    def _window(self, layer_idx: int, mask: Tensor | None) -> int | None:
        if mask is None:
            return None
        windows = [window for mark, window in self._masks if mark is mask]
        if not windows:
            self._refuse(layer_idx, "changes its attention mask")
        return windows[0]

    def _refuse(self, layer_idx: int, why: str) -> NoReturn:
        name = _layer_name(self._model, layer_idx)
        raise ModelUnsupported(f"{type(self._model).__name__}: {name} {why}")


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The model's decoder layers; [] if they are not in a list of as many modules."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return []


def _layer_name(model: PreTrainedModel, index: int) -> str:
    """Name and class of a layer, e.g. "layer model.layers.3 (LlamaDecoderLayer)"."""
    layers = _decoder_layers(model)
    if index >= len(layers):
        return f"layer {index}"
    name = next(name for name, module in model.named_modules() if module is layers[index])
    return f"layer {name} ({type(layers[index]).__name__})"


def _is_causal_window(mask_function: Callable[..., Any], window: int | None) -> bool:
    """Is this mask exactly "not after the query, and fewer than `window` positions before it"?

    Asked of queries around every edge where a window, a chunk or a bidirectional stretch would show.
    """
    edge = window or 64
    queries = torch.tensor(sorted({0, 1, 2, 5, max(edge - 1, 0), edge, edge + 1, 2 * edge + 3}))[:, None]
    keys = torch.arange(2 * edge + 6)[None, :]
    zero = torch.tensor(0)
    found = torch.as_tensor(mask_function(zero, zero, queries, keys)).expand(queries.shape[0], keys.shape[1])
    wanted = keys <= queries
    if window is not None:
        wanted &= keys > queries - window
    return bool(torch.equal(found, wanted))


def _mask_of_probe(
    *,
    mask_function: Callable[..., Any],
    q_length: int,
    device: torch.device,
    local_size: int | None = None,
    **options: Any,
) -> Tensor | None:
    """The mask function registered with transformers for the probe."""
    recorder = current()
    if not isinstance(recorder, Recorder):
        raise RuntimeError("the probe's masks were asked for outside a probe")
    return recorder.make_mask(mask_function, q_length, device, local_size)


AttentionInterface.register(PROBING, attention_forward)
AttentionMaskInterface.register(PROBING, _mask_of_probe)
