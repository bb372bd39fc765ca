"""Linear layers with their weights brought once, at load, into the form in which a product reads them fastest.

The stock layer lets oneDNN reorder the whole weight on every call, which takes longer than a decode step's product
itself. Layers that are fed by the same tensor (`siblings`) become one product: at one token a row, that and the packing
halve the time of a small model's products. The modelling code still calls each layer; the first call computes for all.

Owns the replacing and the bfloat16 product; the one in 8 bits is `int8`. Layers of other kinds (GPT-2's Conv1D, fused
experts) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pdq.engine.operands import require_linear, require_weight

Product = Callable[[Tensor], Tensor]  # [..., in] -> [..., out]
Maker = Callable[[Sequence[nn.Linear]], Product | None]  # one product of layers with the same input; None: keep them


class Bfloat16Product:
    """weight `[out, in]`, bias `[out]` or None, both bfloat16; results differ from the stock layer's by rounding."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        require_weight(weight, bias, (torch.bfloat16,))
        self._inputs = weight.shape[1]
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._width = len(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Raises ValueError for rows of another width or dtype than the weight's."""
        require_linear(x, torch.bfloat16, self._inputs)
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], self._width))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y


class _Shared:
    """One product of several layers, called one after the other with the same tensor."""

    def __init__(self, product: Product, widths: Sequence[int]) -> None:
        self.contiguous = False
        self.product = product
        self.widths = list(widths)
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None  # one assignment: threads never see halves of two

    def part(self, index: int, x: Tensor) -> Tensor:
        """Columns of layer `index`, in the order of the calls.

        The first layer always computes, so nothing outlives its forward; whoever comes with another tensor does too.
        """
        if len(self.widths) == 1:
            return self.product(x)
        found = self._last
        if index == 0 or found is None or found[0] is not x:
            found = x, torch.split_with_sizes(self.product(x), self.widths, -1)
        self._last = None if index == len(self.widths) - 1 else found
        return found[1][index].contiguous() if self.contiguous else found[1][index]


class PackedLinear(nn.Module):
    """Stands in for an `nn.Linear`: `[..., in]` -> `[..., out]`, as part `index` of a shared product."""

    def __init__(self, linear: nn.Linear, shared: _Shared, index: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.shared = shared
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.part(self._index, x)


def can_pack() -> bool:
    """Does this build of torch have the operators, and this CPU bfloat16 products?"""
    ops = torch.ops.mkldnn
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
        and bool(ops._is_mkldnn_bf16_supported())
    )


def keep(group: Sequence[nn.Linear]) -> None:
    """A `Maker` that keeps all layers as they are."""


def bfloat16(group: Sequence[nn.Linear]) -> Product | None:
    """A `Maker`, for layers on a CPU where `can_pack`."""
    return Bfloat16Product(*stacked(group)) if group[0].weight.dtype is torch.bfloat16 else None


def pack(model: nn.Module, families: Sequence[Sequence[nn.Linear]] = (), make: Maker = bfloat16) -> int:
    """Replace the `nn.Linear` layers inside `model` by the products of `make`; how many were.

    families: of `siblings.families`. The old weights go away family by family, except those that something else
    shares, such as a tied embedding.
    """
    places: dict[nn.Linear, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                places.setdefault(child, []).append((parent, name))
    together = {linear for family in families for linear in family}
    count = 0
    for group in [*families, *([linear] for linear in places if linear not in together)]:
        product = make(group)
        if product is None:
            continue
        shared = _Shared(product, [linear.out_features for linear in group])
        for i, linear in enumerate(group):
            packed = PackedLinear(linear, shared, i)
            for parent, name in places[linear]:
                setattr(parent, name, packed)
            linear.register_parameter("weight", None)  # others may still know the layer; nobody may keep its memory
        count += len(group)
    return count


def separate(model: nn.Module) -> None:
    """Give the layers of `model` results that are contiguous, for modelling code that cannot take slices."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.shared.contiguous = True


def stacked(group: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the layers as one."""
    weights = [linear.weight.detach() for linear in group]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if all(linear.bias is None for linear in group):
        return weight, None
    return weight, torch.cat([weight.new_zeros(n.out_features) if n.bias is None else n.bias for n in group])
