"""KV memory of one sequence: its shape per layer, where its bytes lie, and how they become wire bytes and back.

Owns storage and the raw byte layout of DESIGN section 4, `[layer][k|v][kv_head][token][dim]`. Knows nothing of models,
attention, headers or checksums. `runner` opens slots and exports them, `attention` writes and reads their planes.

A *plane* is K or V of one layer, `[1, kv_heads, tokens, dim]`; plane 2*i is K of layer i and 2*i + 1 is V. Neighbouring
planes of the same shape share one tensor, so that a usual model is one tensor and an export is one strided copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

_LEAST_HUGE, _MOST_HUGE = 4 << 20, 64 << 20
_ALIGNMENT = 64  # as torch's own memory; vectors of AVX-512 are that wide

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """KV of one layer, as stored.

    window: how many tokens back (itself included) a token sees; None: all of them. derived: attention sees not this,
    but what the modelling code makes of it token by token, such as the heads of latent attention.
    """

    heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """KV of a whole model: one shape per layer, values of `dtype`."""

    layers: tuple[LayerShape, ...]
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """Every layer's shape as text, equal neighbours counted: "30x3x64+64" is layers x heads x key + value dim."""
        shapes = groupby(f"{s.heads}x{s.key_dim}+{s.value_dim}" for s in self.layers)
        return ",".join(f"{len(list(same))}x{shape}" for shape, same in shapes)

    @property
    def token_bytes(self) -> int:
        return sum(s.heads * (s.key_dim + s.value_dim) for s in self.layers) * self.dtype.itemsize

    @property
    def plane_groups(self) -> list[tuple[int, int, int]]:
        """(planes, heads, dim) of each run of equally shaped planes, in order."""
        planes = [(s.heads, dim) for s in self.layers for dim in (s.key_dim, s.value_dim)]
        return [(len(list(same)), heads, dim) for (heads, dim), same in groupby(planes)]


class _Planes:
    """The memory of a slot and of its copies: None once it is released."""

    __slots__ = ("groups",)

    def __init__(self, groups: list[torch.Tensor]) -> None:
        self.groups: list[torch.Tensor] | None = groups


class TorchSlot:
    """KV memory of one sequence, contiguous per plane. KV of tokens [0, length) is present.

    The memory is not touched before it is used: what a short answer leaves free of its capacity costs nothing.
    """

    __slots__ = ("_capacity", "_layout", "_planes", "_zeroed", "length")

    def __init__(self, layout: Layout, capacity: int, device: torch.device) -> None:
        self.length = 0
        self._capacity = capacity
        self._layout = layout
        self._zeroed = 0  # tokens before this one hold numbers, whether KV or not
        self._planes = _Planes([
            _memory((planes, 1, heads, capacity, dim), layout.dtype, device)
            for planes, heads, dim in layout.plane_groups
        ])  # fmt: skip

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def dtype(self) -> torch.dtype:
        return self._layout.dtype

    def release(self) -> bool:
        """Let the memory go; False if it was gone already. From then on slot and copies hand out no address.

        A forward that holds `memory` keeps it for as long.
        """
        was_open, self._planes.groups = self._planes.groups is not None, None
        return was_open

    def planes(self, start: int, stop: int) -> list[torch.Tensor]:
        """Views of tokens [start, stop), `[1, kv_heads, stop - start, dim]` per plane."""
        return [plane for group in self._open_groups() for plane in group.narrow(3, start, stop - start).unbind(0)]

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """Take this before `addresses`: they are good as long as it is held, even if the slot is closed meanwhile."""
        return tuple(self._open_groups())

    def addresses(self) -> npt.NDArray[np.int64]:
        """Where each plane begins. A plane is `[kv_heads, capacity, dim]`, contiguous."""
        groups = self._open_groups()
        return np.concatenate([
            group.data_ptr() + np.arange(len(group)) * (group.stride(0) * group.itemsize) for group in groups
        ])  # fmt: skip

    def clear(self, start: int, stop: int) -> None:
        """See to it that tokens [start, stop), beyond the length, are numbers: fresh memory may hold NaN."""
        start = max(start, self._zeroed)
        if start < stop:
            for group in self._open_groups():
                group[:, :, :, start:stop].zero_()
            self._zeroed = stop

    def forget(self, count: int) -> None:
        """Drop the last `count` tokens. Nobody may read what they left behind: it need not be numbers."""
        self.length -= count
        self._zeroed = min(self._zeroed, self.length)

    def ahead(self, count: int) -> TorchSlot:
        """The same memory as it will be with `count` more tokens in it; for the length of one forward."""
        later = copy(self)  # which shares `_planes`: a release is one of both
        later.length += count
        return later

    def export(self, start: int, stop: int, size: int, headroom: int) -> list[memoryview]:
        """See `engine.base.Engine.export`. Runs of full size share one allocation."""
        self._check_range(start, stop, self.length)
        if size < 1 or headroom < 0:
            raise ValueError(f"cannot export runs of {size} tokens with {headroom} bytes of headroom")
        windows = [_host_bytes(g[:, 0, :, start:stop]) for g in self._open_groups()]
        full = (stop - start) // size
        out = _packed(windows, 0, full, size, headroom)
        if rest := (stop - start) % size:
            out += _packed(windows, full * size, 1, rest, headroom)
        return out

    def load(self, start: int, runs: Sequence[tuple[int, memoryview]]) -> None:
        """See `engine.base.Engine.load`. Nothing is written unless all runs fit."""
        if start != self.length:
            raise ValueError(f"KV of {self.length} tokens is present, cannot load at {start}")
        for tokens, raw in runs:
            if tokens < 1 or raw.nbytes != tokens * self._layout.token_bytes:
                raise ValueError(
                    f"{raw.nbytes} bytes are not KV of {tokens} tokens of {self._layout.token_bytes} bytes"
                )
        stop = start + sum(tokens for tokens, _ in runs)
        self._check_range(start, stop, self._capacity)
        for group, parts in zip(self._open_groups(), _split_runs(self._layout, runs), strict=True):
            _write(group[:, 0, :, start:stop], parts)
        self.length = stop

    def _open_groups(self) -> list[torch.Tensor]:
        groups = self._planes.groups  # read once: another thread may release it
        if groups is None:
            raise ValueError("the slot is closed")
        return groups

    def _check_range(self, start: int, stop: int, limit: int) -> None:
        if not 0 <= start <= stop <= limit:
            raise ValueError(f"tokens [{start}, {stop}) are not in [0, {limit})")


