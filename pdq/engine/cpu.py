"""What the CPU of this machine can do, as far as the choice of kernels depends on it.

Read once from LLVM and passed around as a value, so that a test can force a gate: a host without AVX-512, with a matrix
unit, or of another architecture. Everything that is compiled asks `host()` at the time of use.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import llvmlite.binding as llvm

P = ParamSpec("P")
R = TypeVar("R")

_X86 = ("x86_64", "amd64")


@dataclass(frozen=True, slots=True)
class Cpu:
    """arch: as Python names it, in lower case. name: LLVM's name of the model.

    features: LLVM's names, with their state. LLVM knows none on some architectures; then there are none here.
    """

    arch: str
    name: str
    features: tuple[tuple[str, bool], ...] = ()

    def has(self, *features: str) -> bool:
        found = dict(self.features)
        return self.arch in _X86 and all(found.get(feature, False) for feature in features)

    @property
    def avx2(self) -> bool:
        return self.has("avx2", "fma")

    @property
    def avx512(self) -> bool:
        return self.avx2 and self.has("avx512f", "avx512bw", "avx512vl", "avx512dq")

    @property
    def pair_products(self) -> bool:
        """An instruction for products of bfloat16 pairs; without it they are made of float32 ones."""
        return self.avx512 and self.has("avx512bf16")

    @property
    def byte_products(self) -> bool:
        """An instruction for products of bytes, in vectors of 16 lanes."""
        return self.avx512 and self.has("avx512vnni")

    @property
    def matrix_unit(self) -> bool:
        return self.has("amx-tile")

    @property
    def level(self) -> str:
        """The instruction sets by which kernels are chosen, e.g. "avx512+bf16+vnni"."""
        if not self.avx2:
            return self.arch
        more = (("amx", self.matrix_unit), ("bf16", self.pair_products), ("vnni", self.byte_products))
        return "+".join(["avx512" if self.avx512 else "avx2", *(name for name, there in more if there)])

    @property
    def llvm_features(self) -> str:
        """For LLVM's target. By itself LLVM uses half of a 512-bit register, on account of old CPUs."""
        wide = [("prefer-256-bit", False)] if self.avx512 else []
        return ",".join(f"{'+' if on else '-'}{name}" for name, on in (*self.features, *wide))

    def without(self, *prefixes: str) -> Cpu:
        """This CPU with all features off whose names begin with one of `prefixes`."""
        return replace(self, features=tuple((n, on and not n.startswith(prefixes)) for n, on in self.features))

    def with_features(self, *features: str) -> Cpu:
        """This CPU with `features` on; what is compiled for it may not run here."""
        others = tuple((n, on) for n, on in self.features if n not in features)
        return replace(self, features=tuple(sorted((*others, *((n, True) for n in features)))))


def host() -> Cpu:
    """The CPU of this machine."""
    return _host()


@cache
def _host() -> Cpu:
    arch = platform.machine().lower()
    try:
        features = sorted(llvm.get_host_cpu_features().items())
    except RuntimeError:  # LLVM cannot tell on this system
        features = []
    return Cpu(arch, llvm.get_host_cpu_name(), tuple(features))


def per_host(make: Callable[P, R]) -> Callable[P, R]:
    """A cache of what `make` compiles, for each CPU that `host` names."""

    made: dict[tuple[object, ...], R] = {}

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> R:
        key = host(), *args, *kwargs.items()
        if key not in made:
            made[key] = make(*args, **kwargs)
        return made[key]

    return found
