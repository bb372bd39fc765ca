"""The compiled attention of one new token per sequence over its KV: flash decoding (arXiv 2205.14135, 2311.01282).

What is written here in `llvm`'s terms is, for each (sequence, kv head, `SPLIT` tokens), which any thread may take:
scores of all query heads of the group and their maximum, by `flash_scores`; then the exponentials, and beside them the
weighted sum of V. So K and V are read once for all heads of a group, where they lie, and converted in registers.
Whoever finishes the last split of a head brings the splits together. The splits depend on the sequence alone, and all
sums have one order: neither the batch nor the number of threads changes a bit of the result.

Memory is the limit, so it is never to wait: K, V and the next item's K are one stream, of which a piece some way ahead
is asked for all the time. Farther ahead, or in bursts, a CPU drops what it is asked for; two streams are slower.

Products are summed in float32. Called by `compiled`, which lays out the memory that `FIELDS` and `WRITE_FIELDS` name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pdq.engine.flash_scores import QUAD, Scores
from pdq.engine.llvm import FLOATS, INTS, LANES, Function, Variable, floats, ints

# Small enough for K and V of a split to stay in a core's cache, and for one long sequence to occupy all cores.
SPLIT = 512
# int64 each. next: the next item to take. scale: of the scores times log2(e), the
# bits of a float. query_piece, query_head: bytes from one to the next. Addresses: keys, values: of each piece's plane;
# capacities: its tokens in a plane; firsts, ends: what it sees; table: piece, head, split, number of splits of an item.
FIELDS = (
    *("next", "threads", "scale", "keys", "values", "query", "query_piece", "query_head", "out"),
    *("items", "table", "capacities", "firsts", "ends", "partial", "pending"),
)
# source: address of the new rows. from_head, from_piece: bytes from one to the next. size: bytes of a row.
WRITE_FIELDS = (
    *("next", "planes", "source", "from_head", "from_piece", "heads", "size", "pieces", "capacities", "ends"),
)
_AHEAD = 7168  # bytes; a whole item's K or V where that is less than `_SHORT`: it stays in the nearest cache
_SHORT = 32768
_REGISTERS = 24  # for what is kept of a block of heads
_PER_PIECE = ("keys", "values", "capacities", "firsts", "ends")
_MOST_VECTORS = 128  # of all heads of a group; beyond that the code becomes long
_NOTHING = "zeroinitializer"
_LEAST = floats(-math.inf)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one attention: query heads per kv head and the sizes of a row of K and V. dtype: bfloat16 or float32."""

    dtype: torch.dtype
    group: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def supported(self) -> bool:
        vectors = self.group * max(_vectors(self.dtype, dim) for dim in (self.key_dim, self.value_dim))
        whole = all(dim * self.dtype.itemsize % 4 == 0 for dim in (self.key_dim, self.value_dim))
        return self.dtype in (torch.bfloat16, torch.float32) and whole and vectors <= _MOST_VECTORS

    @property
    def partial_floats(self) -> int:
        """Of one item: for each head of the group the sums, the maximum and the denominator."""
        return self.group * (_vectors(self.dtype, self.value_dim) + 2) * LANES


