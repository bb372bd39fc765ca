"""A forward as one native call: a list of compiled functions with their jobs, run in order by a team of threads.

After each function the threads wait for each other, so that it may use what those before it made. Nothing of Python
runs meanwhile. Knows nothing of what the functions compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pdq.engine import team
from pdq.engine.code import Code
from pdq.engine.cpu import per_host
from pdq.engine.llvm import Function

Numbers = npt.NDArray[np.int64]
Value = int | Tensor | Numbers | Sequence[int]  # the same for all layers, or one for each

_FIELDS = ("next", "calls", "count", "barrier")
_EVERY = slice(None)


class Jobs:
    """The jobs of one function, one for each layer: `fields` by name. The first of them is 0 when it is run.

    A tensor stands for its address. What a job points into lives as long as the jobs and their copies do, whoever else
    lets go of it: native code frees and holds nothing.
    """

    def __init__(self, fields: Sequence[str], layers: int) -> None:
        self._places = {name: i for i, name in enumerate(fields)}
        self._numbers: Numbers = np.zeros((layers, len(fields)), dtype=np.int64)
        self._kept: list[object] = []

    def set(self, where: int | slice | Numbers = _EVERY, **values: Value) -> None:
        """where: in which layers."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._kept.append(value)
                self._numbers[where, self._places[name]] = value.data_ptr()
            else:
                self._numbers[where, self._places[name]] = value

    def keep(self, *owners: object) -> Jobs:
        """These own memory whose addresses are given as numbers."""
        self._kept += owners
        return self

    def filled(self, **values: Value) -> Jobs:
        """A copy with more of its fields set."""
        other = object.__new__(Jobs)
        other._places, other._numbers, other._kept = self._places, self._numbers.copy(), [*self._kept]
        other.set(_EVERY, **values)
        return other

    @property
    def layers(self) -> int:
        return len(self._numbers)

    @property
    def addresses(self) -> Numbers:
        return self._numbers.ctypes.data + np.arange(len(self._numbers)) * self._numbers.strides[0]


@dataclass(frozen=True, slots=True)
class Call:
    """functions: addresses, one for each of the jobs."""

    functions: int | Numbers
    jobs: Jobs


def run(stages: Sequence[Sequence[Call]], threads: int) -> None:
    """The calls of every stage: all of its first layer, then of the next. Jobs are used up."""
    calls = np.concatenate([_listed(stage) for stage in stages])
    barrier = team.barrier()
    threads = threads if barrier else 1
    values = {"calls": calls.ctypes.data, "count": len(calls), "barrier": barrier if threads > 1 else 0}
    team.run(_runner().address("run"), _FIELDS, values, threads)


def _listed(stage: Sequence[Call]) -> Numbers:
    """`[calls, 2]`: addresses of a function and of its job."""
    columns = [call.jobs.addresses for call in stage]
    found: Numbers = np.empty((len(columns[0]), len(stage), 2), dtype=np.int64)
    for i, (call, addresses) in enumerate(zip(stage, columns, strict=True)):
        found[:, i, 0], found[:, i, 1] = call.functions, addresses
    return found.reshape(-1, 2)


@per_host
def _runner() -> Code:
    """Waits only where a barrier is given."""
    f = Function("run")
    calls, count, barrier = (f.number("%job", i) for i in range(1, len(_FIELDS)))
    with f.loop(count) as i:
        call = f.at(f.pointer(calls), f.times(i, 2), "i64")
        f.do(f"call void {f.pointer(f.number(call, 0))}(ptr {f.pointer(f.number(call, 1))})")
        with f.when(f.two("icmp ne", "i64", barrier, 0)):
            f.do(f"call void {f.pointer(barrier)}()")
    return Code([f])
