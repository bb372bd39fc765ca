"""Linear layers in 8 bits by the compiled product of bytes, for CPUs with AVX512 VNNI.

How weights are rounded is up to `int8`; the machine code is `gemm` and `pointwise`. Used by `int8` and `fused`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdq.engine import pointwise, team
from pdq.engine.code import Code
from pdq.engine.compiled_product import CompiledProduct
from pdq.engine.cpu import per_host
from pdq.engine.gemm import BYTE_FIELDS, MOST_ROWS, byte_product
from pdq.engine.operands import require
from pdq.engine.pointwise import LEVELS_FIELDS, ZERO


class CompiledInt8Product(CompiledProduct):
    """The same of rows in `dtype`, bfloat16 or float32, whose numbers become bytes first.

    levels: the weight `[out, in]`, int8, as multiples of `scales` `[out]`; columns: what the columns of the input are
    multiplied by before, `[in]`; bias `[out]` or None.
    """

    names = BYTE_FIELDS
    _weights = (torch.int8,)

    def __init__(
        self, levels: Tensor, scales: Tensor, columns: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        if dtype not in CompiledProduct._weights:
            raise ValueError(f"rows: expected torch.bfloat16 or torch.float32, given {dtype}")
        super().__init__(levels, bias)
        require("scales", scales, None, self.outputs)
        require("columns", columns, None, self.inputs)
        self.dtype = dtype
        self.row_bytes = self.steps * 4  # of a row of the input as bytes
        self._scales = scales.float().contiguous()
        self._zeros = (levels.sum(1, dtype=torch.int32) * ZERO).contiguous()
        self._columns = columns.float().contiguous()

    @property
    def fields(self) -> dict[str, int]:
        return {**super().fields, "scales": self._scales.data_ptr(), "zeros": self._zeros.data_ptr()}

    @property
    def levels_fields(self) -> dict[str, int]:
        """As `fields`, of the function that makes bytes of the input, by the names of `pointwise`."""
        return {"columns": self._columns.data_ptr(), "width": self.inputs}

    def address(self, height: int) -> int:
        return _code(self.dtype).address(f"product{height}")

    def _multiply(self, rows: Tensor, out: Tensor, **more: int) -> None:
        n = len(rows)
        levels, scales = torch.empty((n, self.row_bytes), dtype=torch.uint8), torch.empty(n)
        made = {"out": levels.data_ptr(), "out_row": self.row_bytes, "scales": scales.data_ptr()}
        given = {"rows": n, "x": rows.data_ptr(), "x_row": self.inputs * rows.itemsize}
        team.run(levels_address(self.dtype), LEVELS_FIELDS, {**given, **made, **self.levels_fields}, 1)
        super()._multiply(levels, out, row_scales=scales.data_ptr(), **more)


def levels_address(dtype: torch.dtype) -> int:
    """Of the function that makes bytes of rows in `dtype`."""
    return _code(dtype).address("levels")


@per_host
def _code(dtype: torch.dtype) -> Code:
    heights = range(1, MOST_ROWS + 1)
    return Code([pointwise.levels(dtype), *(byte_product(dtype, height, f"product{height}") for height in heights)])


def compile_for(dtype: torch.dtype) -> None:
    """Takes part of a second, once; for CPUs with `byte_products`. Raises RuntimeError where LLVM cannot."""
    _code(dtype)
