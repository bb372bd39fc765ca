"""Finds out, by running it, whether a stock model can live on slots: one K and one V per layer, and of which shape.

First a forward that only records: every cache write, every attention call and every mask that the modelling code asks
for (`recorder`). What does not fit the slots (recurrent state, other masks than causal and sliding) is refused by the
layer's name. Then a short text is computed over slots, in pieces and beside another text, and the logits are compared
with the model's own, so an architecture that places tokens by anything but the position ids it is given is refused
too. Used at load and by `check`; not part of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pdq.engine.adapters import PLACEHOLDER, adapt, adaptable, reference, restore
from pdq.engine.attention import IMPLEMENTATION, Step
from pdq.engine.forward import Forward, OverSlots, StockForward, takes_positions
from pdq.engine.kv import LayerShape, Layout, TorchSlot
from pdq.engine.recorder import PROBING, Recorder
from pdq.errors import ModelUnsupported

_TOKENS = 8  # of the text that is compared
_LENGTHS = ("max_position_embeddings", "n_positions")  # of the longest text, as configs name it
_THRESHOLDS = ("original_max_position_embeddings", "floor_scale", "attention_chunk_size")  # of scaling by position
_FAR = 4096
_KV_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Half precision differs by a percent or two between kernels, and an expert may be chosen differently; a token in the
# wrong place or a wrong mask changes the logits as a whole.
_TOLERANCE = {torch.float32: 0.01}
_HALF_TOLERANCE = 0.25


class CannotRun(ModelUnsupported):
    """The modelling code failed, for whatever reason: less certain than a refusal, for a model without numbers."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a model turned out to be.

    reads: for each attention call of a forward, in order, the layer (of `layout`) whose KV it sees. max_positions: text
    length up to which stored KV stays valid; None: any.
    """

    layout: Layout
    reads: tuple[int, ...]
    max_positions: int | None


_known: WeakKeyDictionary[PreTrainedModel, Probed] = WeakKeyDictionary()


def layout_of(model: PreTrainedModel) -> Probed:
    """The KV layout of `model`, whose attention is switched to ours for good. Raises ModelUnsupported."""
    if model not in _known:
        check_class(type(model), model.config)
        limit = longest_stable(model.config)
        layers, reads = record(model)
        compare(model, layers, reads)
        _known[model] = Probed(Layout(layers, model.dtype), reads, limit)
    return _known[model]


def check_class(cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse what config and class alone show, before any weights are read. Raises ModelUnsupported."""
    name = cls.__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{name} is an encoder-decoder: its KV does not follow from a token prefix")
    if config.get_text_config() is not config:
        raise ModelUnsupported(f"{name} is multimodal; only text models run here")
    for i, kind in enumerate(getattr(config.get_text_config(), "layer_types", None) or []):
        if kind not in _KV_LAYER_TYPES:
            raise ModelUnsupported(f"{name}: layer {i} is of type {kind}; only full and sliding attention can run here")
    if adaptable(cls):
        return
    if not takes_positions(cls):
        raise ModelUnsupported(f"{name} takes no position_ids")


def longest_stable(config: PreTrainedConfig) -> int | None:
    """The length of a text up to which no rotary embedding changes with it, so that stored KV stays valid."""
    config = config.get_text_config()
    limits: list[int | None] = []
    for p in ropes(config):
        if p.get("rope_type") in ("dynamic", "longrope"):
            limits += [p.get("original_max_position_embeddings"), getattr(config, "max_position_embeddings", None)]
    return min((int(x) for x in limits if x), default=None)


