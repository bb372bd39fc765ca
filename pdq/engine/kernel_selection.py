"""Which kernels compute a model on this CPU: chosen by what the CPU is, so that equal machines choose alike.

A stopwatch at start would choose differently on a busy machine, and with the kernels speed and the last bits of the
results would differ between equal workers. The choice rests on the figures below; on a new kind of CPU make them with
`python -m tests.engine.kernel_speed` and extend `select`.

Owns the choice and its name in the numerics id. What a kernel cannot compute (an unusual head, a soft cap) is decided
call by call in `attention` and `packed`.

Time relative to the compiled kernel, one thread (AVX2 machine shared with other programs):

    level, dtype               decode: sdpa, bmm     prefill: sdpa, bmm    linear, 1, 16, 256 rows: torch
    avx2 (Zen 3), bfloat16     1.6-2.0, 4.9-14       0.8, 12               2.1, 7.7, 4.0
    avx2 (Zen 3), float32      1.2-2.0, 1.7-2.7      0.7-0.8, 0.9          0.9, 1.0, 0.4
    avx512+bf16 (Zen 5)        a decode step by the stock code 1.4-1.9, its linear layers by torch 1.5 (README,
                               `tests.engine.speed`); sdpa 3 (chunks) and 1.5 (single tokens) times as long as bmm

On AVX2 float32 the compiled kernels are chosen although torch's products are faster with many rows: the forward as a
whole decodes faster, and a row's result does not depend on its neighbours. With a matrix unit (AMX) oneDNN's products
are the fastest ones and are used for linear layers and prefill; decode attention reads memory, and stays compiled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

import torch

from pdq.engine import compiled, compiled_int8, compiled_product, cpu
from pdq.engine.cpu import per_host
from pdq.engine.flash import Shape
from pdq.engine.packed import Maker, bfloat16, can_pack, keep
from pdq.engine.products import Bmm

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelSet:
    """decode, prefill: is attention of single tokens, of chunks, compiled? linear, int8: whose products are used.

    bmm: where attention that is not compiled is computed by plain matrix products.
    """

    decode: bool = False
    prefill: bool = False
    linear: Literal["compiled", "onednn", "torch"] = "torch"
    int8: Literal["compiled", "onednn"] = "onednn"
    bmm: Bmm = field(default_factory=Bmm)

    @property
    def fusible(self) -> bool:
        """Are all parts of a forward compiled, so that it may be compiled as a whole?"""
        return self.decode and self.prefill and self.linear == "compiled"

    @property
    def text(self) -> str:
        """For logs and the numerics id, e.g. "decode=compiled,prefill=bmm,linear=onednn"."""
        plain = "bmm" if self.bmm.chunks or self.bmm.singles else "sdpa"
        decode, prefill = ("compiled" if one else plain for one in (self.decode, self.prefill))
        return f"decode={decode},prefill={prefill},linear={self.linear}"


def select(dtype: torch.dtype, *, may_compile: bool = True) -> KernelSet:
    """For a model of `dtype` on the CPU of this machine. Compiles a little the first time, to see that this works."""
    host = cpu.host()
    half = dtype is torch.bfloat16
    bmm = Bmm(chunks=True, singles=True) if half and (host.pair_products or host.matrix_unit) else Bmm()
    packed: Literal["onednn", "torch"] = "onednn" if half and can_pack() else "torch"
    if not (may_compile and dtype in compiled_product.DTYPES and host.avx2 and _compiles(dtype)):
        return KernelSet(linear=packed, bmm=bmm)
    if host.matrix_unit:
        return KernelSet(decode=True, linear=packed, bmm=bmm)
    return KernelSet(
        decode=True,
        prefill=True,
        linear="compiled",
        int8="compiled" if host.byte_products else "onednn",
        bmm=bmm,
    )


def maker(kernels: KernelSet) -> Maker:
    """Makes the products of linear layers."""
    packed = bfloat16 if can_pack() else keep
    if kernels.linear == "compiled":
        return lambda group: compiled_product.compiled(group) or packed(group)
    return packed if kernels.linear == "onednn" else keep


@per_host
def _compiles(dtype: torch.dtype) -> bool:
    try:
        compiled.attention(Shape(dtype, 3, 3, 64, 64))
        compiled_product.compile_for(dtype)
        if cpu.host().byte_products:
            compiled_int8.compile_for(dtype)
    except RuntimeError as e:  # of LLVM, which does not know this CPU or system well enough
        log.warning("nothing is compiled for this CPU (%s, %s): %s", cpu.host().name, cpu.host().level, e)
        return False
    return True
