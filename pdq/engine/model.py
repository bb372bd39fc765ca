"""Loads a model folder into torch for the runner, or says by name why this model cannot be served here.

Owns the call into transformers; the modelling code stays stock, with our attention function. Finding the folder, its
tokenizer and its fingerprint is `pdq.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from pdq.engine import kernel_selection
from pdq.engine.int8 import Int8Maker, require_int8
from pdq.engine.packed import Maker, pack, separate
from pdq.engine.probe import CannotRun, check_class, layout_of, try_out
from pdq.engine.siblings import Family, families
from pdq.errors import ConfigError, ModelUnsupported


def load_model(
    folder: Path,
    *,
    dtype: str,
    device: str,
    quantization: str = "none",
    trust_remote_code: bool = False,
    compiled: bool = True,
) -> PreTrainedModel:
    """The causal language model in `folder` (config and safetensors), ready for `TorchEngine`.

    dtype: "bfloat16", "float16" or "float32". device: a torch device, e.g. "cpu" or "cuda:0". quantization: "none" or
    "int8", of the linear layers. trust_remote_code: run the Python code in the folder that config.json names, if it
    does. compiled: may products be compiled for this CPU?

    Raises ModelUnsupported if the architecture cannot run over KV slots or weights are missing, ConfigError if there is
    no such quantization here, OSError if the folder is incomplete.
    """
    if quantization == "int8":
        require_int8(device)
    config = load_config(folder, trust_remote_code=trust_remote_code)
    check_class(model_class(config, folder, trust_remote_code=trust_remote_code), config)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",  # the probe switches to ours
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_check_weights` refuses them by name
        )
    except (ValueError, KeyError, ImportError) as e:
        raise ModelUnsupported(f"{config.model_type} cannot be loaded: {e}") from e
    model: PreTrainedModel = loaded[0].to(device).eval().requires_grad_(False)
    _check_weights(type(model).__name__, loaded[1])
    siblings = families(model, lambda: layout_of(model))
    kernels = kernel_selection.select(model.dtype, may_compile=compiled)
    if quantization == "int8":
        maker = Int8Maker(model, kernels)
        replace(model, siblings, maker)
        if not maker.made:
            raise ConfigError(f"quantization: {type(model).__name__} has no layers that int8 is for; use none")
    elif model.device.type == "cpu":
        replace(model, siblings, kernel_selection.maker(kernels))
    return model


def replace(model: PreTrainedModel, siblings: Sequence[Family], make: Maker) -> None:
    """Give the linear layers of a probed `model` the products of `make`. Raises ModelUnsupported if it cannot run."""
    probed = layout_of(model)
    pack(model, siblings, make)
    try:
        try_out(model, probed.layout.layers, probed.reads)
    except CannotRun:  # some modelling code may not take columns of a wider tensor
        separate(model)
        try_out(model, probed.layout.layers, probed.reads)


def load_config(folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """Raises ModelUnsupported for an architecture that transformers does not have."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as e:
        raise ModelUnsupported(f"{folder.name}: transformers cannot make sense of its config.json: {e}") from e
    return config


def model_class(config: PreTrainedConfig, folder: Path, *, trust_remote_code: bool) -> type[PreTrainedModel]:
    """The class that `config` is for. Raises ModelUnsupported if it is not a decoder-only language model."""
    name = (config.architectures or [config.model_type])[0]
    code = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if trust_remote_code and code:
        found: type[PreTrainedModel] = get_class_from_dynamic_module(code, folder, local_files_only=True)
        return found
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(f"{name} is not a decoder-only language model")
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    stock: type[PreTrainedModel] = cls
    return stock


def _check_weights(name: str, info: dict[str, Any]) -> None:
    """transformers fills missing weights with random numbers; such a model talks nonsense without an error."""
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, info.get(kind) or [])):
            raise ModelUnsupported(f"{name}: {len(found)} {kind.replace('_', ' ')} in the weights, such as {found[0]}")
