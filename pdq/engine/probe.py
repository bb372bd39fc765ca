"""Finds out, by running it once, whether a stock model keeps exactly one K and one V per layer, and of which shape.

A forward over two short interleaved sequences records every cache write, every attention call and every mask that the
modelling code asks for. What does not fit the slots (recurrent state, shared or compressed KV, other masks than causal
and sliding) is refused by the layer's name. The logits are then compared with the model's own, so an architecture
that places tokens by anything but the position ids it is given is refused too. Used at load; not part of a request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from pdq.engine.attention import IMPLEMENTATION, attention_forward, current, running
from pdq.engine.kernels import Scores, written_out
from pdq.engine.kv import LayerShape, Layout
from pdq.errors import ModelUnsupported

_PROBING = "pdq_probe"  # like IMPLEMENTATION, but the modelling code makes masks for it
_TOKENS = 8  # of each of the two sequences
_KV_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Half precision differs by a percent or two between kernels, and an expert may be chosen differently; a token in the
# wrong place or a wrong mask changes the logits as a whole.
_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Probed:
    """What a model turned out to be. max_positions: text length up to which stored KV stays valid; None: any."""

    layout: Layout
    max_positions: int | None


_known: WeakKeyDictionary[PreTrainedModel, Probed] = WeakKeyDictionary()


def layout_of(model: PreTrainedModel) -> Probed:
    """The KV layout of `model`, whose attention implementation is switched to ours. Raises ModelUnsupported."""
    if model not in _known:
        check_class(type(model), model.config)
        _known[model] = Probed(Layout(_probe(model), model.dtype), _longest_stable(model))
    return _known[model]


def cache_argument(model: PreTrainedModel) -> str:
    """What `forward` of this architecture calls its cache."""
    names = inspect.signature(model.forward).parameters
    found = [name for name in ("cache", "past_key_values") if name in names]
    if not found:
        raise ModelUnsupported(f"{_name(model)} takes no KV cache")
    return found[0]


def check_class(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse what config and class alone show, before any weights are read. Raises ModelUnsupported."""
    name = cls.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{name} is an encoder-decoder: its KV does not follow from a token prefix")
    for i, kind in enumerate(getattr(config.get_text_config(), "layer_types", None) or []):
        if kind not in _KV_LAYER_TYPES:
            raise ModelUnsupported(f"{name}: layer {i} is of type {kind}; only full and sliding attention can run here")
    if not cls.is_backend_compatible():  # type: ignore[no-untyped-call]
        raise ModelUnsupported(f"{name} does not support pluggable attention functions")
    if "position_ids" not in inspect.signature(cls.forward).parameters:
        raise ModelUnsupported(f"{name} takes no position_ids")


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__


def _layer_count(model: PreTrainedModel) -> int:
    count: int = model.config.get_text_config().num_hidden_layers
    return count


def _layer_name(model: PreTrainedModel, index: int) -> str:
    """Name and class of a layer, e.g. "layer model.layers.3 (LlamaDecoderLayer)"."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == _layer_count(model):
            return f"layer {name}.{index} ({type(module[index]).__name__})"
    return f"layer {index}"


def _longest_stable(model: PreTrainedModel) -> int | None:
    """Refuse rotary embeddings that change with the text's length; or the length up to which they do not."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    kinds = {p.get("rope_type", "default") for p in nested}
    if "dynamic" in kinds:
        raise ModelUnsupported(f"{_name(model)}: dynamic rotary scaling changes stored KV as a text grows")
    if "longrope" in kinds:
        limits = [p.get("original_max_position_embeddings") for p in nested if p.get("rope_type") == "longrope"]
        return min(int(x) for x in [*limits, config.max_position_embeddings] if x)
    return None


def _probe(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * _TOKENS, device=model.device) * 7 + 3) % vocab
    record = _Recorder(model)
    try:
        logits = _run(model, record, ids)
        layers = record.layers()
        _compare(model, logits[:, 0::2], ids[0::2])
    except ModelUnsupported:
        raise
    except Exception as e:
        raise ModelUnsupported(f"{_name(model)} cannot run over KV slots: {type(e).__name__}: {e}") from e
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    return layers


@torch.inference_mode()
def _run(model: PreTrainedModel, record: _Recorder, ids: torch.Tensor) -> torch.Tensor:
    """Logits of both sequences, interleaved: each position id occurs twice in a row."""
    model.set_attn_implementation(_PROBING)
    positions = torch.arange(_TOKENS, device=ids.device).repeat_interleave(2).unsqueeze(0)
    with running(record):
        out = model(ids.unsqueeze(0), position_ids=positions, use_cache=True, **{cache_argument(model): record})
    logits: torch.Tensor = out.logits
    return logits


