"""Linear layers in 8 bits, for CPUs whose instructions multiply bytes (AVX512 VNNI, AMX), through oneDNN.

Weights are rounded once, symmetrically, with a scale for each output; the rows of the input at every call, each with a
scale of its own, so that a sequence's result does not depend on its neighbours in the batch. Products are exact
integers. A few columns of the input are much larger than the others and would leave those few levels, so columns are
brought nearer to each other and the weights take up the difference (SmoothQuant, arXiv 2211.10438). The output head
stays as it is: it adds a third to the error.

How much the text changes, `python -m tests.engine.agreement` measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pdq.engine import cpu
from pdq.engine.compiled_int8 import CompiledInt8Product
from pdq.engine.compiled_product import DTYPES
from pdq.engine.kernel_selection import KernelSet, maker
from pdq.engine.operands import require, require_linear, require_weight
from pdq.engine.packed import Product, stacked
from pdq.engine.pointwise import LEVELS, ZERO
from pdq.engine.probe import stock_logits
from pdq.errors import ConfigError

_ROUNDING = torch.tensor(ZERO + 0.5)  # the conversion to bytes truncates
_TEXTS, _TOKENS = 8, 64  # from which the size of the columns is learnt; any will do, the large ones are always large


@dataclass(frozen=True, slots=True)
class Quantized:
    """levels: a weight `[out, in]` as int8 multiples of `scales` `[out]`; columns: factors of the input's, `[in]`."""

    levels: Tensor
    scales: Tensor
    columns: Tensor

    @classmethod
    def of(cls, weight: Tensor, largest: Tensor | None) -> Quantized:
        """largest: absolute numbers that the columns of the input were seen to reach, `[in]`; None: not known."""
        weight = weight.float()
        smoothed = torch.ones(weight.shape[1]) if largest is None else _balance(largest, weight)
        weight = weight * smoothed
        scales = (weight.abs().amax(1) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        return cls((weight / scales[:, None]).round_().to(torch.int8), scales, 1 / smoothed)


class Int8Product:
    """The product by oneDNN, with bias `[out]` or None, of rows of any floating dtype, which the result has as well.

    A row that is not numbers gives a row that is not numbers. Raises ValueError for rows of another width than the
    weight's.
    """

    def __init__(self, quantized: Quantized, bias: Tensor | None) -> None:
        require_weight(quantized.levels, bias, (torch.int8,))
        require("scales", quantized.scales, torch.float32, quantized.levels.shape[0])
        require("columns", quantized.columns, torch.float32, quantized.levels.shape[1])
        self._width = len(quantized.levels)
        self._weight = torch.ops.onednn.qlinear_prepack(quantized.levels, None)
        self._columns = quantized.columns
        self._scales = quantized.scales / LEVELS  # of the products of levels, but for the row's largest number
        self._zeros = torch.zeros(self._width, dtype=torch.int64)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        require_linear(x, None, len(self._columns))
        rows = x.reshape(-1, x.shape[-1]) * self._columns
        if not len(rows):
            return x.new_empty((*x.shape[:-1], self._width))
        largest = rows.abs().amax(-1, keepdim=True)
        levels = torch.addcmul(_ROUNDING, rows, LEVELS / largest).to(torch.uint8)
        if len(rows) == 1 and x.dtype is not torch.float16:  # the operator knows one scale of the input: all in one
            y = self._product(levels, largest.item(), self._bias, x.dtype)
        else:
            y = self._product(levels, 1.0, None, torch.float32).mul_(largest)
            y = (y if self._bias is None else y.add_(self._bias)).to(x.dtype)
        return y.view(*x.shape[:-1], self._width)

    def _product(self, levels: Tensor, scale: float, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            levels, scale, ZERO, self._weight, self._scales, self._zeros, bias, 1.0, 0, dtype, "none", [], ""
        )
        return y


class Int8Maker:
    """A `packed.Maker` for the layers of `model`, which is run here with its own attention, and is left with that.

    made: for how many layers it has made a product in 8 bits.
    """

    def __init__(self, model: PreTrainedModel, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._head: nn.Module | None = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._largest = _largest_inputs(model)
        self.made = 0

    def __call__(self, group: Sequence[nn.Linear]) -> Product | None:
        if self._head in group:
            return maker(self._kernels)(group)
        self.made += len(group)
        weight, bias = stacked(group)
        quantized = Quantized.of(weight, self._largest.get(group[0]))
        if self._kernels.int8 == "compiled" and weight.dtype in DTYPES:
            return CompiledInt8Product(quantized.levels, quantized.scales, quantized.columns, bias, weight.dtype)
        return Int8Product(quantized, bias)


def _balance(largest: Tensor, weight: Tensor) -> Tensor:
    """By what the columns of the input are divided, and those of the weight multiplied; 1 where either is all zero."""
    balance = (largest.float() / weight.abs().amax(0)).sqrt()
    return torch.where(balance.isfinite() & (balance > 0), balance, torch.ones(()))


def _largest_inputs(model: PreTrainedModel) -> dict[nn.Module, Tensor]:
    """For every linear layer that some of the made-up texts reaches, the largest absolute number of each column."""
    found: dict[nn.Module, Tensor] = {}

    def look(linear: nn.Module, arguments: tuple[Any, ...]) -> None:
        seen = arguments[0].detach().abs().flatten(0, -2).amax(0)
        found[linear] = torch.maximum(found[linear], seen) if linear in found else seen

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if type(m) is nn.Linear]
    vocab: int = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    try:
        for text in torch.randint(0, vocab, (_TEXTS, _TOKENS), generator=generator):
            stock_logits(model, text)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def require_int8(device: str) -> None:
    """Raises ConfigError where products in 8 bits are missing, slow or not exact."""
    if torch.device(device).type != "cpu":
        raise ConfigError(f"quantization: int8 runs on a CPU only, not on {device!r}")
    ops = torch.ops.onednn
    if not (hasattr(ops, "qlinear_prepack") and hasattr(ops, "qlinear_pointwise")):
        raise ConfigError("quantization: this build of torch has no int8 linear layers; use none")
    if not _multiplies_bytes():
        raise ConfigError("quantization: int8 wants a CPU with AVX512 VNNI or AMX; use none")
    if not _exact():
        raise ConfigError("quantization: the int8 products of this build of torch are wrong on this CPU; use none")


def _multiplies_bytes() -> bool:
    host = cpu.host()
    return host.byte_products or host.matrix_unit


def _exact() -> bool:
    """With the largest numbers, whose sums older instructions cut off."""
    quantized = Quantized.of(torch.ones((16, 64)), None)
    for rows in (1, 3):
        found = Int8Product(quantized, None)(torch.ones((rows, 64)))
        if not torch.allclose(found, torch.full_like(found, 64.0), rtol=1e-4):
            return False
    return True
