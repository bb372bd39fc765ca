"""The compiled attention of many new tokens of one sequence: flash attention (arXiv 2205.14135, 2307.08691).

The query rows of a kv head, (token, query head of the group), lie in the lanes of vectors; up to `MOST_VECTORS` vectors
are one item, which any thread may take. An item goes through what its rows see in tiles of `TILE` tokens: scores, with
each number (in bfloat16: pair of numbers) of K as it lies in memory against a vector of rows; weights; and V, whose
neighbouring tokens are interleaved for that in bfloat16, against the weights. A row stays in its lane all the way, so
maxima, sums and rescaling need no work across lanes. Only tiles that some row does not see whole are masked. A lane
does the same sums in the same order whatever lies beside it: neither threads nor neighbours change a bit.

Sums are in float32, weights are rounded to the dtype. `flash_rows` brings rows into lanes and results out. Called by
`compiled_chunk`, which lays out what `FIELDS` name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from pdq.engine.flash import Shape
from pdq.engine.flash_rows import OUT_FIELDS, QUERY_FIELDS, Rows, words
from pdq.engine.llvm import FLOATS, INTS, LANES, PAIRS, Function, Variable, floats, lanes

TILE = 64
MOST_VECTORS = 3
NO_WINDOW = 1 << 30
# int64 each, what differs from call to call first. next: the next item to take. scale: of the scores times log2(e), the
# bits of a positive float; flip: bits to flip in each 32 of a query row, where it is negative. query, key, value, out:
# addresses; capacity: tokens from one head of K and V to the next; the others: bytes from one row or head to the next.
CALL_FIELDS = ("next", "scale", "flip", *QUERY_FIELDS, "key", "value", "capacity", *OUT_FIELDS)
FIELDS = (*CALL_FIELDS, "window", "items", "table", "limits", "tokens", "heads")
# Tokens [start, end) are seen by some row, [whole, whole_end) by all. first: vector of rows.
ITEM_FIELDS = ("head", "first", "vectors", "start", "end", "whole", "whole_end")
_SUMS = 24  # kept in registers at once
_STEP = 8  # tokens at once, or a multiple
_UNROLLED = 4
_MOST = 2 * LANES  # bfloat16 numbers in a vector
_NOTHING = "zeroinitializer"
_LEAST = floats(-math.inf)
_ONES = f"<{', '.join(['bfloat 1.0'] * 2 * LANES)}>"


class _Rooms:
    """Memory of one thread. rows: addresses; query, scores, sums: vectors, those of an item's rows side by side."""

    def __init__(self, f: Function, shape: Shape) -> None:
        self.rows = f.room("i64", MOST_VECTORS * LANES)
        self.query = f.room(FLOATS, words(shape, shape.key_dim) * MOST_VECTORS)
        self.scores = f.room(FLOATS, TILE * MOST_VECTORS)
        self.pairs = f.room("i32", TILE // 2 * shape.value_dim) if shape.dtype is torch.bfloat16 else ""
        self.sums = f.room(FLOATS, shape.value_dim * MOST_VECTORS)
        self.spoiled = f.room("i1")


class _Tile:
    """Tokens [start, start + count) of the view; `padded` is a multiple of `_STEP`."""

    def __init__(self, f: Function, item: dict[str, str], start: str) -> None:
        self.start = start
        self.count = f.least(f.two("sub", "i64", item["end"], start), TILE)
        self.last = f.add(self.count, -1)
        self.padded = f.two("and", "i64", f.add(self.count, _STEP - 1), -_STEP)


class _Chunk:
    """Writes the function that takes items until there are no more."""

    def __init__(self, shape: Shape) -> None:
        self.f = f = Function("chunk")
        self._job = {name: f.number("%job", i) for i, name in enumerate(FIELDS) if i}
        rooms, scale = _Rooms(f, shape), f.real(self._job["scale"])
        with f.taking("%job", self._job["items"]) as number:
            row = f.at(f.pointer(self._job["table"]), f.times(number, len(ITEM_FIELDS)), "i64")
            item = {name: f.number(row, i) for i, name in enumerate(ITEM_FIELDS)}
            for vectors in range(1, MOST_VECTORS + 1):
                with f.when(f.two("icmp eq", "i64", item["vectors"], vectors)):
                    _Item(f, shape, self._job, item, rooms, vectors).write(scale)


class _Item:
    """Writes the work on an item of `vectors` vectors of rows."""

    def __init__(
        self, f: Function, shape: Shape, job: dict[str, str], item: dict[str, str], rooms: _Rooms, vectors: int
    ) -> None:
        self._f, self._shape, self._job, self._item, self._rooms = f, shape, job, item, rooms
        self._vectors = range(vectors)
        self._half = shape.dtype is torch.bfloat16
        self._kind = "bfloat" if self._half else "float"
        self._size = shape.dtype.itemsize
        self._pack = 4 // self._size  # tokens whose numbers are multiplied at once
        self._key_size, self._value_size = (d * shape.dtype.itemsize for d in (shape.key_dim, shape.value_dim))
        before = f.times(item["head"], job["capacity"])
        self._key = f.at(f.pointer(job["key"]), f.times(before, self._key_size), "i8")
        self._value = f.at(f.pointer(job["value"]), f.times(before, self._value_size), "i8")
        self._tops, self._totals, self._levels = (
            [f.variable(x) for _ in self._vectors] for x in (_LEAST, _NOTHING, _LEAST)
        )

    def write(self, scale: str) -> None:
        f, item = self._f, self._item
        rows = Rows(f, self._shape, self._job, item, self._rooms.rows, len(self._vectors))
        rows.load_query(self._rooms.query)
        with f.loop(self._shape.value_dim * len(self._vectors)) as i:
            f.store(FLOATS, _NOTHING, f.at(self._rooms.sums, i, FLOATS))
        with f.loop(f.two("sub", "i64", item["end"], item["start"]), TILE) as offset:
            tile = _Tile(f, item, f.add(item["start"], offset))
            self._score(tile)
            shrink = self._weigh(tile, scale)
            f.store("i1", "false", self._rooms.spoiled)
            with f.when(self._hidden(tile.start, tile.count)):
                f.store("i1", self._spoiled(tile), self._rooms.spoiled)
            spoiled = f.load("i1", self._rooms.spoiled)
            with f.when(f.two("xor", "i1", spoiled, "true")):
                self._add_values(tile, shrink)
            with f.when(spoiled):
                self._add_seen_values(tile, shrink)
        rows.store(self._rooms.sums, [f.two("fdiv", FLOATS, floats(1.0), total.get()) for total in self._totals])

    # ---- scores and weights of a tile, `[tokens, vectors]`; weights in bfloat16 `[pairs of tokens, vectors]` ----

    def _score(self, tile: _Tile) -> None:
        f = self._f
        with f.loop(tile.padded, _STEP) as first:
            rows = [self._token(self._key, self._key_size, tile, f.add(first, i)) for i in range(_STEP)]
            self._fetch(tile, first)
            sums = [[f.variable(_NOTHING) for _ in self._vectors] for _ in rows]

            def add(word: str) -> None:
                query = [self._numbers(self._at(self._rooms.query, word, w)) for w in self._vectors]
                for row, totals in zip(rows, sums, strict=True):
                    self._add(totals, f.everywhere(self._kind, f.at(row, word, "i32")), query)

            _repeat(f, words(self._shape, self._shape.key_dim), add)
            with f.when(self._hidden(f.add(tile.start, first), _STEP)):
                self._mask(tile, first, sums)
            for i, totals in enumerate(sums):
                for w, total in enumerate(totals):
                    f.store(FLOATS, total.get(), self._at(self._rooms.scores, f.add(first, i), w))
                    self._tops[w].set(f.larger(total.get(), self._tops[w].get()))

    def _fetch(self, tile: _Tile, first: str) -> None:
        """Ask for K and V of the next tile while there is arithmetic to do."""
        f = self._f
        ahead = f.add(tile.start, first, TILE)
        for base, size in ((self._key, self._key_size), (self._value, self._value_size)):
            f.prefetch(f.at(base, f.times(ahead, size), "i8"), _STEP * size)

    def _hidden(self, first: str, count: str | int) -> str:
        """Does some row not see some of the tokens?"""
        f, item = self._f, self._item
        early = f.two("icmp slt", "i64", first, item["whole"])
        late = f.two("icmp sgt", "i64", f.add(first, count), item["whole_end"])
        return f.two("or", "i1", early, late)

    def _mask(self, tile: _Tile, first: str, sums: Sequence[Sequence[Variable]]) -> None:
        """Scores of tokens that a row does not see become -inf."""
        f = self._f
        bounds = [self._bounds(w) for w in self._vectors]
        for i, totals in enumerate(sums):
            for total, bound in zip(totals, bounds, strict=True):
                total.set(f.choose(self._seen(tile, f.add(first, i), *bound), total.get(), _LEAST))

    def _bounds(self, vector: int) -> tuple[str, str]:
        """Of each row, the last token that it sees and the last one before its window."""
        f = self._f
        first = f.times(f.add(self._item["first"], vector), LANES)
        limits = f.load(INTS, f.at(f.pointer(self._job["limits"]), first, "i32"))
        window = f.spread_word(f.op(f"trunc i64 {self._job['window']} to i32"))
        return limits, f.two("sub", INTS, limits, window)

    def _seen(self, tile: _Tile, token: str, limits: str, hidden: str) -> str:
        f = self._f
        position = f.spread_word(f.op(f"trunc i64 {f.add(tile.start, token)} to i32"))
        inside = f.two("icmp sle", INTS, position, limits), f.two("icmp sgt", INTS, position, hidden)
        return f.two("and", "<16 x i1>", *inside)

    def _weigh(self, tile: _Tile, scale: str) -> list[str]:
        """Scores become weights, in their places. What the sums so far are to be multiplied with, for each vector."""
        f = self._f
        shrink, shifts = [], []
        for w, top in enumerate(self._tops):
            level = f.two("fmul", FLOATS, top.get(), scale)
            # A row that has seen nothing yet: -inf - -inf is not a number.
            shift = f.choose(f.two("fcmp oeq", FLOATS, level, _LEAST), _NOTHING, level)
            shrink.append(f.exp2(f.two("fsub", FLOATS, self._levels[w].get(), shift)))
            shifts.append(f.op(f"fneg {FLOATS} {shift}"))
            self._levels[w].set(level)
            self._totals[w].set(f.two("fmul", FLOATS, self._totals[w].get(), shrink[w]))
        with f.loop(self._units(tile)) as unit:
            if self._half:
                self._interleave(tile, unit)  # loads and stores, beside all the arithmetic
            for w, total in enumerate(self._totals):
                total.set(self._weigh_unit(unit, w, scale, shifts[w], total.get()))
        return shrink

    def _weigh_unit(self, unit: str, vector: int, scale: str, shift: str, total: str) -> str:
        """The weights of a token or a pair of them; `total` with them added, as they are after rounding."""
        f = self._f
        tokens = [f.add(f.times(unit, self._pack), i) for i in range(self._pack)]
        scores = [f.load(FLOATS, self._at(self._rooms.scores, token, vector)) for token in tokens]
        power = f.rough_exp2 if self._half else f.exp2
        weights = [power(f.fma(score, scale, shift)) for score in scores]
        if self._half:
            pair = f.paired(*weights)
            f.store(PAIRS, pair, self._at(self._rooms.scores, unit, vector))
            return f.pair_products(total, pair, _ONES)
        f.store(FLOATS, weights[0], self._at(self._rooms.scores, unit, vector))
        return f.plus(total, weights[0])

    # ---- sums of V, `[value_dim, vectors]` ----

    def _interleave(self, tile: _Tile, unit: str) -> None:
        """V of neighbouring tokens side by side: `[pairs of tokens, value_dim, 2]`. This is the pair `unit`."""
        f, dims = self._f, self._shape.value_dim
        tokens = [f.add(f.times(unit, 2), i) for i in range(2)]
        rows = [self._token(self._value, self._value_size, tile, token) for token in tokens]

        def interleave(first: str, count: int) -> None:
            kind = f"<{count} x i16>"
            even, odd = (f.load(kind, f.at(row, first, "i16")) for row in rows)
            for start in range(0, count, LANES):
                few = range(start, min(start + LANES, count))
                places = ", ".join(f"i32 {i}, i32 {i + count}" for i in few)
                both = f.op(f"shufflevector {kind} {even}, {kind} {odd}, <{2 * len(few)} x i32> <{places}>")
                f.store(f"<{2 * len(few)} x i16>", both, self._pair_at(unit, f.add(first, start)))

        _repeat(f, dims // _MOST, lambda i: interleave(f.times(i, _MOST), _MOST))
        if rest := dims % _MOST:
            interleave(str(dims - rest), rest)

    def _spoiled(self, tile: _Tile) -> str:
        """Is something in V that even a weight of zero does not make zero: inf, or not a number?"""
        f, total = self._f, self._f.variable(_NOTHING)
        with f.loop(tile.count) as token:
            row = self._token(self._value, self._value_size, tile, token)
            for first in range(0, self._shape.value_dim, LANES):
                mask = lanes(self._shape.value_dim - first)
                total.set(f.fma(f.take(self._kind, f.at(row, first * self._size, "i8"), mask), _NOTHING, total.get()))
        return f.some(f.two("fcmp uno", FLOATS, total.get(), total.get()))

    def _add_values(self, tile: _Tile, shrink: Sequence[str]) -> None:
        f, dims, most = self._f, self._shape.value_dim, _SUMS // MOST_VECTORS
        with f.loop(dims // most) as block:
            self._add_dims(tile, shrink, f.times(block, most), most)
        if rest := dims % most:
            self._add_dims(tile, shrink, str(dims - rest), rest)

    def _add_dims(self, tile: _Tile, shrink: Sequence[str], first: str, count: int) -> None:
        f = self._f
        places = [[self._at(self._rooms.sums, f.add(first, i), w) for w in self._vectors] for i in range(count)]
        sums = [
            [f.variable(f.two("fmul", FLOATS, f.load(FLOATS, at), x)) for at, x in zip(row, shrink, strict=True)]
            for row in places
        ]
        step = _STEP // self._pack
        with f.loop(self._units(tile), step) as start:
            for i in range(step):
                unit = f.add(start, i)
                weights = [self._numbers(self._at(self._rooms.scores, unit, w)) for w in self._vectors]
                row = self._values(tile, unit, first)
                for j, totals in enumerate(sums):
                    self._add(totals, f.everywhere(self._kind, f.at(row, j, "i32")), weights)
        for row_sums, row_places in zip(sums, places, strict=True):
            for total, at in zip(row_sums, row_places, strict=True):
                f.store(FLOATS, total.get(), at)

    def _values(self, tile: _Tile, unit: str, first: str) -> str:
        """Address of V from dim `first` on, of a token or an interleaved pair."""
        if self._half:
            return self._pair_at(unit, first)
        return self._f.at(self._token(self._value, self._value_size, tile, unit), first, "float")

    def _add_seen_values(self, tile: _Tile, shrink: Sequence[str]) -> None:
        """Slower: each row adds what it sees, and no zero times what it does not see."""
        f, dims = self._f, self._shape.value_dim
        with f.loop(dims) as dim:
            for w in self._vectors:
                at = self._at(self._rooms.sums, dim, w)
                f.store(FLOATS, f.two("fmul", FLOATS, f.load(FLOATS, at), shrink[w]), at)
        bounds = [self._bounds(w) for w in self._vectors]
        with f.loop(tile.count) as token:
            weights = [self._weight(token, w) for w in self._vectors]
            seen = [self._seen(tile, token, *bounds[w]) for w in self._vectors]
            row = self._token(self._value, self._value_size, tile, token)
            with f.loop(dims) as dim:
                x = self._number(f.at(row, f.times(dim, self._size), "i8"))
                for w in self._vectors:
                    at = self._at(self._rooms.sums, dim, w)
                    total = f.load(FLOATS, at)
                    f.store(FLOATS, f.choose(seen[w], f.fma(weights[w], x, total), total), at)

    def _weight(self, token: str, vector: int) -> str:
        f = self._f
        if not self._half:
            return f.load(FLOATS, self._at(self._rooms.scores, token, vector))
        even, odd = f.halves(f.load(PAIRS, self._at(self._rooms.scores, f.two("lshr", "i64", token, 1), vector)))
        is_odd = f.op(f"trunc i64 {token} to i1")
        return f.op(f"select i1 {is_odd}, {FLOATS} {odd}, {FLOATS} {even}")

    def _number(self, address: str) -> str:
        """The number there, in all lanes."""
        f = self._f
        if not self._half:
            return f.everywhere("float", address)
        bits = f.op(f"zext i16 {f.op(f'load i16, ptr {address}, align 2')} to i32")
        return f.spread(f.cast(f.two("shl", "i32", bits, 16), "i32", "float"))

    # ---- addresses and arithmetic ----

    def _at(self, base: str, row: str, vector: int) -> str:
        return self._f.at(base, self._f.add(self._f.times(row, len(self._vectors)), vector), FLOATS)

    def _pair_at(self, unit: str, dim: str) -> str:
        return self._f.at(self._rooms.pairs, self._f.add(self._f.times(unit, self._shape.value_dim), dim), "i32")

    def _token(self, base: str, size: int, tile: _Tile, token: str) -> str:
        """Row `token` of the tile, or its last one: memory beyond may not be ours."""
        f = self._f
        return f.at(base, f.times(f.add(tile.start, f.least(token, tile.last)), size), "i8")

    def _units(self, tile: _Tile) -> str:
        return self._f.two("sdiv", "i64", tile.padded, self._pack)

    def _numbers(self, address: str) -> str:
        return self._f.load(PAIRS if self._half else FLOATS, address)

    def _add(self, totals: Sequence[Variable], a: str, vectors: Sequence[str]) -> None:
        for total, b in zip(totals, vectors, strict=True):
            if self._half:
                total.set(self._f.pair_products(total.get(), a, b))
            else:
                total.set(self._f.fma(a, b, total.get()))


def chunk(shape: Shape) -> Function:
    """A function over the memory that FIELDS describe; any number of threads may call it with the same."""
    return _Chunk(shape).f


def _repeat(f: Function, count: int, do: Callable[[str], None]) -> None:
    """do(i) for each i below `count`, several in a row."""
    whole = count // _UNROLLED * _UNROLLED
    with f.loop(whole, _UNROLLED) as first:
        for i in range(_UNROLLED):
            do(f.add(first, i))
    for i in range(whole, count):
        do(str(i))
