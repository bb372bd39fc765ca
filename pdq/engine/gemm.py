"""The compiled product of a few or many rows with the weight of a linear layer: y = x W^T + b.

Weights lie in blocks of BLOCK outputs, for each block all that a step along the inputs needs side by side: read once
from memory in one stream, while the rows stay in a core's cache. Sums are in float32, and of each output they have one
order, along the inputs: neither the number of rows nor that of threads changes a bit of the result.

What is written here in `llvm`'s terms takes items, which are (block of outputs, group of row tiles), from any number of
threads. Called by `compiled_product`, which lays out the memory that FIELDS name.
"""

from __future__ import annotations

import torch

from pdq.engine.llvm import FLOATS, INTS, LANES, PAIRS, Function, Variable

BLOCK = 32  # outputs
MOST_ROWS = 12  # of a tile: with BLOCK outputs their sums fill the registers of AVX-512
# int64 each. x, out: rows of numbers, `x_row` and `out_row` bytes from one to the next; wide: is `out` float32 whatever
# x is? weight: as `CompiledProduct` lays it out; bias: float32, or 0. steps: along the inputs, of one float32 or two
# bfloat16 or four bytes. An item is `span` of the `blocks` of outputs and `per_group` of the `tiles` of rows, of which
# there are `groups`. ahead: how far the last tile of a block asks ahead: AHEAD, or to the next block.
FIELDS = (
    *("next", "x", "x_row", "out", "out_row", "wide", "rows", "items", "groups", "tiles", "per_group", "span", "ahead"),
    *("weight", "bias", "steps", "outputs", "blocks"),
)
# Of a product of bytes, where x is unsigned with zero at 128: scales: float32, of each output; zeros: int32, of each
# output what the product of its weights with zero is; row_scales: float32, of each row of x.
BYTE_FIELDS = (*FIELDS, "scales", "zeros", "row_scales")
_UNROLLED = 4
AHEAD = 12288  # bytes of the weight to ask for before they are needed: so much as arrives while rows are multiplied


