"""The form KV takes in Redis: as the engine has it ("raw"), in another float type, or as int8 with scales.

A form both stages declare (`--kv-codec`) is also how workers of different dtypes exchange KV: each converts between its
own type and the common one. int8 is symmetric per block, layer, k|v and head: all scales as float32 first, then the
numbers, in the engine's order. Pure functions of bytes, in numpy; between `engine` and `store`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pdq import bfloat16
from pdq.errors import ConfigError

Floats: TypeAlias = npt.NDArray[np.float32]
_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Form(Protocol):
    """How payloads look in Redis. dtype: of their numbers. token_bytes, fixed_bytes: size is fixed + tokens * token."""

    @property
    def dtype(self) -> str: ...

    @property
    def token_bytes(self) -> int: ...

    @property
    def fixed_bytes(self) -> int: ...

    def pack(self, value: memoryview, headroom: int) -> memoryview:
        """An exported run (`headroom` bytes, then raw KV) in this form, after as much headroom. Writable."""
        ...

    def unpack(self, payload: memoryview) -> memoryview:
        """Raw KV of the engine's dtype, out of a payload of the right size."""
        ...


def form(codec: str, dtype: str, layout: str, token_bytes: int) -> Form:
    """The form named `codec` for an engine's KV. Raises ConfigError if this engine's KV cannot take it."""
    if codec in ("raw", dtype):
        return Raw(dtype, token_bytes)
    planes = _planes(layout)
    if planes is None:
        raise ConfigError(f"kv_codec: {codec} is for KV of a model, not for layout {layout!r}; use raw")
    return Int8(dtype, planes) if codec == "int8" else Cast(dtype, codec, token_bytes)


class Raw:
    """As it is; nothing is copied."""

    fixed_bytes = 0

    def __init__(self, dtype: str, token_bytes: int) -> None:
        self.dtype = dtype
        self.token_bytes = token_bytes

    def pack(self, value: memoryview, headroom: int) -> memoryview:
        return value

    def unpack(self, payload: memoryview) -> memoryview:
        return payload


class Cast:
    """Another float type, rounded to nearest."""

    fixed_bytes = 0

    def __init__(self, own: str, dtype: str, token_bytes: int) -> None:
        self.dtype = dtype
        self.token_bytes = token_bytes // _SIZES[own] * _SIZES[dtype]
        self._own = own

    def pack(self, value: memoryview, headroom: int) -> memoryview:
        numbers = _from_floats[self.dtype](_to_floats[self._own](np.frombuffer(value, np.uint8)[headroom:]))
        return _after(headroom, numbers)

    def unpack(self, payload: memoryview) -> memoryview:
        floats = _to_floats[self.dtype](np.frombuffer(payload, np.uint8))
        return _from_floats[self._own](floats).data.cast("B")


class Int8:
    """One byte a number. planes: (planes, heads, dim) of each run of equally shaped planes."""

    dtype = "int8"

    def __init__(self, own: str, planes: list[tuple[int, int, int]]) -> None:
        self._own = own
        self._planes = planes
        self.token_bytes = sum(count * heads * dim for count, heads, dim in planes)
        self.fixed_bytes = 4 * sum(count * heads for count, heads, _ in planes)

    def pack(self, value: memoryview, headroom: int) -> memoryview:
        floats = _to_floats[self._own](np.frombuffer(value, np.uint8)[headroom:])
        tokens = len(floats) // self.token_bytes
        scales, numbers, at = [], [], 0
        for count, heads, dim in self._planes:
            part = floats[at : at + count * heads * tokens * dim].reshape(count * heads, -1)
            at += part.size
            scale = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
            if not np.isfinite(scale).all():
                raise ValueError("KV that is not finite cannot be stored as int8")
            numbers.append(np.rint(part / np.where(scale > 0, scale, 1)).astype(np.int8).ravel())
            scales.append(scale.astype(np.float32).ravel())
        return _after(headroom, *scales, *numbers)

    def unpack(self, payload: memoryview) -> memoryview:
        data = np.frombuffer(payload, np.uint8)
        scales = data[: self.fixed_bytes].view(np.float32)
        numbers = data[self.fixed_bytes :].view(np.int8)
        tokens = len(numbers) // self.token_bytes
        floats = np.empty(len(numbers), np.float32)
        at = row = 0
        for count, heads, dim in self._planes:
            rows, size = count * heads, count * heads * tokens * dim
            part = numbers[at : at + size].reshape(rows, -1)
            np.multiply(part, scales[row : row + rows, None], out=floats[at : at + size].reshape(rows, -1))
            at, row = at + size, row + rows
        return _from_floats[self._own](floats).data.cast("B")


def _planes(layout: str) -> list[tuple[int, int, int]] | None:
    """The plane groups of a layout text such as "30x3x64+64" (see engine.kv.Layout); None for another text."""
    found: list[tuple[int, int, int]] = []
    for group in layout.split(","):
        shape = re.fullmatch(r"(\d+)x(\d+)x(\d+)\+(\d+)", group)
        if shape is None:
            return None
        layers, heads, key_dim, value_dim = map(int, shape.groups())
        if key_dim == value_dim:
            found.append((2 * layers, heads, key_dim))
        else:
            found += [(1, heads, key_dim), (1, heads, value_dim)] * layers
    return found


def _after(headroom: int, *parts: npt.NDArray[Any]) -> memoryview:
    out = np.empty(headroom + sum(p.nbytes for p in parts), np.uint8)
    out[:headroom] = 0
    at = headroom
    for part in parts:
        out[at : at + part.nbytes] = part.view(np.uint8)
        at += part.nbytes
    return out.data


_to_floats: dict[str, Callable[[npt.NDArray[np.uint8]], Floats]] = {
    "bfloat16": lambda data: bfloat16.widened(data.view(np.uint16)),
    "float16": lambda data: data.view(np.float16).astype(np.float32),
    "float32": lambda data: data.view(np.float32),
}
_from_floats: dict[str, Callable[[Floats], npt.NDArray[Any]]] = {
    "bfloat16": bfloat16.rounded,
    "float16": lambda floats: floats.astype(np.float16),
    "float32": lambda floats: floats,
}
