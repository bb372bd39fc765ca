"""What a transformer block does between its products, compiled: norms, rotary positions and KV writes, gates.

Each function takes rows (tokens) from any number of threads, computes in float32 and rounds once, where its result is
stored. Written in `llvm`'s terms; called by `program`, which lays out the memory that the FIELDS name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pdq.engine.llvm import FLOATS, LANES, Function, floats, lanes

# int64 each. rows: how many results. h_from, delta_from: for each of them the row of `h` and of `delta` it is made of.
# delta: is added to h before the norm, and h keeps the sum; both float32. weight: float32. epsilon: bits of a float.
NORM_FIELDS = (
    *("next", "rows", "h_from", "h", "h_row", "delta_from", "delta", "delta_row", "out", "out_row"),
    *("weight", "width", "epsilon"),
)
# mixed: rows of query heads, key heads and value heads; the queries are turned in place. cosines, sines: float32
# `[rows, rotated]`. keys, values: addresses of each piece's plane; pieces, positions: of each row; capacities: of each
# piece, tokens of a plane. query_weight, key_weight: float32 `[key_dim]`.
ROTATE_FIELDS = (
    *("next", "rows", "mixed", "mixed_row", "cosines", "sines", "keys", "values"),
    *("pieces", "positions", "capacities", "query_weight", "key_weight", "epsilon"),
)
# both: rows of `width` gates and as many numbers to be gated.
GATE_FIELDS = ("next", "rows", "both", "both_row", "out", "out_row", "width")
# columns: float32, by which the columns of x are multiplied first. out: bytes; scales: float32, of each row.
LEVELS_FIELDS = ("next", "rows", "x", "x_row", "columns", "out", "out_row", "scales", "width")
LEVELS = 127  # on each side of zero
ZERO = 128


@dataclass(frozen=True, slots=True)
class Heads:
    """Of a block's attention. rotated: leading dimensions of a head that positions turn, an even number, or 0.

    normed: is each head of query and key divided by its root mean square first?
    """

    dtype: torch.dtype
    queries: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotated: int
    normed: bool


def kind(dtype: torch.dtype) -> str:
    """LLVM's name of the numbers in memory."""
    return "float" if dtype is torch.float32 else "bfloat"


def norm(dtype: torch.dtype) -> Function:
    """Addition, and division by the root mean square (arXiv 1910.07467), over the memory of NORM_FIELDS.

    dtype: of `out`.
    """
    f = Function("norm")
    job = _job(f, NORM_FIELDS)
    with f.taking("%job", job["rows"]) as row:
        h, delta = (_row(f, job, name, f.number(f.pointer(job[f"{name}_from"]), row)) for name in ("h", "delta"))
        out = _row(f, job, "out", row)
        squares = f.variable("zeroinitializer")
        for i, mask in _vectors(f, job["width"]):
            x = f.plus(*(f.take("float", f.at(of, i, "float"), mask) for of in (h, delta)))
            f.put("float", x, f.at(h, i, "float"), mask)
            squares.set(f.fma(x, x, squares.get()))
        width = f.spread(f.op(f"sitofp i64 {job['width']} to float"))
        factor = _factor(f, f.fold(squares.get(), f.plus), width, f.real(job["epsilon"]))
        for i, mask in _vectors(f, job["width"]):
            weight = f.take("float", f.at(f.pointer(job["weight"]), i, "float"), mask)
            x = f.two("fmul", FLOATS, f.take("float", f.at(h, i, "float"), mask), factor)
            f.put(kind(dtype), f.two("fmul", FLOATS, x, weight), f.at(out, i, kind(dtype)), mask)
    return f