def _memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised. On a CPU numpy asks for huge pages, so that filling it and reading it back cost fewer faults.

    Not for the largest slots: one huge page per head would be touched for the first token of a short answer.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not _LEAST_HUGE <= size <= _MOST_HUGE:
        return torch.empty(shape, dtype=dtype, device=device)
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)


def _raw(planes: torch.Tensor) -> Bytes:
    """Bytes of a CPU tensor `[planes, heads, tokens, dim]`, as a view `[planes, heads, tokens, dim * itemsize]`."""
    view: Bytes = planes.view(torch.uint8).numpy()
    return view


def _host_bytes(planes: torch.Tensor) -> Bytes:
    """Bytes of `planes` in host memory: a view where they are, or one copy off the device."""
    if planes.device.type == "cpu":
        return _raw(planes)
    staged = torch.empty(planes.shape, dtype=planes.dtype, pin_memory=planes.is_cuda)
    return _raw(staged.copy_(planes.contiguous()))


def _packed(windows: Sequence[Bytes], first: int, count: int, size: int, headroom: int) -> list[memoryview]:
    """`count` runs of `size` tokens from token `first` of `windows`, each after `headroom` zero bytes."""
    payload = sum(w.shape[0] * w.shape[1] * w.shape[3] for w in windows) * size
    out = np.empty((count, headroom + payload), dtype=np.uint8)
    out[:, :headroom] = 0
    at = headroom
    for w in windows:
        planes, heads, _, width = w.shape
        runs = w[:, :, first : first + count * size].reshape(planes, heads, count, size, width)
        end = at + planes * heads * size * width
        # Splitting the contiguous last axis is a view, so this is one strided copy for all runs and planes.
        out[:, at:end].reshape(count, planes, heads, size, width)[...] = runs.transpose(2, 0, 1, 3, 4)
        at = end
    return [memoryview(row) for row in out]


def _split_runs(layout: Layout, runs: Sequence[tuple[int, memoryview]]) -> list[list[Bytes]]:
    """For each plane group the runs' bytes as views `[planes, heads, tokens, dim * itemsize]`."""
    raw = [(tokens, np.frombuffer(data, dtype=np.uint8)) for tokens, data in runs]
    out, at = [], 0
    for planes, heads, dim in layout.plane_groups:
        width = dim * layout.dtype.itemsize
        per_token = planes * heads * width
        ranges = ((n, data[at * n : (at + per_token) * n]) for n, data in raw)
        out.append([part.reshape(planes, heads, n, width) for n, part in ranges])
        at += per_token
    return out


def _write(planes: torch.Tensor, parts: Sequence[Bytes]) -> None:
    """Copy `parts`, one after another along the token axis, into `planes` `[planes, heads, tokens, dim]`."""
    on_host = planes.device.type == "cpu"
    host = planes if on_host else torch.empty(planes.shape, dtype=planes.dtype, pin_memory=planes.is_cuda)
    raw, at = _raw(host), 0
    for part in parts:
        raw[:, :, at : at + part.shape[2]] = part
        at += part.shape[2]
    if not on_host:
        planes.copy_(host)