class _Product:
    """Writes the function for tiles of `height` rows; the last tile ends with the last row, and overlaps another."""

    fields: tuple[str, ...] = FIELDS

    def __init__(self, dtype: torch.dtype, height: int, name: str) -> None:
        self.f = f = Function(name)
        self._kind = "float" if dtype is torch.float32 else "bfloat"
        self._height = height
        self._job = job = {field: f.number("%job", i) for i, field in enumerate(self.fields) if i}
        with f.taking("%job", job["items"]) as item:
            start = f.times(f.two("sdiv", "i64", item, job["groups"]), job["span"])
            first = f.times(f.two("srem", "i64", item, job["groups"]), job["per_group"])
            count = f.least(job["per_group"], f.two("sub", "i64", job["tiles"], first))
            with f.loop(f.least(job["span"], f.two("sub", "i64", job["blocks"], start))) as i:
                self._block(f.add(start, i), first, count)

    def _block(self, block: str, first: str, count: str) -> None:
        """`count` tiles of a block of outputs, from the tile `first` on."""
        f, job = self.f, self._job
        with f.loop(count) as i:
            last = f.two("sub", "i64", job["rows"], self._height)
            is_last = f.two("icmp eq", "i64", f.add(i, 1), count)
            ahead = f.op(f"select i1 {is_last}, i64 {job['ahead']}, i64 {AHEAD}")
            self._tile(block, f.least(f.times(f.add(first, i), self._height), last), ahead)

    def _tile(self, block: str, row: str, ahead: str) -> None:
        """ahead: what to ask for while this is computed. The weights of earlier tiles of a block are there already."""
        f, job = self.f, self._job
        weight = f.pointer(f.add(job["weight"], f.times(f.times(block, job["steps"]), BLOCK * 4)))
        rows = [f.pointer(f.add(job["x"], f.times(job["x_row"], f.add(row, r)))) for r in range(self._height)]
        sums = [[f.variable("zeroinitializer") for _ in range(BLOCK // LANES)] for _ in rows]
        whole = f.two("and", "i64", job["steps"], -_UNROLLED)
        with f.loop(whole, _UNROLLED) as step:
            for i in range(_UNROLLED):
                self._step(weight, rows, sums, f.add(step, i), ahead)
        with f.loop(f.two("sub", "i64", job["steps"], whole)) as step:
            self._step(weight, rows, sums, f.add(whole, step), ahead)
        self._finish(block, row, sums)

    def _step(self, weight: str, rows: list[str], sums: list[list[Variable]], step: str, ahead: str) -> None:
        f = self.f
        at = f.at(weight, f.times(step, BLOCK * 4), "i8")
        f.prefetch(f.at(at, ahead, "i8"), BLOCK * 4)
        places = [f.at(at, i * LANES * 4, "i8") for i in range(BLOCK // LANES)]
        weights = [f.op(f"load {self._vectors()}, ptr {place}, align 64") for place in places]
        for row, totals in zip(rows, sums, strict=True):
            x = self._everywhere(f.at(row, step, "i32"))
            for total, w in zip(totals, weights, strict=True):
                total.set(self._added(total.get(), x, w))

    def _vectors(self) -> str:
        return FLOATS if self._kind == "float" else PAIRS

    def _everywhere(self, address: str) -> str:
        """One step of a row of x, in all lanes."""
        return self.f.everywhere(self._kind, address)

    def _added(self, total: str, x: str, weights: str) -> str:
        if self._kind == "float":
            return self.f.fma(x, weights, total)
        return self.f.pair_products(total, x, weights)

    def _results(self, totals: list[str], row: str, output: str, there: str) -> list[str]:
        """What the sums of each row amount to, of the outputs from `output` on that are `there`."""
        return totals

    def _finish(self, block: str, row: str, sums: list[list[Variable]]) -> None:
        f, job = self.f, self._job
        for i in range(BLOCK // LANES):
            output = f.add(f.times(block, BLOCK), i * LANES)
            left = f.two("sub", "i64", job["outputs"], output)
            there = f.lanes_below(left)
            bias = f.variable("zeroinitializer")
            with f.when(f.two("icmp ne", "i64", job["bias"], 0)):
                bias.set(f.take("float", f.at(f.pointer(job["bias"]), output, "float"), there))
            found = self._results([totals[i].get() for totals in sums], row, output, there)
            found = [f.plus(result, bias.get()) for result in found]
            for kind, wide in (("float", 1), (self._kind, 0)):
                with f.when(f.two("icmp eq", "i64", job["wide"], wide)):
                    self._put(kind, found, row, output, left)

    def _put(self, kind: str, found: list[str], row: str, output: str, left: str) -> None:
        """left: outputs there are from `output` on; where a vector is more than that, only those."""
        f, job = self.f, self._job
        size = 4 if kind == "float" else 2
        to = [
            f.pointer(f.add(job["out"], f.times(job["out_row"], f.add(row, r)), f.times(output, size)))
            for r in range(len(found))
        ]
        for enough, mask in (("sge", None), ("slt", f.lanes_below(left))):
            with f.when(f.two(f"icmp {enough}", "i64", left, LANES)):
                for vector, address in zip(found, to, strict=True):
                    f.put(kind, vector, address, mask)


class _ByteProduct(_Product):
    """The same of bytes, for results of `dtype`. Sums are exact."""

    fields = BYTE_FIELDS

    def _vectors(self) -> str:
        return INTS

    def _everywhere(self, address: str) -> str:
        return self.f.cast(self.f.everywhere("float", address), FLOATS, INTS)

    def _added(self, total: str, x: str, weights: str) -> str:
        f = self.f
        return f.cast(f.byte_products(f.cast(total, FLOATS, INTS), x, weights), INTS, FLOATS)

    def _results(self, totals: list[str], row: str, output: str, there: str) -> list[str]:
        f, job = self.f, self._job
        scales = f.take("float", f.at(f.pointer(job["scales"]), output, "float"), there)
        zeros = f.cast(f.take("float", f.at(f.pointer(job["zeros"]), output, "float"), there), FLOATS, INTS)
        found = []
        for r, total in enumerate(totals):
            exact = f.two("sub", INTS, f.cast(total, FLOATS, INTS), zeros)
            scale = f.everywhere("float", f.at(f.pointer(job["row_scales"]), f.add(row, r), "float"))
            found.append(
                f.two("fmul", FLOATS, f.op(f"sitofp {INTS} {exact} to {FLOATS}"), f.two("fmul", FLOATS, scale, scales))
            )
        return found


def byte_product(dtype: torch.dtype, height: int, name: str) -> Function:
    """As `product`, over the memory of BYTE_FIELDS, with results of `dtype`."""
    return _ByteProduct(dtype, height, name).f


def product(dtype: torch.dtype, height: int, name: str) -> Function:
    """A function over the memory that FIELDS describe, for at least `height` rows, `height` at once."""
    return _Product(dtype, height, name).f
