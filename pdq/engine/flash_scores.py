"""Scores of one token's query heads, and the weights that they become: the first half of what `flash` writes.

Heads of a group lie side by side in a vector, in up to `_MOST_SLOTS` slots. A few words of a row of K are read into
every slot at once, and multiplied as they lie in memory: in bfloat16, where the CPU has products of pairs, nothing is
widened. Fewer lanes of a slot are left to be summed than of a whole vector. Where pairs have to be widened, that is
done once for several heads, and each has vectors of its own.

Knows how K lies in memory, and nothing of V, items or threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from pdq.engine import cpu
from pdq.engine.llvm import FLOATS, INTS, LANES, PAIRS, Function, floats

QUAD = 4  # tokens whose scores of a head are neighbours
_MOST_SLOTS = LANES // QUAD
_REGISTERS = 8  # for queries of pairs that have to be widened
_NOTHING = "zeroinitializer"
_LEAST = floats(-math.inf)


class _Heads:
    """Some heads of the group. before: slots of those before them; words: of a row of K."""

    def __init__(self, f: Function, heads: range, before: int, words: int) -> None:
        self.heads = heads
        self.slots = 1 << (len(heads) - 1).bit_length()
        self.width = LANES // self.slots  # of a slot, in words of a row; also, tokens whose scores are one vector
        self.vectors = -(-words // self.width)
        self.before = before
        # Of a vector of scores: quads of tokens, each with a slot after the other.
        self.tokens = [lane // (QUAD * self.slots) * QUAD + lane % QUAD for lane in range(LANES)]
        self.strides = (1, 2, *(s for s in (4, 8) if s >= QUAD * self.slots))  # between lanes of the same head
        self.query = f.room(INTS, self.vectors)  # what lies in no head's row stays zero
        for i in range(self.vectors):
            f.store(INTS, _NOTHING, f.at(self.query, i, INTS))


class Scores:
    """Of all heads of a group, for up to `most_tokens` tokens: a multiple of LANES.

    They are kept as `[blocks of heads, tokens / QUAD, slots, QUAD]`; there are LANES tokens more, of no weight, so that
    `weigh` may be ahead of those who use its weights. dim: of a row of K.
    """

    def __init__(self, f: Function, dtype: torch.dtype, group: int, dim: int, most_tokens: int) -> None:
        self._f, self._room = f, most_tokens + LANES  # tokens
        self._half = dtype is torch.bfloat16
        self._row = dim * dtype.itemsize
        self._words = self._row // 4
        self._widened = self._half and not cpu.host().pair_products
        most = 1 if self._widened else _MOST_SLOTS
        self._blocks: list[_Heads] = []
        slots = 0
        for first in range(0, group, most):
            self._blocks.append(_Heads(f, range(first, min(first + most, group)), slots, self._words))
            slots += self._blocks[-1].slots
        self._scores = f.room("float", slots * self._room)
        self._tops: list[str] = []
        self._totals = [f.variable(_NOTHING) for _ in self._blocks]

    def load_query(self, base: str, head_size: str) -> None:
        """base: address of the first head's row; head_size: bytes from one to the next."""
        f = self._f
        for b in self._blocks:
            for slot, head in enumerate(b.heads):
                row = f.at(base, f.times(head_size, head), "i8")
                for i in range(b.vectors):
                    kind = f"<{self._count(b, i)} x i32>"
                    words = f.op(f"load {kind}, ptr {f.at(row, i * b.width, 'i32')}, align 2")
                    to = f.at(b.query, i * LANES + slot * b.width, "i32")
                    f.do(f"store {kind} {words}, ptr {to}, align 4")

    def fill(self, key: str, tokens: str, scale: str, beside: Callable[[str], None]) -> None:
        """Scores of rows [0, tokens) from `key` on. beside(token): what is to be written for each quad of tokens."""
        most = max(1, _REGISTERS // self._blocks[0].vectors) if self._widened else len(self._blocks)
        self._tops = []
        for first in range(0, len(self._blocks), most):
            blocks = self._blocks[first : first + most]
            self._tops += self._filled(blocks, key, tokens, scale, (lambda _: None) if first else beside)
        self._hide(tokens)
        for total in self._totals:
            total.set(_NOTHING)

    def _filled(
        self, blocks: Sequence[_Heads], key: str, tokens: str, scale: str, beside: Callable[[str], None]
    ) -> list[str]:
        """The largest scores, as by `_folded`."""
        f = self._f
        last = f.add(tokens, -1)
        tops = [f.variable(_LEAST) for _ in blocks]
        queries = [[f.load(INTS, f.at(b.query, i, INTS)) for i in range(b.vectors)] for b in blocks]
        step = max(b.width for b in blocks)
        with f.loop(tokens, step) as start:
            quads = []
            for first in range(0, step, QUAD):
                beside(f.add(start, first))
                # Beyond the last row memory may not be ours: that one's score is there more than once.
                places = [f.least(f.add(start, first + i), last) for i in range(QUAD)]
                rows = [f.at(key, f.times(place, self._row), "i8") for place in places]
                products = [[self._product(b, row, q) for b, q in zip(blocks, queries, strict=True)] for row in rows]
                quads.append([self._within(vectors) for vectors in zip(*products, strict=True)])
            for b, top, parts in zip(blocks, tops, zip(*quads, strict=True), strict=True):
                for i in range(0, step, b.width):
                    score = self._across(parts[i // QUAD : (i + b.width) // QUAD])
                    score = f.two("fmul", FLOATS, score, scale)
                    f.store(FLOATS, score, self._at(b, f.add(start, i)))
                    top.set(f.larger(score, top.get()))
        return [self._folded(b, top.get(), f.larger) for b, top in zip(blocks, tops, strict=True)]

    def _hide(self, tokens: str) -> None:
        """Scores of tokens that are not there become -inf."""
        f = self._f
        end = f.two("and", "i64", f.add(tokens, -1), -LANES)
        for b in self._blocks:
            for i in range(0, 2 * LANES, b.width):
                at = self._at(b, f.add(end, i))
                left = f.two("sub", "i64", tokens, f.add(end, i))
                there = f.lanes_below(left, b.tokens)
                f.store(FLOATS, f.choose(there, f.load(FLOATS, at), _LEAST), at)

    def weigh(self, start: str) -> None:
        """The scores of LANES tokens from `start` on become weights."""
        f = self._f
        for b, top, total in zip(self._blocks, self._tops, self._totals, strict=True):
            for i in range(0, LANES, b.width):
                at = self._at(b, f.add(start, i))
                weight = f.exp2(f.two("fsub", FLOATS, f.load(FLOATS, at), top))
                f.store(FLOATS, weight, at)
                total.set(f.plus(total.get(), weight))

    def tops(self) -> list[str]:
        """The largest score of each head, in all lanes."""
        return self._by_head(self._tops)

    def totals(self) -> list[str]:
        """The sum of each head's weights, in all lanes."""
        found = zip(self._blocks, self._totals, strict=True)
        return self._by_head([self._folded(b, total.get(), self._f.plus) for b, total in found])

    def weight(self, head: int, quad: str, token: int) -> str:
        """Of token `quad` + `token`, in all lanes."""
        f = self._f
        (b,) = (b for b in self._blocks if head in b.heads)
        lane = QUAD * (head - b.heads[0]) + token
        return f.spread(f.load("float", f.at(self._at(b, quad), lane, "float")))

    def _by_head(self, vectors: Sequence[str]) -> list[str]:
        return [
            self._f.shuffle(vector, "poison", [QUAD * slot] * LANES)
            for b, vector in zip(self._blocks, vectors, strict=True)
            for slot in range(len(b.heads))
        ]

    def _at(self, block: _Heads, token: str) -> str:
        """Address of the vector or quads that begin with `token`, a multiple of QUAD."""
        f = self._f
        return f.at(self._scores, f.add(f.times(token, block.slots), block.before * self._room), "float")

    def _count(self, block: _Heads, vector: int) -> int:
        return min(block.width, self._words - vector * block.width)

    # ---- sums ----

    def _product(self, block: _Heads, row: str, query: Sequence[str]) -> str:
        """A vector; the sum of a slot's lanes is its head's score."""
        f, total = self._f, _NOTHING
        for i, numbers in enumerate(query):
            words = self._in_slots(block, i, f.at(row, i * block.width, "i32"))
            if self._half:
                total = f.pair_products(total, f.cast(words, INTS, PAIRS), f.cast(numbers, INTS, PAIRS))
            else:
                total = f.fma(f.cast(words, INTS, FLOATS), f.cast(numbers, INTS, FLOATS), total)
        return total

    def _in_slots(self, block: _Heads, vector: int, address: str) -> str:
        """Words of a row in every slot, zero where there are no more."""
        count = self._count(block, vector)
        kind = f"<{count} x i32>"
        found = self._f.op(f"load {kind}, ptr {address}, align 2")
        lanes = ", ".join(f"i32 {min(lane % block.width, count)}" for lane in range(LANES))
        return self._f.op(f"shufflevector {kind} {found}, {kind} {_NOTHING}, {INTS} <{lanes}>")

    def _within(self, rows: Sequence[str]) -> str:
        """Of four vectors, each four lanes summed: in each four lanes the four vectors' sums."""
        a, b, c, d = rows
        ab = self._sum(a, b, _in_each_four(0, 4, 1, 5), _in_each_four(2, 6, 3, 7))
        cd = self._sum(c, d, _in_each_four(0, 4, 1, 5), _in_each_four(2, 6, 3, 7))
        return self._sum(ab, cd, _in_each_four(0, 1, 4, 5), _in_each_four(2, 3, 6, 7))

    def _across(self, quads: Sequence[str]) -> str:
        """Fours of lanes that belong to one slot summed, in one vector for all `quads`."""
        if len(quads) == 1:
            return quads[0]
        if len(quads) == 4:
            halves = (quads[:2], quads[2:])
            quads = [self._sum(a, b, _fours(0, 1, 4, 5), _fours(2, 3, 6, 7)) for a, b in halves]
        return self._sum(quads[0], quads[1], _fours(0, 2, 4, 6), _fours(1, 3, 5, 7))

    def _sum(self, a: str, b: str, some: Sequence[int], others: Sequence[int]) -> str:
        return self._f.plus(self._f.shuffle(a, b, some), self._f.shuffle(a, b, others))

    def _folded(self, block: _Heads, vector: str, by: Callable[[str, str], str]) -> str:
        """All tokens brought together, in every lane of the head."""
        for stride in block.strides:
            vector = by(vector, self._f.shuffle(vector, "poison", [i ^ stride for i in range(LANES)]))
        return vector


def _in_each_four(*places: int) -> list[int]:
    """Lanes of two vectors: `places` of each four lanes, those from 4 on in the second vector."""
    return [four + place % 4 + place // 4 * LANES for four in range(0, LANES, 4) for place in places]


def _fours(*places: int) -> list[int]:
    """Lanes of two vectors: whole fours, those from 4 on in the second vector."""
    return [4 * place + i for place in places for i in range(4)]
