"""Finds the linear layers that modelling code feeds with the same tensor, such as q, k and v, or gate and up.

By watching forwards, not by names: siblings have one parent, get the same object, unchanged in between, each once, and
do so whenever any of them is called. Their products can be computed as one (`packed`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Family = tuple[nn.Linear, ...]


class _Watcher:
    """The calls of the linear layers that are children of one module."""

    def __init__(self) -> None:
        self.seen: dict[nn.Linear, set[Family]] = {}
        self._family: list[nn.Linear] = []
        self._fed: tuple[Tensor, Tensor] | None = None  # the tensor, and a copy of what it was

    def called(self, linear: nn.Linear, x: Tensor) -> None:
        same = self._fed is not None and self._fed[0] is x and torch.equal(self._fed[1], x)
        if not same or linear in self._family:
            self.close()
            self._fed = x, x.clone()
        self._family.append(linear)

    def close(self) -> None:
        """The tensor's last layer has been called."""
        for linear in self._family:
            self.seen.setdefault(linear, set()).add(tuple(self._family))
        self._family, self._fed = [], None


def _tell(watcher: _Watcher, linear: nn.Module, arguments: tuple[Any, ...]) -> None:
    if isinstance(linear, nn.Linear) and arguments:
        watcher.called(linear, arguments[0])


def families(model: nn.Module, run: Callable[[], object]) -> list[Family]:
    """Siblings in the order of their calls, two or more each, as seen while `run` computes forwards of `model`."""
    watchers: list[_Watcher] = []
    hooks = []
    for parent in model.modules():
        linears = [child for child in parent.children() if type(child) is nn.Linear]
        if len(linears) > 1:
            watchers.append(_Watcher())
            hooks += [linear.register_forward_pre_hook(partial(_tell, watchers[-1])) for linear in linears]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    found: list[Family] = []
    for watcher in watchers:
        watcher.close()
        candidates = {family for seen in watcher.seen.values() for family in seen if len(family) > 1}
        found += [f for f in candidates if all(watcher.seen[linear] == {f} for linear in f)]
    return found
