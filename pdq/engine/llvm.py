"""How a function is written as lines of LLVM IR over vectors of 16 floats, for `code` to compile.

LLVM turns the 16 lanes into whatever registers the CPU has. Knows nothing of what is computed. Floats keep their order
of addition: nothing here may be reassociated.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from pdq.engine import cpu
from pdq.engine.code import BYTE_PRODUCT, NARROW_TWO, PAIR_PRODUCT

LANES = 16
FLOATS = "<16 x float>"
INTS = "<16 x i32>"
HALVES = "<16 x bfloat>"
SHORTS = "<16 x i16>"  # how HALVES lie in memory: where a CPU has no bfloat16, LLVM moves single ones by library calls
PAIRS = "<32 x bfloat>"
_BITS = "<16 x i1>"
_PLACES = "<16 x i64>"


class Function:
    """A function of one pointer, `%job`, that is being written. Values are SSA names or literals, as text."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._rooms: list[str] = []
        self._lines: list[str] = []
        self._names = 0

    @property
    def text(self) -> str:
        return "\n".join(
            [f"define void @{self._name}(ptr %job) {{", "entry:", *self._rooms, *self._lines, "  ret void", "}"]
        )

    def do(self, line: str) -> None:
        self._lines.append("  " + line)

    def op(self, line: str) -> str:
        """The name of what `line` computes."""
        name = "%" + self._fresh("v")
        self.do(f"{name} = {line}")
        return name

    def two(self, op: str, kind: str, a: str | int, b: str | int) -> str:
        return self.op(f"{op} {kind} {a}, {b}")

    def add(self, *terms: str | int) -> str:
        total = str(terms[0])
        for term in terms[1:]:
            total = self.two("add", "i64", total, term)
        return total

    def times(self, a: str | int, b: str | int) -> str:
        return self.two("mul", "i64", a, b)

    def least(self, a: str | int, b: str | int) -> str:
        return self.op(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    def at(self, base: str, index: str | int, kind: str) -> str:
        """Address of element `index`."""
        return self.op(f"getelementptr {kind}, ptr {base}, i64 {index}")

    def load(self, kind: str, address: str) -> str:
        return self.op(f"load {kind}, ptr {address}, align {_align(kind)}")

    def store(self, kind: str, value: str, address: str) -> None:
        self.do(f"store {kind} {value}, ptr {address}, align {_align(kind)}")

    def real(self, bits: str) -> str:
        """The float whose bits are an i64's low half, in all lanes."""
        return self.spread(self.cast(self.op(f"trunc i64 {bits} to i32"), "i32", "float"))

    def number(self, base: str, index: str | int) -> str:
        """Element `index` of an array of i64."""
        return self.load("i64", self.at(base, index, "i64"))

    def pointer(self, number: str) -> str:
        return self.op(f"inttoptr i64 {number} to ptr")

    def cast(self, value: str, kind: str, to: str) -> str:
        return self.op(f"bitcast {kind} {value} to {to}")

    def room(self, kind: str, count: int = 1) -> str:
        """Address of `count` values on the stack; single ones become registers."""
        name = "%" + self._fresh("m")
        self._rooms.append(f"  {name} = alloca {kind}, i64 {count}, align 64")
        return name

    def variable(self, value: str) -> Variable:
        return Variable(self, value)

    def spread(self, scalar: str) -> str:
        """A float in all lanes."""
        one = self.op(f"insertelement {FLOATS} poison, float {scalar}, i32 0")
        return self.op(f"shufflevector {FLOATS} {one}, {FLOATS} poison, {INTS} zeroinitializer")

    def spread_word(self, word: str) -> str:
        """An i32 in all lanes of INTS."""
        one = self.op(f"insertelement {INTS} poison, i32 {word}, i32 0")
        return self.op(f"shufflevector {INTS} {one}, {INTS} poison, {INTS} zeroinitializer")

    def shuffle(self, a: str, b: str, lanes: Sequence[int]) -> str:
        return self.op(f"shufflevector {FLOATS} {a}, {FLOATS} {b}, {INTS} <{', '.join(f'i32 {i}' for i in lanes)}>")

    def lanes_below(self, count: str, places: Sequence[int] = range(LANES)) -> str:
        """A mask of the first `count` lanes, or of those whose place is below it; none if it is not positive."""
        one = self.op(f"insertelement {_PLACES} poison, i64 {count}, i32 0")
        counts = self.op(f"shufflevector {_PLACES} {one}, {_PLACES} poison, {INTS} zeroinitializer")
        return self.two("icmp slt", _PLACES, f"<{', '.join(f'i64 {i}' for i in places)}>", counts)

    def prefetch(self, address: str, size: int) -> None:
        """Ask for `size` bytes that will be read soon. Any address will do."""
        for start in range(0, size, 64):
            line = self.at(address, start, "i8")
            self.do(f"call void @llvm.prefetch.p0(ptr {line}, i32 0, i32 3, i32 1)")

    def copy(self, to: str, source: str, size: str) -> None:
        self.do(f"call void @llvm.memcpy.p0.p0.i64(ptr {to}, ptr {source}, i64 {size}, i1 false)")

    def fma(self, a: str, b: str, c: str) -> str:
        return self.op(f"call {FLOATS} @llvm.fmuladd.v16f32({FLOATS} {a}, {FLOATS} {b}, {FLOATS} {c})")

    def pair_products(self, total: str, a: str, b: str) -> str:
        """total + the products of a and b, PAIRS both, of which lane i gets those at 2 i and 2 i + 1."""
        if cpu.host().pair_products:
            return self.op(f"call {FLOATS} {PAIR_PRODUCT}({FLOATS} {total}, {PAIRS} {a}, {PAIRS} {b})")
        for even, odd in zip(self.halves(a), self.halves(b), strict=True):
            total = self.fma(even, odd, total)
        return total

    def byte_products(self, total: str, a: str, b: str) -> str:
        """total + the products of a's unsigned and b's signed bytes; INTS all, of which each lane holds four bytes.

        Where the CPU has `byte_products`.
        """
        return self.op(f"call {INTS} {BYTE_PRODUCT}({INTS} {total}, {INTS} {a}, {INTS} {b})")

    def halves(self, pairs: str) -> list[str]:
        """The numbers of PAIRS at even places and at odd ones, as floats."""
        words = self.cast(pairs, PAIRS, INTS)
        even, odd = self.two("shl", INTS, words, ints(16)), self.two("and", INTS, words, ints(-65536))
        return [self.cast(x, INTS, FLOATS) for x in (even, odd)]

    def everywhere(self, kind: str, address: str) -> str:
        """The "float" at `address` in all lanes of FLOATS, or the two "bfloat" there as all pairs of PAIRS."""
        if kind == "float":
            return self.spread(self.load("float", address))
        word = self.op(f"load i32, ptr {address}, align 2")
        return self.cast(self.spread_word(word), INTS, PAIRS)

    def narrow(self, vector: str) -> str:
        """FLOATS as HALVES, rounded to nearest, ties to even; what is not a number stays so.

        Without an instruction for it LLVM would call a library function for each lane, which nothing here brings along.
        """
        if cpu.host().pair_products:
            return self.op(f"fptrunc {FLOATS} {vector} to {HALVES}")
        bits = self.cast(vector, FLOATS, INTS)
        high = self.two("lshr", INTS, bits, ints(16))
        odd = self.two("and", INTS, high, ints(1))
        rounded = self.two("add", INTS, self.two("add", INTS, bits, ints(0x7FFF)), odd)
        rounded = self.two("lshr", INTS, rounded, ints(16))
        quiet = self.two("or", INTS, high, ints(0x40))
        number = self.two("fcmp ord", FLOATS, vector, vector)
        word = self.op(f"select {_BITS} {number}, {INTS} {rounded}, {INTS} {quiet}")
        return self.cast(self.op(f"trunc {INTS} {word} to {SHORTS}"), SHORTS, HALVES)

    def paired(self, even: str, odd: str) -> str:
        """FLOATS of even places and of odd ones as PAIRS, rounded as by `narrow`."""
        if cpu.host().pair_products:
            both = self.op(f"call {PAIRS} {NARROW_TWO}({FLOATS} {odd}, {FLOATS} {even})")
        else:
            low, high = self.narrow(even), self.narrow(odd)
            both = self.op(f"shufflevector {HALVES} {low}, {HALVES} {high}, <32 x i32> <{_words(range(2 * LANES))}>")
        places = _words(i // 2 + i % 2 * LANES for i in range(2 * LANES))
        return self.op(f"shufflevector {PAIRS} {both}, {PAIRS} poison, <32 x i32> <{places}>")

    def widen(self, vector: str) -> str:
        """HALVES as FLOATS."""
        return self.op(f"fpext {HALVES} {vector} to {FLOATS}")

    def put(self, kind: str, vector: str, address: str, mask: str | None = None) -> None:
        """Store FLOATS as numbers of `kind`: "float" or "bfloat"; only the lanes of `mask`, if there is one."""
        value = vector if kind == "float" else self.cast(self.narrow(vector), HALVES, SHORTS)
        vectors, name = (FLOATS, "v16f32") if kind == "float" else (SHORTS, "v16i16")
        if mask is None:
            self.do(f"store {vectors} {value}, ptr {address}, align 2")
        else:
            self.do(f"call void @llvm.masked.store.{name}.p0({vectors} {value}, ptr {address}, i32 2, {_BITS} {mask})")

    def put_bytes(self, vector: str, address: str, mask: str | None = None) -> None:
        """Store FLOATS, cut off to integers in [0, 256), as a byte each; what is none as anything."""
        numbers = self.choose(self.two("fcmp ord", FLOATS, vector, vector), vector, "zeroinitializer")
        value = self.op(f"trunc {INTS} {self.op(f'fptosi {FLOATS} {numbers} to {INTS}')} to <16 x i8>")
        if mask is None:
            self.do(f"store <16 x i8> {value}, ptr {address}, align 1")
        else:
            self.do(f"call void @llvm.masked.store.v16i8.p0(<16 x i8> {value}, ptr {address}, i32 1, {_BITS} {mask})")

    def lane(self, vector: str, index: int) -> str:
        return self.op(f"extractelement {FLOATS} {vector}, i32 {index}")

    def take(self, kind: str, address: str, mask: str | None = None) -> str:
        """Numbers of `kind` as FLOATS: all, or the lanes of `mask`, and zero in the others."""
        vectors, name = (FLOATS, "v16f32") if kind == "float" else (SHORTS, "v16i16")
        if mask is None:
            found = self.op(f"load {vectors}, ptr {address}, align 2")
        else:
            found = self.op(
                f"call {vectors} @llvm.masked.load.{name}.p0(ptr {address}, i32 2, {_BITS} {mask}, "
                f"{vectors} zeroinitializer)"
            )
        return found if kind == "float" else self.widen(self.cast(found, SHORTS, HALVES))

    def choose(self, mask: str, a: str, b: str) -> str:
        return self.op(f"select {_BITS} {mask}, {FLOATS} {a}, {FLOATS} {b}")

    def plus(self, a: str, b: str) -> str:
        return self.two("fadd", FLOATS, a, b)

    def larger(self, a: str, b: str) -> str:
        """Of each lane; `b` where `a` is not a number."""
        return self.choose(self.two("fcmp ogt", FLOATS, a, b), a, b)

    def fold(self, vector: str, by: Callable[[str, str], str]) -> str:
        """All lanes brought together, in every lane."""
        for step in (8, 4, 2, 1):
            vector = by(vector, self.shuffle(vector, "poison", [i ^ step for i in range(LANES)]))
        return vector

    def transposed(self, rows: Sequence[str]) -> list[str]:
        """16 FLOATS as their columns."""
        rows = list(rows)
        for step in (8, 4, 2, 1):
            low = [j if not j & step else LANES + j - step for j in range(LANES)]
            high = [j + step if not j & step else LANES + j for j in range(LANES)]
            for i in (i for i in range(LANES) if not i & step):
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = self.shuffle(a, b, low), self.shuffle(a, b, high)
        return rows

    def some(self, mask: str) -> str:
        """Is any lane of a mask true? An i1."""
        return self.two("icmp ne", "i16", self.cast(mask, _BITS, "i16"), 0)

    def exp2(self, x: str) -> str:
        """2^x for x <= 0, within 1e-7 of it; 0 below -127, and what is not a number stays so."""
        power, shifted = self._power(x, _SERIES)
        exponent = self.two("add", INTS, self.cast(shifted, FLOATS, INTS), ints(127))
        scale = self.cast(self.two("shl", INTS, exponent, ints(23)), INTS, FLOATS)
        return self.two("fmul", FLOATS, power, scale)

    def rough_exp2(self, x: str) -> str:
        """As `exp2`, within 1.1e-4, for what is then rounded to bfloat16, and in fewer steps.

        The exponent is added to the bits of the rest. Below -127 that is 0 because the series is exactly 1 there; what
        is not a number must have come from bfloat16, whose low bits are zero, to stay so.
        """
        power, shifted = self._power(x, _ROUGH)
        exponent = self.two("shl", INTS, self.cast(shifted, FLOATS, INTS), ints(23))
        return self.cast(self.two("add", INTS, self.cast(power, FLOATS, INTS), exponent), INTS, FLOATS)

    def _power(self, x: str, series: Sequence[float]) -> tuple[str, str]:
        """By a Taylor series 2^rest, for x cut off below -127, and what was taken from x as an integer.

        Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits, ready to become an exponent.
        """
        x = self.choose(self.two("fcmp olt", FLOATS, x, floats(-127.0)), floats(-127.0), x)
        shifted = self.plus(x, floats(_ROUND))
        rest = self.two("fsub", FLOATS, x, self.two("fsub", FLOATS, shifted, floats(_ROUND)))
        power = floats(series[-1])
        for c in series[-2::-1]:
            power = self.fma(power, rest, floats(c))
        return power, shifted

    @contextmanager
    def loop(self, stop: str | int, step: int = 1) -> Iterator[str]:
        """for i in range(0, stop, step)"""
        at, name = self.room("i64"), self._fresh("loop")
        self.store("i64", "0", at)
        self.do(f"br label %{name}")
        self._label(name)
        i = self.load("i64", at)
        self.do(f"br i1 {self.two('icmp slt', 'i64', i, stop)}, label %{name}.body, label %{name}.end")
        self._label(f"{name}.body")
        yield i
        self.store("i64", self.add(i, step), at)
        self.do(f"br label %{name}")
        self._label(f"{name}.end")

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        name = self._fresh("if")
        self.do(f"br i1 {condition}, label %{name}, label %{name}.end")
        self._label(name)
        yield
        self.do(f"br label %{name}.end")
        self._label(f"{name}.end")

    @contextmanager
    def taking(self, counter: str, stop: str) -> Iterator[str]:
        """Numbers below `stop`, each taken by one thread only, from `counter` on."""
        name = self._fresh("take")
        self.do(f"br label %{name}")
        self._label(name)
        i = self.op(f"atomicrmw add ptr {counter}, i64 1 monotonic")
        self.do(f"br i1 {self.two('icmp slt', 'i64', i, stop)}, label %{name}.body, label %{name}.end")
        self._label(f"{name}.body")
        yield i
        self.do(f"br label %{name}")
        self._label(f"{name}.end")

    def _fresh(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _label(self, name: str) -> None:
        self._lines.append(f"{name}:")


class Variable:
    """A vector that changes."""

    def __init__(self, function: Function, value: str) -> None:
        self._function = function
        self._at = function.room(FLOATS)
        self.set(value)

    def set(self, value: str) -> None:
        self._function.store(FLOATS, value, self._at)

    def get(self) -> str:
        return self._function.load(FLOATS, self._at)


_ROUND = 1.5 * 2.0**23
_ROUGH = (1.0, 0.69328293, 0.242211, 0.05500893)  # least relative error for 2^x in [-0.5, 0.5], but exact at 0
_SERIES = tuple(math.log(2) ** i / math.factorial(i) for i in range(7))


def float_bits(x: float) -> int:
    """Of a float32, as `Function.real` takes them."""
    return int.from_bytes(struct.pack("<f", x), "little")


def floats(x: float) -> str:
    """A constant in all lanes. IR has floats as the bits of the equal double."""
    (single,) = struct.unpack("<f", struct.pack("<f", x))
    bits = struct.unpack("<Q", struct.pack("<d", single))[0]
    return f"<{', '.join([f'float 0x{bits:016X}'] * LANES)}>"


def lanes(count: int) -> str | None:
    """A constant mask of the first `count` lanes; None where that is all of them."""
    if count >= LANES:
        return None
    return f"<{', '.join(f'i1 {int(i < count)}' for i in range(LANES))}>"


def ints(x: int) -> str:
    return f"<{', '.join([f'i32 {x}'] * LANES)}>"


def _words(numbers: Iterable[int]) -> str:
    return ", ".join(f"i32 {i}" for i in numbers)


def _align(kind: str) -> int:
    return 8 if kind == "i64" else 4
