"""What native code is handed, checked before an address is taken: it reads past the end where torch would raise.

The checks raise ValueError, which names what was expected and what was given. They look at attributes of tensors alone,
never at their numbers, so that a call costs a microsecond more at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def require(name: str, x: Tensor, dtype: torch.dtype | None, *shape: int | None) -> None:
    """x: on the CPU, of `dtype` (None: any) and of `shape` (None: any size)."""
    found = x.shape
    if x.is_cpu and (dtype is None or x.dtype is dtype) and len(found) == len(shape):
        for size, wanted in zip(found, shape, strict=True):
            if size != wanted and wanted is not None:
                break
        else:
            return
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(f"{name}: expected [{sizes}] of {dtype or 'any dtype'} on the CPU, given {given(x)}")


def require_rows(name: str, x: Tensor, dtype: torch.dtype, rows: int, width: int) -> None:
    """x: at least `rows` rows of `width` numbers each, which follow each other in memory."""
    if x.dim() != 2 or len(x) < rows or x.stride(1) != 1 or x.shape[1] != width or x.dtype is not dtype or not x.is_cpu:
        raise ValueError(
            f"{name}: expected at least {rows} contiguous rows of {width} numbers of {dtype} on the CPU, "
            f"given {given(x)} with strides {x.stride()}"
        )


def require_linear(x: Tensor, dtype: torch.dtype | None, inputs: int) -> None:
    """x: what a linear layer takes, `[..., inputs]` of `dtype` (None: of any floating dtype) on the CPU."""
    right = x.is_floating_point() if dtype is None else x.dtype is dtype
    if not (right and x.is_cpu and x.dim() and x.shape[-1] == inputs):
        kind = dtype or "a floating dtype"
        raise ValueError(f"a linear layer: expected [..., {inputs}] of {kind} on the CPU, given {given(x)}")


def require_weight(weight: Tensor, bias: Tensor | None, dtypes: Sequence[torch.dtype]) -> None:
    """weight: `[out, in]` of one of `dtypes`; bias: `[out]`, or None; both on the CPU."""
    if weight.dim() != 2 or not weight.numel() or weight.dtype not in dtypes or not weight.is_cpu:
        names = " or ".join(map(str, dtypes))
        raise ValueError(f"weight: expected [out, in] of {names} on the CPU, given {given(weight)}")
    if bias is not None:
        require("bias", bias, None, len(weight))


def given(x: Tensor) -> str:
    return f"{list(x.shape)} of {x.dtype} on {x.device}"
