"""Linear layers in 8 bits by the compiled product of bytes, for CPUs with AVX512 VNNI.

How weights are rounded is up to `int8`; the machine code is `gemm` and `pointwise`. Used by `int8` and `fused`.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from pdq.engine import compiled_product, pointwise, team
from pdq.engine.code import Code, has_byte_products
from pdq.engine.compiled_product import Cut, blocked, useful_threads
from pdq.engine.gemm import BYTE_FIELDS, MOST_ROWS, byte_product
from pdq.engine.pointwise import LEVELS_FIELDS, ZERO

log = logging.getLogger(__name__)


class CompiledInt8Product:
    """A `packed.Product` of rows in `dtype`, bfloat16 or float32.

    levels: the weight `[out, in]`, int8, as multiples of `scales` `[out]`; columns: what the columns of the input are
    multiplied by first, `[in]`; bias `[out]` or None.
    """

    def __init__(
        self, levels: Tensor, scales: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.dtype = dtype
        self.outputs, self.inputs = levels.shape
        self._weight = blocked(levels)
        self.blocks, self.steps = self._weight.shape[:2]
        self.row_bytes = self.steps * 4  # of a row of the input as bytes
        self._scales = scales.float().contiguous()
        self._zeros = (levels.sum(1, dtype=torch.int32) * ZERO).contiguous()
        self._columns = columns.float().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()

    @property
    def fields(self) -> dict[str, int]:
        """What is the same in every call, by the names of `gemm`."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        sizes = {"steps": self.steps, "outputs": self.outputs, "blocks": self.blocks}
        weight = {"weight": self._weight.data_ptr(), "bias": bias, **sizes}
        return {**weight, "scales": self._scales.data_ptr(), "zeros": self._zeros.data_ptr()}

    @property
    def levels_fields(self) -> dict[str, int]:
        """The same of the function that makes bytes of the input, by the names of `pointwise`."""
        return {"columns": self._columns.data_ptr(), "width": self.inputs}

    def address(self, height: int) -> int:
        """Of the function for tiles of that many rows."""
        return _code(self.dtype).address(f"product{height}")

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.inputs).contiguous()
        n, size = len(rows), x.itemsize
        out = x.new_empty((*x.shape[:-1], self.outputs))
        if n:
            levels, scales = torch.empty((n, self.row_bytes), dtype=torch.uint8), torch.empty(n)
            made = {"out": levels.data_ptr(), "out_row": self.row_bytes, "scales": scales.data_ptr()}
            given = {"rows": n, "x": rows.data_ptr(), "x_row": self.inputs * size}
            team.run(levels_address(self.dtype), LEVELS_FIELDS, {**given, **made, **self.levels_fields}, 1)
            threads = useful_threads(rows.numel() * self.outputs)
            cut = Cut.of(n, self.blocks, self.steps, threads)
            at = {"x": levels.data_ptr(), "x_row": self.row_bytes, "row_scales": scales.data_ptr()}
            to = {"out": out.data_ptr(), "out_row": self.outputs * size, "wide": 0}
            team.run(self.address(cut.height), BYTE_FIELDS, {**at, **to, **cut.fields, **self.fields}, threads)
        return out


def levels_address(dtype: torch.dtype) -> int:
    """Of the function that makes bytes of rows in `dtype`."""
    return _code(dtype).address("levels")


@cache
def _code(dtype: torch.dtype) -> Code:
    heights = range(1, MOST_ROWS + 1)
    return Code([pointwise.levels(dtype), *(byte_product(dtype, height, f"product{height}") for height in heights)])


@cache
def supported(dtype: torch.dtype) -> bool:
    """Is this the fastest product of bytes for `dtype` on this CPU? Compiles it, which takes part of a second, once."""
    if not compiled_product.supported(dtype) or not has_byte_products():
        return False
    try:
        _code(dtype)
    except RuntimeError as e:  # of LLVM, which does not know this CPU or system well enough
        log.warning("products of bytes cannot be compiled for this CPU: %s", e)
        return False
    return True
