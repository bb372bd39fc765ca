"""Between typed messages and the plain values that msgpack knows: dataclasses travel as arrays of their fields.

The check of a type is put together once, from its hints; decoding then only runs it, since a worker decodes several
messages for each request. Knows no message (messages.py) and no bytes.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Union, get_args, get_origin, get_type_hints

Check = Callable[[Any], Any]  # from a plain value to the typed one; raises Mismatch
_TYPES: dict[Check, frozenset[type[Any]]] = {}  # of checks that take any value of these types as it is
MOST_SEEN = 64  # combinations of types that are kept: a few occur, but whoever writes to Redis could send many


class Mismatch(ValueError):
    """A plain value that is not what its hint says. path: the names of the fields that lead to it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.path: list[str] = []


def plain(value: Any) -> tuple[Any, ...]:
    """The fields of a dataclass, dataclasses among them as they are. Raises TypeError for anything else."""
    kind: Any = type(value)
    return _values(kind)(value)


@cache
def _values(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    first, *names = _names(cls)
    if not names:
        return lambda value: (getattr(value, first),)
    return attrgetter(first, *names)


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(cls))


def check_of(hint: Any) -> Check:
    """The check for one type, made when it is first asked for."""
    return _check_of(hint)


@cache
def _check_of(hint: Any) -> Check:
    """hint: a dataclass, a tuple, an optional one of the others, or a scalar."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _optional(check_of(next(a for a in args if a is not type(None))))
    if origin is tuple:
        return _run_of(args[0]) if args[-1] is ... else _items(tuple(check_of(a) for a in args))
    if is_dataclass(hint):
        return _instance(hint)
    return _number if hint is float else _scalar(hint)


def _optional(check: Check) -> Check:
    def optional(value: Any) -> Any:
        return None if value is None else check(value)

    if check in _TYPES:
        _TYPES[optional] = _TYPES[check] | {type(None)}
    return optional


def _run_of(hint: Any) -> Check:
    """A tuple of any length."""
    check = check_of(hint)

    def integers(value: Any) -> tuple[int, ...]:  # the long ones: token ids
        if not all(type(v) is int for v in _array(value)):
            raise Mismatch("expected integers")
        return tuple(value)

    return integers if hint is int else lambda value: tuple(check(v) for v in _array(value))


def _items(checks: tuple[Check, ...]) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if len(_array(value)) != len(checks):
            raise Mismatch(f"expected {len(checks)} items")
        return tuple(one(v) for one, v in zip(checks, value, strict=True))

    return check


def _array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Mismatch("expected an array")
    return value


def _instance(cls: Any) -> Check:
    hints, names = get_type_hints(cls), _names(cls)
    checks = [check_of(hints[name]) for name in names]
    required = sum(f.default is MISSING for f in fields(cls))
    seen: dict[tuple[type[Any], ...], list[int]] = {}  # types of the fields -> those fields that are to be looked at

    def check(value: Any) -> Any:
        if not isinstance(value, list) or len(value) > len(checks):
            raise Mismatch(f"expected an array of at most {len(checks)} fields")
        if len(value) < required:
            raise Mismatch("fields are missing")
        kinds = tuple(map(type, value))
        left = seen.get(kinds)
        if left is None:
            left = [i for i, kind in enumerate(kinds) if kind not in _TYPES.get(checks[i], ())]
            if len(seen) < MOST_SEEN:
                seen[kinds] = left
        done, i = value.copy(), 0
        try:
            for i in left:
                done[i] = checks[i](done[i])
        except Mismatch as e:
            e.path.insert(0, names[i])
            raise
        return cls(*done)

    return check


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Mismatch(f"expected float, got {type(value).__name__}")
    return float(value)


def _scalar(kind: type[Any]) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise Mismatch(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    _TYPES[check] = frozenset({kind})
    return check