@torch.inference_mode()
def _compare(model: PreTrainedModel, ours: torch.Tensor, ids: torch.Tensor) -> None:
    """Raise unless the model computes the same for the sequence alone by its own attention."""
    model.set_attn_implementation("eager")
    stock = model(ids.unsqueeze(0), use_cache=False).logits.float()
    error = float((ours.float() - stock).norm() / stock.norm().clamp(min=1e-12))
    if not error <= _TOLERANCE:
        raise ModelUnsupported(
            f"{_name(model)}: logits from KV slots are {error:.0%} off the model's own; it uses something that is "
            f"not a function of tokens, position ids and KV"
        )


class _Recorder:
    """Cache and attention of the probe: records, and computes plainly."""

    is_compileable = False

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._shapes: dict[int, LayerShape] = {}
        self._windows: list[tuple[torch.Tensor, int]] = []
        self._pending: tuple[int, torch.Tensor, torch.Tensor] | None = None

    def layers(self) -> tuple[LayerShape, ...]:
        """The shapes of all layers. Raises ModelUnsupported if one has no KV."""
        count = _layer_count(self._model)
        for i in range(count):
            if i not in self._shapes:
                self._refuse(i, "keeps no KV of its own")
        if len(self._shapes) != count:
            self._refuse(max(self._shapes), f"keeps KV beyond the model's {count} layers")
        return tuple(self._shapes[i] for i in range(count))

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx in self._shapes or self._pending is not None:
            self._refuse(layer_idx, "writes KV more than once, or without attending to it")
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            self._refuse(layer_idx, f"keeps KV of shapes {tuple(key.shape)} and {tuple(value.shape)}")
        self._pending = (layer_idx, key, value)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def make_mask(
        self, mask_function: Callable[..., Any], q_length: int, device: torch.device, local_size: int | None
    ) -> torch.Tensor | None:
        """A tensor that stands for a sliding window of `local_size`, or None for plain causality."""
        if not _is_causal_window(mask_function, local_size):
            raise ModelUnsupported(f"{_name(self._model)} asks for a mask that is neither causal nor a sliding window")
        if local_size is None:
            return None
        mark = torch.empty((1, 1, q_length, q_length), dtype=torch.bool, device=device)
        self._windows.append((mark, local_size))
        return mark

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        module: nn.Module,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        position_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if self._pending is None:
            self._refuse(getattr(module, "layer_idx", len(self._shapes)), "attends to KV that it did not write itself")
        layer_idx, written_key, written_value = self._pending
        self._pending = None
        if key is not written_key or value is not written_value:
            self._refuse(layer_idx, "stores KV in another form than it attends to")
        if position_bias is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            self._refuse(layer_idx, "is not causal, or biased by position")
        window = self._window(layer_idx, mask)
        self._shapes[layer_idx] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
        return _attend_interleaved(query, key, value, window, Scores(scaling, softcap, s_aux))

    def _window(self, layer_idx: int, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            return None
        windows = [window for mark, window in self._windows if mark is mask]
        if not windows:
            self._refuse(layer_idx, "changes its attention mask")
        return windows[0]

    def _refuse(self, layer_idx: int, why: str) -> NoReturn:
        raise ModelUnsupported(f"{_name(self._model)}: {_layer_name(self._model, layer_idx)} {why}")


def _attend_interleaved(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None, scores: Scores
) -> torch.Tensor:
    """Attention of rows that belong to two sequences in turn; `[1, tokens, heads, value_dim]`."""
    group = query.shape[1] // key.shape[1]
    row = torch.arange(query.shape[2], device=query.device)
    back = (row[:, None] - row[None, :]) // 2  # in positions, where both rows are of one sequence
    seen = ((row[:, None] - row[None, :]) % 2 == 0) & (back >= 0)
    if window is not None:
        seen &= back < window
    mask = torch.zeros(seen.shape, device=query.device).masked_fill_(~seen, float("-inf"))
    sinks = None if scores.sinks is None else scores.sinks[:, None]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    return written_out(query, keys, values, mask, scores, sinks).transpose(1, 2)


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
) -> torch.Tensor | None:
    """The mask function registered with transformers for the probe."""
    record = current()
    if not isinstance(record, _Recorder):
        raise RuntimeError("the probe's masks were asked for outside a probe")
    return record.make_mask(mask_function, q_length, device, local_size)


AttentionInterface.register(_PROBING, attention_forward)
AttentionMaskInterface.register(_PROBING, _mask_of_probe)
