"""Linear layers by the compiled product: weights are brought into its form once, at load.

On the CPUs where it is used it reads the weights of one row as fast as memory gives them, and is as fast as oneDNN with
hundreds of rows; and a row's result does not depend on the other rows. It does not know matrix units (AMX).

Owns the form of the weights and the plan of a call; the machine code is `gemm`. Used by `packed` and `fused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from pdq.engine import team
from pdq.engine.code import Code
from pdq.engine.cpu import per_host
from pdq.engine.gemm import AHEAD, BLOCK, FIELDS, MOST_ROWS, product
from pdq.engine.operands import require_linear, require_weight
from pdq.engine.packed import Product, stacked

DTYPES = (torch.bfloat16, torch.float32)
_ITEMS = 8  # for each thread, or the last one to finish keeps the others waiting
# With few rows a product is as fast as memory, and a thread that goes on where it was asks for nothing in vain.
_FEW_TILES, _FEW_ITEMS = 4, 2
_SERIAL = 1 << 15  # products of numbers: with fewer, waking other threads costs more than they save


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is divided: `height` rows a tile, the other fields as in `gemm`."""

    height: int
    rows: int
    tiles: int
    per_group: int
    groups: int
    span: int
    items: int
    ahead: int

    @classmethod
    def of(cls, rows: int, blocks: int, steps: int, threads: int) -> Cut:
        """blocks, steps: of the weight."""
        if not rows:
            return cls(1, 0, 0, 0, 1, 1, 0, AHEAD)
        tiles = -(-rows // MOST_ROWS)
        height = -(-rows // tiles)
        groups = min(tiles, max(1, -(-_ITEMS * threads // blocks)))
        per_group = -(-tiles // groups)
        groups = -(-tiles // per_group)
        span = max(1, blocks // (_FEW_ITEMS * threads)) if tiles <= _FEW_TILES else 1
        ahead = AHEAD if per_group == 1 else steps * BLOCK * 4
        return cls(height, rows, tiles, per_group, groups, span, -(-blocks // span) * groups, ahead)

    @property
    def fields(self) -> dict[str, int]:
        names = ("rows", "tiles", "per_group", "groups", "span", "items", "ahead")
        return {name: getattr(self, name) for name in names}


class CompiledProduct:
    """A `packed.Product`: weight `[out, in]`, bias `[out]` or None, of one dtype, bfloat16 (`in` even) or float32.

    Raises ValueError for others, and for rows of another width or dtype than the weight's.
    """

    names: Sequence[str] = FIELDS  # of a call
    _weights: Sequence[torch.dtype] = (torch.bfloat16, torch.float32)

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        require_weight(weight, bias, self._weights)
        if weight.dtype is torch.bfloat16 and weight.shape[1] % 2:
            raise ValueError(f"weight: expected an even number of inputs in bfloat16, given {weight.shape[1]}")
        self.dtype = weight.dtype
        self.outputs, self.inputs = weight.shape
        self._weight = blocked(weight)
        self.blocks, self.steps = self._weight.shape[:2]
        self._bias = None if bias is None else bias.float().contiguous()

    @property
    def fields(self) -> dict[str, int]:
        """What is the same in every call, by the names of `gemm`."""
        bias = 0 if self._bias is None else self._bias.data_ptr()
        sizes = {"steps": self.steps, "outputs": self.outputs, "blocks": self.blocks}
        return {"weight": self._weight.data_ptr(), "bias": bias, **sizes}

    def address(self, height: int) -> int:
        """Of the function for tiles of that many rows."""
        return _code(self.dtype).address(f"product{height}")

    def __call__(self, x: Tensor) -> Tensor:
        require_linear(x, self.dtype, self.inputs)
        rows = x.reshape(-1, self.inputs).contiguous()
        out = x.new_empty((*x.shape[:-1], self.outputs))
        if len(rows):
            self._multiply(rows, out)
        return out

    def _multiply(self, rows: Tensor, out: Tensor, **more: int) -> None:
        """rows: at least one, as `gemm` takes them, contiguous. more: fields of this call."""
        threads = 1 if len(rows) * self.inputs * self.outputs < _SERIAL else torch.get_num_threads()
        cut = Cut.of(len(rows), self.blocks, self.steps, threads)
        at = {"x": rows.data_ptr(), "x_row": rows.stride(0) * rows.itemsize, "wide": 0}
        to = {"out": out.data_ptr(), "out_row": self.outputs * out.itemsize}
        team.run(self.address(cut.height), self.names, {**at, **to, **more, **cut.fields, **self.fields}, threads)


def blocked(weight: Tensor) -> Tensor:
    """`[out, in]` as `gemm` reads it, `[blocks, steps, BLOCK, numbers of a step]`, padded with zeros."""
    per_step = 4 // weight.itemsize
    outputs, inputs = (-(-n // size) * size for n, size in zip(weight.shape, (BLOCK, per_step), strict=True))
    whole = functional.pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))
    return whole.view(-1, BLOCK, inputs // per_step, per_step).permute(0, 2, 1, 3).contiguous()


def compiled(group: Sequence[nn.Linear]) -> Product | None:
    """A `packed.Maker`, for layers on a CPU; None for those that it cannot do."""
    weight = group[0].weight
    if weight.dtype not in DTYPES or weight.shape[1] * weight.itemsize % 4:
        return None
    return CompiledProduct(*stacked(group))


def compile_for(dtype: torch.dtype) -> None:
    """Takes a third of a second, once. Raises RuntimeError where LLVM cannot."""
    _code(dtype)


@per_host
def _code(dtype: torch.dtype) -> Code:
    return Code([product(dtype, height, f"product{height}") for height in range(1, MOST_ROWS + 1)])