def gate(dtype: torch.dtype) -> Function:
    """silu(gate) * up over the memory of GATE_FIELDS."""
    f, of = Function("gate"), kind(dtype)
    job = _job(f, GATE_FIELDS)
    with f.taking("%job", job["rows"]) as row:
        gates, out = _row(f, job, "both", row), _row(f, job, "out", row)
        others = f.at(gates, job["width"], of)
        for i, mask in _vectors(f, job["width"]):
            x = f.take(of, f.at(gates, i, of), mask)
            y = f.two("fmul", FLOATS, _silu(f, x), f.take(of, f.at(others, i, of), mask))
            f.put(of, y, f.at(out, i, of), mask)
    return f


def levels(dtype: torch.dtype) -> Function:
    """Rows as unsigned bytes with zero at ZERO and the largest number LEVELS away; memory of LEVELS_FIELDS.

    The scale of a row that is not numbers is none either.
    """
    f, of = Function("levels"), kind(dtype)
    job = _job(f, LEVELS_FIELDS)

    def number(x: str, i: str, mask: str | None) -> str:
        column = f.take("float", f.at(f.pointer(job["columns"]), i, "float"), mask)
        return f.two("fmul", FLOATS, f.take(of, f.at(x, i, of), mask), column)

    with f.taking("%job", job["rows"]) as row:
        x, out = _row(f, job, "x", row), _row(f, job, "out", row)
        largest, spoiled = f.variable("zeroinitializer"), f.variable("zeroinitializer")
        for i, mask in _vectors(f, job["width"]):
            found = number(x, i, mask)
            size = f.op(f"call {FLOATS} @llvm.fabs.v16f32({FLOATS} {found})")
            largest.set(f.larger(size, largest.get()))
            spoiled.set(f.fma(found, "zeroinitializer", spoiled.get()))
        top = f.plus(f.fold(largest.get(), f.larger), f.fold(spoiled.get(), f.plus))
        scale = f.lane(f.two("fdiv", FLOATS, top, floats(LEVELS)), 0)
        f.store("float", scale, f.at(f.pointer(job["scales"]), row, "float"))
        factor = f.two("fdiv", FLOATS, floats(LEVELS), top)
        factor = f.choose(f.two("fcmp ogt", FLOATS, top, "zeroinitializer"), factor, "zeroinitializer")
        for i, mask in _vectors(f, job["width"]):
            f.put_bytes(f.fma(number(x, i, mask), factor, floats(ZERO + 0.5)), f.at(out, i, "i8"), mask)
    return f


def rotate(heads: Heads) -> Function:
    """Turns queries and keys by their positions, and writes K and V to the slots: memory of ROTATE_FIELDS."""
    f, of = Function("rotate"), kind(heads.dtype)
    job = _job(f, ROTATE_FIELDS)
    size = heads.dtype.itemsize
    with f.taking("%job", job["rows"]) as row:
        head = _Head(f, heads, job, row)
        queries = _row(f, job, "mixed", row)
        with f.loop(heads.queries) as i:
            at = f.at(queries, f.times(i, heads.key_dim), of)
            head.turn(at, at, "query_weight")
        piece = f.number(f.pointer(job["pieces"]), row)
        position = f.number(f.pointer(job["positions"]), row)
        capacity = f.number(f.pointer(job["capacities"]), piece)
        keys = f.at(queries, heads.queries * heads.key_dim, of)
        values = f.at(keys, heads.kv_heads * heads.key_dim, of)
        to_keys, to_values = (f.pointer(f.number(f.pointer(job[plane]), piece)) for plane in ("keys", "values"))
        with f.loop(heads.kv_heads) as i:
            place = f.add(f.times(i, capacity), position)
            to = f.at(to_keys, f.times(place, heads.key_dim), of)
            head.turn(f.at(keys, f.times(i, heads.key_dim), of), to, "key_weight")
            value = f.at(values, f.times(i, heads.value_dim), of)
            f.copy(f.at(to_values, f.times(place, heads.value_dim), of), value, str(heads.value_dim * size))
    return f