def far_starts(config: PreTrainedConfig, length: int, max_positions: int | None) -> list[int]:
    """Positions at which texts of `length` tokens begin so that they cross each threshold of the config, and go beyond.

    Without a threshold one far from the beginning. Windows are no thresholds: they are crossed by narrow copies, where
    they are shorter than the text. max_positions: see `Probed`.
    """
    config = config.get_text_config()
    limits = [getattr(config, name, None) for name in _LENGTHS]
    limit = min((int(x) for x in (*limits, max_positions) if x), default=_FAR)
    scopes = (vars(config), *ropes(config))
    named = [scope.get(name) for scope in scopes for name in _THRESHOLDS]
    thresholds = {int(x) for x in named if isinstance(x, int | float) and x > 0}
    starts = {start for t in thresholds for start in (t - length // 2, 3 * t)} or {_FAR}
    return sorted(start for start in {min(start, limit - length) for start in starts} if start > 0)


def ropes(config: Any) -> list[dict[str, Any]]:
    """The rope parameters: those of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


@torch.inference_mode()
def record(model: PreTrainedModel) -> tuple[tuple[LayerShape, ...], tuple[int, ...]]:
    """Layers and reads (see `Probed`), from a forward in which nothing is attended to; the model may be on "meta"."""
    recorder = Recorder(model)
    ids = short_text(model)
    _use(model, PLACEHOLDER if adapt(model) else PROBING)
    try:
        rows = torch.arange(len(ids), device=ids.device)
        Forward(model)(recorder, ids, rows, rows)
        return recorder.layers(), recorder.reads()
    except ModelUnsupported:
        raise
    except Exception as e:
        raise CannotRun(f"{_name(model)} cannot run over KV slots: {type(e).__name__}: {e}") from e


@torch.inference_mode()
def compare(model: PreTrainedModel, layers: tuple[LayerShape, ...], reads: tuple[int, ...]) -> None:
    """Raise ModelUnsupported unless the model computes over slots what it computes alone by its own attention.

    Over slots it does so in pieces and beside another text, at the beginning of a text and far into it. Leaves the
    model with our attention.
    """
    ids = short_text(model)
    far = far_starts(model.config, len(ids), longest_stable(model.config)) if takes_positions(type(model)) else []
    for start in (0, *far):
        stock = stock_logits(model, ids, start)
        ours = try_out(model, layers, reads, start)
        error = float((ours - stock).norm() / stock.norm().clamp(min=1e-12))
        if not error <= _TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
            raise ModelUnsupported(
                f"{_name(model)}: logits from KV slots are {error:.0%} off the model's own in a text from position "
                f"{start} on; it uses something that is not a function of tokens, position ids and KV"
            )


@torch.inference_mode()
def try_out(
    model: PreTrainedModel, layers: tuple[LayerShape, ...], reads: tuple[int, ...], start: int = 0
) -> torch.Tensor:
    """float32 logits `[tokens, vocab]` of the text that is compared, over slots. Leaves the model with our attention.

    start: position of its first token. Raises CannotRun.
    """
    _use(model, PLACEHOLDER if adapt(model) else IMPLEMENTATION)
    try:
        forwards = [StockForward(model, layers, reads, step=step) for step in (Step, _Later)]
        return over_slots(Layout(layers, model.dtype), short_text(model), forwards, start)
    except Exception as e:
        raise CannotRun(f"{_name(model)} cannot run over KV slots: {type(e).__name__}: {e}") from e


@torch.inference_mode()
def over_slots(layout: Layout, ids: torch.Tensor, forwards: Sequence[OverSlots], start: int = 0) -> torch.Tensor:
    """float32 `[tokens, vocab]` of `ids`, computed in pieces, beside the same text backwards.

    forwards: of which one computes the beginnings, the other the rest. start: position of the first token.
    """
    texts = [ids, ids.flip(0)]
    slots = [TorchSlot(layout, len(ids), ids.device) for _ in texts]
    rest = len(ids) - 4
    logits = []
    # New tokens of both texts; the single tokens of a forward come first.
    for i, counts in enumerate(((rest, 1), (1, rest), (2, 1), (1, 2))):
        order = sorted(range(2), key=lambda text: counts[text] > 1)
        parts = {text: slice(slots[text].length, slots[text].length + counts[text]) for text in order}
        positions = torch.cat([torch.arange(p.start, p.stop, device=ids.device) for p in parts.values()]) + start
        new = torch.cat([texts[text][p] for text, p in parts.items()])
        pieces = [(slots[text], counts[text]) for text in order]
        found = forwards[i // 2](pieces, new, positions, torch.arange(len(new), device=ids.device))
        logits.append(found[-counts[0] :] if order[1] == 0 else found[: counts[0]])
        for text in order:
            slots[text].length += counts[text]
    return torch.cat(logits).float()


class _Later(Step):
    """A step that says it comes late in a text. A model that takes positions from there gets wrong ones, and shows."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 10_000


@torch.inference_mode()
def stock_logits(model: PreTrainedModel, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
    """float32 `[tokens, vocab]` by the model's own attention, which it is left with.

    start: position of the first token; other than 0 only for models that take positions.
    """
    restore(model)
    _use(model, reference(type(model)))
    try:
        where = {"position_ids": torch.arange(start, start + len(ids), device=ids.device)[None]} if start else {}
        logits: torch.Tensor = model(ids.unsqueeze(0), use_cache=False, **where).logits[0]
    except Exception as e:
        raise CannotRun(f"{_name(model)} cannot be run: {type(e).__name__}: {e}") from e
    return logits.float()


def short_text(model: PreTrainedModel) -> torch.Tensor:
    vocab: int = model.config.get_text_config().vocab_size
    return (torch.arange(_TOKENS, device=model.device) * 7 + 3) % vocab


def _use(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation; unlike `set_attn_implementation`, of every class: the recorder sees to it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config._attn_implementation = implementation


def _name(model: PreTrainedModel) -> str:
    return type(model).__name__