def _vectors(dtype: torch.dtype, dim: int) -> int:
    """How many vectors hold a row."""
    return -(-dim // 32) * 2 if dtype is torch.bfloat16 else -(-dim // LANES)


class _Rows:
    """Rows of `dim` numbers in memory, one after another, and as vectors of floats.

    32 neighbours in bfloat16 are one vector of int32, and become two: the numbers at even places, whose bits are moved
    up, and those at odd ones, which are there already. All rows are split alike, so products and sums do not care.
    """

    def __init__(self, f: Function, dtype: torch.dtype, dim: int) -> None:
        self._f = f
        self._half = dtype is torch.bfloat16
        self.size = dim * dtype.itemsize
        self.vectors = _vectors(dtype, dim)

    def load(self, address: str) -> list[str]:
        f, out = self._f, []
        for start in range(0, self.size, 64):
            x = self._words(f.at(address, start, "i8"), min(LANES, (self.size - start) // 4))
            if self._half:
                out += [f.two("shl", INTS, x, ints(16)), f.two("and", INTS, x, ints(-65536))]
            else:
                out.append(x)
        return [f.cast(x, INTS, FLOATS) for x in out]

    def store(self, vectors: Sequence[str], address: str) -> None:
        f = self._f
        words = [f.cast(v, FLOATS, INTS) for v in vectors]
        if self._half:
            words = [self._pair(even, odd) for even, odd in zip(words[::2], words[1::2], strict=True)]
        for i, word in enumerate(words):
            count = min(LANES, (self.size - 64 * i) // 4)
            lanes = ", ".join(f"i32 {i}" for i in range(count))
            few = f.op(f"shufflevector {INTS} {word}, {INTS} poison, <{count} x i32> <{lanes}>")
            f.do(f"store <{count} x i32> {few}, ptr {f.at(address, 64 * i, 'i8')}, align 2")

    def _words(self, address: str, count: int) -> str:
        """The first `count` lanes from memory, the others zero."""
        kind = f"<{count} x i32>"
        lanes = ", ".join(f"i32 {min(i, count)}" for i in range(LANES))
        found = self._f.op(f"load {kind}, ptr {address}, align 2")
        return self._f.op(f"shufflevector {kind} {found}, {kind} {_NOTHING}, {INTS} <{lanes}>")

    def _pair(self, even: str, odd: str) -> str:
        """Two vectors of floats as 32 bfloat16, rounded to nearest, ties to even."""
        f, rounded = self._f, []
        for bits in (even, odd):
            last = f.two("and", INTS, f.two("lshr", INTS, bits, ints(16)), ints(1))
            rounded.append(f.two("add", INTS, f.two("add", INTS, bits, ints(0x7FFF)), last))
        low = f.two("lshr", INTS, rounded[0], ints(16))
        return f.two("or", INTS, low, f.two("and", INTS, rounded[1], ints(-65536)))


class _Item:
    """What one taken item works on. Numbers and addresses, as names."""

    def __init__(self, f: Function, job: dict[str, str], number: str, shape: Shape, key: _Rows, value: _Rows) -> None:
        self.number = number
        row = f.at(f.pointer(job["table"]), f.times(number, 4), "i64")
        self.piece, self.head, self.split, self.splits = (f.number(row, i) for i in range(4))
        of = {name: f.number(f.pointer(job[name]), self.piece) for name in _PER_PIECE}
        first = f.add(of["firsts"], f.times(self.split, SPLIT))
        self.tokens = f.least(f.two("sub", "i64", of["ends"], first), SPLIT)
        before = f.add(f.times(self.head, of["capacities"]), first)
        self.key = f.pointer(f.add(of["keys"], f.times(before, key.size)))
        self.value = f.pointer(f.add(of["values"], f.times(before, value.size)))
        self.first_head = f.times(f.add(f.times(self.piece, shape.kv_heads), self.head), shape.group)


class _Attend:
    """Writes the function that takes items until there are no more."""

    def __init__(self, shape: Shape) -> None:
        self.f = f = Function("attend")
        self._shape = shape
        self._key, self._value = _Rows(f, shape.dtype, shape.key_dim), _Rows(f, shape.dtype, shape.value_dim)
        self._stride = shape.partial_floats // shape.group
        self._scores = Scores(f, shape.dtype, shape.group, shape.key_dim, SPLIT)
        self._job = {name: f.number("%job", i) for i, name in enumerate(FIELDS) if i}
        scale = f.real(self._job["scale"])
        with f.taking("%job", self._job["items"]) as number:
            item = _Item(f, self._job, number, shape, self._key, self._value)
            self._scores.load_query(self._query(item), self._job["query_head"])
            keys, values = (item.key, self._key), (item.value, self._value)
            self._scores.fill(item.key, item.tokens, scale, lambda quad: self._fetch(item, quad, keys, values))
            part = f.at(f.pointer(self._job["partial"]), f.times(number, shape.partial_floats), "float")
            self._add_values(item, self._following(item), part)
            for g, (top, total) in enumerate(zip(self._scores.tops(), self._scores.totals(), strict=True)):
                f.store(FLOATS, top, self._of(part, g, self._value.vectors))
                f.store(FLOATS, total, self._of(part, g, self._value.vectors + 1))
            self._finish(item)

    def _query(self, item: _Item) -> str:
        """Address of the group's first row."""
        f, job = self.f, self._job
        head = f.times(f.times(item.head, self._shape.group), job["query_head"])
        return f.at(f.pointer(job["query"]), f.add(f.times(item.piece, job["query_piece"]), head), "i8")

    def _following(self, item: _Item) -> _Item:
        """What this thread takes next, if all are equally fast."""
        f = self.f
        number = f.least(f.add(item.number, self._job["threads"]), f.add(self._job["items"], -1))
        return _Item(f, self._job, number, self._shape, self._key, self._value)

    def _of(self, part: str, head: int, vector: int) -> str:
        """A vector of a partial result."""
        return self.f.at(part, head * self._stride + vector * LANES, "float")

    def _blocks(self, vectors: int) -> list[range]:
        """The heads of the group, as many at once as registers allow, but about as many each time."""
        most, group = max(1, _REGISTERS // vectors), self._shape.group
        size = -(-group // -(-group // most))
        return [range(start, min(group, start + size)) for start in range(0, group, size)]

    def _row(self, base: str, rows: _Rows, item: _Item, token: str) -> list[str]:
        """Row `token`, or the last one there is: memory beyond may not be ours."""
        f = self.f
        return rows.load(f.at(base, f.times(f.least(token, f.add(item.tokens, -1)), rows.size), "i8"))

    def _fetch(self, item: _Item, quad: str, now: tuple[str, _Rows], then: tuple[str, _Rows]) -> None:
        """Ask for what lies ahead of the rows at `quad` of what is read now; past its end, of what is read then."""
        f = self.f
        (base, rows), (next_base, next_rows) = now, then
        short = f.two("icmp sle", "i64", item.tokens, _SHORT // rows.size)
        way = f.op(f"select i1 {short}, i64 {item.tokens}, i64 {_AHEAD // rows.size}")
        ahead = f.add(quad, way)
        past = f.two("sub", "i64", ahead, item.tokens)
        here = f.at(base, f.times(ahead, rows.size), "i8")
        there = f.at(next_base, f.times(past, next_rows.size), "i8")
        at = f.op(f"select i1 {f.two('icmp slt', 'i64', past, 0)}, ptr {here}, ptr {there}")
        f.prefetch(at, QUAD * max(rows.size, next_rows.size))

    def _add_values(self, item: _Item, following: _Item, part: str) -> None:
        f, value = self.f, self._value
        sums = [[f.variable(_NOTHING) for _ in range(value.vectors)] for _ in range(self._shape.group)]
        self._scores.weigh("0")
        with f.loop(item.tokens, LANES) as start:
            self._scores.weigh(f.add(start, LANES))  # ahead, so that nothing waits for it
            for heads in self._blocks(value.vectors):
                with f.loop(f.least(f.two("sub", "i64", item.tokens, start), LANES), QUAD) as offset:
                    quad = f.add(start, offset)
                    if heads[0] == 0:
                        self._fetch(item, quad, (item.value, value), (following.key, self._key))
                    for t in range(QUAD):
                        row = self._row(item.value, value, item, f.add(quad, t))
                        for g in heads:
                            _add_row(f, sums[g], self._scores.weight(g, quad, t), row)
        for g, totals in enumerate(sums):
            for j, total in enumerate(totals):
                f.store(FLOATS, total.get(), self._of(part, g, j))

    def _finish(self, item: _Item) -> None:
        """The last one to come brings the splits of a head together."""
        f, shape = self.f, self._shape
        place = f.add(f.times(item.piece, shape.kv_heads), item.head)
        arrived = f.at(f.pointer(self._job["pending"]), place, "i64")
        before = f.op(f"atomicrmw add ptr {arrived}, i64 1 acq_rel")
        with f.when(f.two("icmp eq", "i64", f.add(before, 1), item.splits)):
            f.store("i64", "0", arrived)
            first = f.times(f.two("sub", "i64", item.number, item.split), shape.partial_floats)
            parts = f.at(f.pointer(self._job["partial"]), first, "float")
            for g in range(shape.group):
                out = f.times(f.add(item.first_head, g), self._value.size)
                row = self._joined(parts, item.splits, g)
                self._value.store(row, f.at(f.pointer(self._job["out"]), out, "i8"))

    def _joined(self, parts: str, splits: str, head: int) -> list[str]:
        f, vectors = self.f, self._value.vectors

        def part(split: str, vector: int) -> str:
            base = f.at(parts, f.times(split, self._shape.partial_floats), "float")
            return f.load(FLOATS, self._of(base, head, vector))

        top = f.variable(_LEAST)
        with f.loop(splits) as split:
            top.set(f.larger(part(split, vectors), top.get()))
        sums = [f.variable(_NOTHING) for _ in range(vectors)]
        total = f.variable(_NOTHING)
        with f.loop(splits) as split:
            weight = f.exp2(f.two("fsub", FLOATS, part(split, vectors), top.get()))
            _add_row(f, sums, weight, [part(split, j) for j in range(vectors)])
            _add_row(f, [total], weight, [part(split, vectors + 1)])
        return [f.two("fdiv", FLOATS, x.get(), total.get()) for x in sums]


def attend(shape: Shape) -> Function:
    """A function over the memory that FIELDS describe; any number of threads may call it with the same."""
    return _Attend(shape).f


def write() -> Function:
    """A function that copies one new row per piece and head to the end of its plane; see WRITE_FIELDS."""
    f = Function("write")
    job = {name: f.number("%job", i) for i, name in enumerate(WRITE_FIELDS) if i}
    planes, capacities, ends = (f.pointer(job[name]) for name in ("planes", "capacities", "ends"))
    with f.loop(job["pieces"]) as piece:
        plane, capacity, end = (f.number(of, piece) for of in (planes, capacities, ends))
        with f.loop(job["heads"]) as head:
            to = f.times(f.add(f.times(head, capacity), end, -1), job["size"])
            source = f.add(f.times(piece, job["from_piece"]), f.times(head, job["from_head"]))
            f.copy(f.at(f.pointer(plane), to, "i8"), f.at(f.pointer(job["source"]), source, "i8"), job["size"])
    return f


def _add_row(f: Function, sums: Sequence[Variable], weight: str, row: Sequence[str]) -> None:
    for total, x in zip(sums, row, strict=True):
        total.set(f.fma(weight, x, total.get()))
