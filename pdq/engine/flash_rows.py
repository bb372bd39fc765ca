"""Query rows of a sequence into the lanes of vectors, and results back out: the ends of what `flash_chunk` writes.

Rows lie anywhere in memory. In lanes they are columns: vector `i` has number `i` of 16 rows, or in bfloat16 the pair of
numbers `2 i` and `2 i + 1`. Knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdq.engine.flash import Shape
from pdq.engine.llvm import FLOATS, INTS, LANES, Function, lanes

# Of a job: the address of the first row, bytes from one token to the next and from one head to the next.
QUERY_FIELDS = ("query", "query_row", "query_head")
OUT_FIELDS = ("out", "out_row", "out_head")


class Rows:
    """The rows of one item, in `vectors` vectors side by side.

    job, item: fields, of which `tokens`, `heads`, `flip`, `head` and `first` are used besides those above. addresses:
    of memory for one address per row.
    """

    def __init__(
        self, f: Function, shape: Shape, job: dict[str, str], item: dict[str, str], addresses: str, vectors: int
    ) -> None:
        self._f, self._shape, self._job, self._item = f, shape, job, item
        self._addresses, self._vectors = addresses, vectors

    def load_query(self, to: str) -> None:
        """`[words, vectors]` of queries, with the bits of `flip` flipped."""
        f = self._f
        self._find(QUERY_FIELDS)
        flip = f.spread_word(f.op(f"trunc i64 {self._job['flip']} to i32"))

        def load(vector: str, first: str, count: int) -> None:
            offset = f.times(first, 4)
            rows = [f.take("float", self._row(vector, lane, offset), lanes(count)) for lane in range(LANES)]
            for i, column in enumerate(f.transposed(rows)[:count]):
                word = f.two("xor", INTS, f.cast(column, FLOATS, INTS), flip)
                f.store(INTS, word, self._at(to, f.add(first, i), vector))

        self._in_blocks(words(self._shape, self._shape.key_dim), load)

    def store(self, sums: str, factors: Sequence[str]) -> None:
        """The rows of `[value_dim, vectors]` times a factor for each vector's lanes, as numbers of the dtype."""
        f, size = self._f, self._shape.dtype.itemsize
        self._find(OUT_FIELDS)
        kept = f.room(FLOATS, self._vectors)
        for w, factor in enumerate(factors):
            f.store(FLOATS, factor, f.at(kept, w, FLOATS))

        def store(vector: str, first: str, count: int) -> None:
            factor = f.load(FLOATS, f.at(kept, vector, FLOATS))
            columns = [f.load(FLOATS, self._at(sums, f.add(first, i), vector)) for i in range(count)]
            columns = [f.two("fmul", FLOATS, column, factor) for column in columns]
            rows = f.transposed([*columns, *["zeroinitializer"] * (LANES - count)])
            for lane, row in enumerate(rows):
                to = self._row(vector, lane, f.times(first, size))
                f.put("bfloat" if size == 2 else "float", row, to, lanes(count))

        self._in_blocks(self._shape.value_dim, store)

    def _find(self, fields: tuple[str, str, str]) -> None:
        """Puts the rows' addresses into memory."""
        f = self._f
        base, by_token, by_head = (self._job[name] for name in fields)
        start = f.add(base, f.times(f.times(self._item["head"], self._shape.group), by_head))
        first = f.times(self._item["first"], LANES)
        with f.loop(self._vectors * LANES) as i:
            at = f.add(first, i)
            token, head = (f.number(f.pointer(self._job[name]), at) for name in ("tokens", "heads"))
            address = f.add(start, f.times(token, by_token), f.times(head, by_head))
            f.store("i64", address, f.at(self._addresses, i, "i64"))

    def _row(self, vector: str, lane: int, offset: str) -> str:
        f = self._f
        address = f.number(self._addresses, f.add(f.times(vector, LANES), lane))
        return f.at(f.pointer(address), offset, "i8")

    def _at(self, base: str, column: str, vector: str) -> str:
        return self._f.at(base, self._f.add(self._f.times(column, self._vectors), vector), FLOATS)

    def _in_blocks(self, columns: int, do: Callable[[str, str, int], None]) -> None:
        """do(vector, first column, how many)"""
        whole, rest = divmod(columns, LANES)
        with self._f.loop(self._vectors) as vector:
            with self._f.loop(whole * LANES, LANES) as first:
                do(vector, first, LANES)
            if rest:
                do(vector, str(whole * LANES), rest)


def words(shape: Shape, dim: int) -> int:
    """How many words of 32 bits a row of `dim` numbers has."""
    return dim * shape.dtype.itemsize // 4
