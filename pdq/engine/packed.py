"""Linear layers with their weights reordered once, for bfloat16 on a CPU.

The stock layer lets oneDNN bring the whole weight into its own order on every call, which takes longer than a decode
step's product itself. Reordered at load, the products of a small model's decode step take about half the time; the
results differ by rounding only. float32 models keep the stock layers, and so do layers of other kinds (GPT-2's Conv1D,
fused experts).
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Stands in for a bias-free or biased `nn.Linear`: `[..., in]` -> `[..., out]`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self.out_features))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def can_pack() -> bool:
    """Does this build of torch have the operators, and this CPU bfloat16 products?"""
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
        and bool(ops._is_mkldnn_bf16_supported())
    )


def pack(model: nn.Module) -> int:
    """Replace every bfloat16 CPU `nn.Linear` inside `model`; how many were. A no-op where it cannot be done.

    The old weights go away with their layers, except those that something else shares, such as a tied embedding.
    """
    if not can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16 and child.weight.device.type == "cpu"
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child))
    return len(found)