class _Head:
    """One head of a row at a time, as vectors: of both halves of what is turned, then of the rest."""

    def __init__(self, f: Function, heads: Heads, job: dict[str, str], row: str) -> None:
        self._f, self._heads, self._job, self._kind = f, heads, job, kind(heads.dtype)
        at = f.times(row, heads.rotated)
        self._cosines, self._sines = (f.at(f.pointer(job[name]), at, "float") for name in ("cosines", "sines"))
        half = heads.rotated // 2
        parts = (range(half), range(half, 2 * half), range(2 * half, heads.key_dim))
        # (first number, mask) of each vector
        self._parts = [[(i, lanes(part.stop - i)) for i in part[::LANES]] for part in parts]

    def turn(self, source: str, to: str, weight: str) -> None:
        places = [place for part in self._parts for place in part]
        found = self._load(self._kind, source, places)
        if self._heads.normed:
            found = self._normed(found, places, weight)
        n = len(self._parts[0])
        cosines, sines = (self._load("float", of, places[: 2 * n]) for of in (self._cosines, self._sines))
        for i, (a, b) in enumerate(zip(found[:n], found[n : 2 * n], strict=True)):
            found[i] = self._sum(a, cosines[i], self._f.op(f"fneg {FLOATS} {b}"), sines[i])
            found[n + i] = self._sum(b, cosines[n + i], a, sines[n + i])
        for x, (i, mask) in zip(found, places, strict=True):
            self._f.put(self._kind, x, self._f.at(to, i, self._kind), mask)

    def _load(self, of: str, source: str, places: Sequence[tuple[int, str | None]]) -> list[str]:
        return [self._f.take(of, self._f.at(source, i, of), mask) for i, mask in places]

    def _sum(self, a: str, x: str, b: str, y: str) -> str:
        return self._f.fma(a, x, self._f.two("fmul", FLOATS, b, y))

    def _normed(self, found: list[str], places: Sequence[tuple[int, str | None]], weight: str) -> list[str]:
        f = self._f
        squares = "zeroinitializer"
        for x in found:
            squares = f.fma(x, x, squares)
        width = floats(float(self._heads.key_dim))
        factor = _factor(f, f.fold(squares, f.plus), width, f.real(self._job["epsilon"]))
        weights = self._load("float", f.pointer(self._job[weight]), places)
        return [f.two("fmul", FLOATS, f.two("fmul", FLOATS, x, factor), w) for x, w in zip(found, weights, strict=True)]


def _job(f: Function, fields: Sequence[str]) -> dict[str, str]:
    return {name: f.number("%job", i) for i, name in enumerate(fields) if i}


def _row(f: Function, job: dict[str, str], name: str, row: str) -> str:
    return f.pointer(f.add(job[name], f.times(job[f"{name}_row"], row)))


def _vectors(f: Function, width: str) -> Iterator[tuple[str, str | None]]:
    """First number and mask of each vector of a row; what the caller writes is written for whole vectors and a rest."""
    whole = f.two("and", "i64", width, -LANES)
    with f.loop(whole, LANES) as i:
        yield i, None
    left = f.two("sub", "i64", width, whole)
    with f.when(f.two("icmp sgt", "i64", left, 0)):
        yield whole, f.lanes_below(left)


def _factor(f: Function, squares: str, width: str, epsilon: str) -> str:
    mean = f.plus(f.two("fdiv", FLOATS, squares, width), epsilon)
    root = f.op(f"call {FLOATS} @llvm.sqrt.v16f32({FLOATS} {mean})")
    return f.two("fdiv", FLOATS, floats(1.0), root)


def _silu(f: Function, x: str) -> str:
    """x / (1 + exp(-x)), by the exponential of what is not positive."""
    size = f.op(f"call {FLOATS} @llvm.fabs.v16f32({FLOATS} {x})")
    power = f.exp2(f.two("fmul", FLOATS, size, floats(-math.log2(math.e))))
    part = f.two("fdiv", FLOATS, floats(1.0), f.plus(power, floats(1.0)))
    positive = f.two("fcmp oge", FLOATS, x, "zeroinitializer")
    return f.two("fmul", FLOATS, x, f.choose(positive, part, f.two("fmul", FLOATS, power, part)))
