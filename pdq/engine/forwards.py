"""Which forward computes a model here: compiled as a whole, where that can be, or its stock code with our attention.

The compiled one is put together from what modules a model has. It is believed only for classes whose code was read and
whose every scaling by position is crossed in a test, and only where its results are those of the stock code: of the
model itself, and of a narrow copy in float32. Used by `runner`, once at load, and by `check`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pdq.engine import cpu, kernel_selection
from pdq.engine.blocks import find_decoder
from pdq.engine.forward import OverSlots, StockForward
from pdq.engine.fused import FusedForward
from pdq.engine.fused_check import Pair, difference
from pdq.engine.model import replace
from pdq.engine.narrow import narrow_copy
from pdq.engine.probe import Probed, layout_of
from pdq.engine.siblings import families

log = logging.getLogger(__name__)

# By full name, so that no other code of the same class name is meant. Each is in `tests/engine/test_fused.py` with
# every threshold of its config crossed.
FUSED_CLASSES = frozenset({
    "transformers.models.llama.modeling_llama.LlamaForCausalLM",
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM",
    "transformers.models.phi3.modeling_phi3.Phi3ForCausalLM",
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM",
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
    "transformers.models.smollm3.modeling_smollm3.SmolLM3ForCausalLM",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Selected:
    """forward: what computes. numerics: the numerics id; two forwards of one id do the same in the same order."""

    forward: OverSlots
    numerics: str


def select_forward(model: PreTrainedModel, probed: Probed, may_compile: bool = True) -> Selected:
    """model: as `model.load_model` makes it; probed: of it. On a CPU this compiles for about a second."""
    dtype = str(model.dtype).removeprefix("torch.")
    versions = f"{dtype} torch-{torch.__version__}"
    if model.device.type != "cpu":
        stock = StockForward(model, probed.layout.layers, probed.reads)
        device = torch.cuda.get_device_name(model.device) if model.is_cuda else model.device.type
        return Selected(stock, f"stock {device} {versions}")
    kernels = kernel_selection.select(model.dtype, may_compile=may_compile)
    stock = StockForward(model, probed.layout.layers, probed.reads, kernels)
    ours = fused(model, probed, stock) if kernels.fusible else None
    host = cpu.host()
    whole = "fused" if ours else f"stock({kernels.text})"
    return Selected(ours or stock, f"{whole} {host.level} {host.name} {versions}")


def fused(model: PreTrainedModel, probed: Probed, stock: OverSlots) -> FusedForward | None:
    """None where `model` is of another kind, or does what its modules do not show."""
    name, config = type(model).__name__, model.config
    if _full_name(type(model)) not in FUSED_CLASSES:
        return None
    if reason := _narrow_difference(_Kind(type(model), config)):
        log.warning("%s is computed by its own code: in a narrow copy %s", name, reason)
        return None
    ours = _assembled(model, probed)
    if isinstance(ours, str):
        log.info("%s is computed by its own code: %s", name, ours)
        return None
    if where := difference(Pair(model, ours.decoder, probed.layout, ours, stock), probed.max_positions):
        log.warning("%s is computed by its own code: compiled, %s is different", name, where)
        return None
    return ours


def fuses(cls: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> bool:
    """Would this CPU compute a model of `cls` and `config` by a forward that is compiled as a whole?

    As far as a narrow copy tells; the load compares the model itself as well.
    """
    selectable = kernel_selection.select(dtype).fusible and _full_name(cls) in FUSED_CLASSES
    return selectable and _narrow_difference(_Kind(cls, config)) is None


def _assembled(model: PreTrainedModel, probed: Probed) -> FusedForward | str:
    """The forward, or why there is none."""
    layers = probed.layout.layers
    decoder = find_decoder(model, layers, probed.reads)
    if decoder is None:
        return "it has other modules than usual"
    if not FusedForward.can(decoder, layers, model.dtype):
        return "its layers differ, or are of a shape that no kernel knows"
    return FusedForward(decoder, layers, model.dtype)


@lru_cache(maxsize=32)
@torch.inference_mode()
def _narrow_difference(kind: _Kind) -> str | None:
    """Why the narrow copy of a config is not computed alike, in float32; None: it is."""
    copy = narrow_copy(kind.config, trust_remote_code=False)
    if copy is None or type(copy.model) is not kind.cls:
        return "cannot be made"
    model = copy.model
    linears = families(model, lambda: layout_of(model))
    kernels = kernel_selection.select(torch.float32)
    replace(model, linears, kernel_selection.maker(kernels))
    probed = layout_of(model)
    ours = _assembled(model, probed)
    if isinstance(ours, str):
        return ours
    stock = StockForward(model, probed.layout.layers, probed.reads, kernels)
    where = difference(Pair(model, ours.decoder, probed.layout, ours, stock), probed.max_positions)
    return where and f"{where} is different"


class _Kind:
    """A class and a config as a key: equal where all that the config says is."""

    def __init__(self, cls: type[PreTrainedModel], config: PreTrainedConfig) -> None:
        self.cls, self.config = cls, config
        self._key = f"{_full_name(cls)} {config.to_json_string(use_diff=False)}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kind) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _full_name(cls: type[PreTrainedModel]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
