"""Says whether a model could run here, from its config alone: no weights are read and little memory is used.

The model is built on the "meta" device, where tensors have shapes but no numbers, and recorded as the probe does at
load; that gives the exact KV layout. Since nothing is computed there, a copy with the same layers but narrow ones and
random weights is then computed over slots and compared with its own stock forward. Behind `pdq models check`.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from pdq.engine.forwards import fuses
from pdq.engine.kv import LayerShape, Layout
from pdq.engine.model import load_config, model_class
from pdq.engine.narrow import build, narrow_copy
from pdq.engine.probe import CannotRun, check_class, compare, longest_stable, record, ropes
from pdq.errors import ConfigError, ModelUnsupported
from pdq.models import check_supported, context_limit, has_chat_template
from pdq.models.checkpoint import read_json


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found. reason: why it is not supported, else None, and all below is unknown.

    compared: has a narrow copy been computed and compared? fused: would this CPU compute the model by a forward that is
    compiled as a whole (`forwards`)? layout, token_bytes (KV of one token, all layers), kv_layers
    (for so many of `layers` KV is stored) and windows (of the layers that have one): None and () where only the weights
    can tell. context: tokens; None if the model states none.
    """

    model_class: str
    supported: bool
    reason: str | None
    chat_template: bool
    dtype: str
    compared: bool = False
    fused: bool = False
    layout: str | None = None
    token_bytes: int | None = None
    layers: int | None = None
    kv_layers: int | None = None
    windows: tuple[int, ...] = ()
    context: int | None = None


def check(folder: Path, *, dtype: str, max_model_len: int | None, trust_remote_code: bool) -> Report:
    """Could `folder`'s model run? Needs its config.json only. Raises ConfigError if that is missing or broken."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model: {folder} lacks config.json")
    name, template = _stated_class(folder), has_chat_template(folder)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        check_supported(folder, trust_remote_code=trust_remote_code)
        config = load_config(folder, trust_remote_code=trust_remote_code)
        cls = model_class(config, folder, trust_remote_code=trust_remote_code)
        name = cls.__name__
        check_class(cls, config)
        layout, compared = _layout(config, dtype, trust_remote_code)
        context = _context(folder, max_model_len, longest_stable(config))
    except ModelUnsupported as e:
        return Report(name, supported=False, reason=e.message, chat_template=template, dtype=dtype)
    return Report(
        model_class=name,
        supported=True,
        reason=None,
        chat_template=template,
        dtype=dtype,
        compared=compared,
        fused=fuses(cls, config, getattr(torch, dtype)),
        layers=config.get_text_config().num_hidden_layers,
        context=context,
        **({} if layout is None else _figures(layout)),
    )


def _figures(layout: Layout) -> dict[str, Any]:
    return {
        "layout": layout.text,
        "token_bytes": layout.token_bytes,
        "kv_layers": len(layout.layers),
        "windows": tuple(sorted({shape.window for shape in layout.layers if shape.window is not None})),
    }


def _layout(config: PreTrainedConfig, dtype: str, trust_remote_code: bool) -> tuple[Layout | None, bool]:
    """The layout, and whether a narrow copy has been compared. The layout is None where only that copy can run."""
    narrow = narrow_copy(config, trust_remote_code=trust_remote_code)
    try:
        layers, reads = _recorded(config, dtype, trust_remote_code)
    except CannotRun as e:
        if narrow is None:
            raise ModelUnsupported(f"this cannot be told without its weights: {e.message}") from e
        compare(narrow.model, narrow.layers, narrow.reads)
        return None, True
    layout = Layout(layers, getattr(torch, dtype))
    if narrow is None or narrow.reads != reads or _kinds(narrow.layers) != _kinds(layers):
        return layout, False
    compare(narrow.model, narrow.layers, narrow.reads)
    return layout, True


def _kinds(layers: tuple[LayerShape, ...]) -> list[tuple[bool, bool]]:
    return [(shape.derived, shape.window is None) for shape in layers]


def _recorded(
    config: PreTrainedConfig, dtype: str, trust_remote_code: bool
) -> tuple[tuple[LayerShape, ...], tuple[int, ...]]:
    """What a forward without numbers shows. Raises ModelUnsupported; CannotRun if the code looks at numbers."""
    plain = deepcopy(config)
    for rope in ropes(plain):
        if rope.get("rope_type") in ("dynamic", "longrope"):
            rope["rope_type"] = "default"  # the shapes are the same, and these two look at positions
    plain._experts_implementation = "batched_mm"  # the others look at which experts were chosen
    try:
        with torch.device("meta"):
            model = build(plain, getattr(torch, dtype), trust_remote_code=trust_remote_code)
    except Exception as e:
        raise ModelUnsupported(f"{config.model_type} cannot be built: {type(e).__name__}: {e}") from e
    return record(model)


def _stated_class(folder: Path) -> str:
    classes = read_json(folder / "config.json").get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else "unknown"


def _context(folder: Path, max_model_len: int | None, stable: int | None) -> int | None:
    try:
        own = context_limit(folder, max_model_len)
    except ConfigError:
        if max_model_len is not None:
            raise
        return stable
    return own if stable is None else min(own, stable)
