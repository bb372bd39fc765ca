"""Compiles what was written with `llvm` for the CPU of this machine, and knows which of its instructions are special.

Owns the declarations of what LLVM brings along.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import llvmlite
import llvmlite.binding as llvm

from pdq.engine import kept_code

PAIR_PRODUCT = "@llvm.x86.avx512bf16.dpbf16ps.512"
NARROW_TWO = "@llvm.x86.avx512bf16.cvtne2ps2bf16.512"  # the second one becomes the lower half
BYTE_PRODUCT = "@llvm.x86.avx512.vpdpbusd.512"
_DECLARATIONS = """
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare i64 @llvm.smin.i64(i64, i64)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare <16 x float> @llvm.sqrt.v16f32(<16 x float>)
declare <16 x float> @llvm.fabs.v16f32(<16 x float>)
declare void @llvm.masked.store.v16f32.p0(<16 x float>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16bf16.p0(<16 x bfloat>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16i8.p0(<16 x i8>, ptr, i32, <16 x i1>)
declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, <16 x float>)
declare <16 x bfloat> @llvm.masked.load.v16bf16.p0(ptr, i32, <16 x i1>, <16 x bfloat>)
"""
_PAIR_DECLARATIONS = f"""
declare <16 x float> {PAIR_PRODUCT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> {NARROW_TWO}(<16 x float>, <16 x float>)
"""
_BYTE_DECLARATION = f"""
declare <16 x i32> {BYTE_PRODUCT}(<16 x i32>, <16 x i32>, <16 x i32>)
"""  # newer versions of LLVM rewrite it and its calls


class Written(Protocol):
    @property
    def text(self) -> str:
        """A function in LLVM's words."""
        ...


class Code:
    """Compiled functions. They live as long as this does; `address` is where one begins."""

    def __init__(self, functions: Sequence[Written]) -> None:
        """Takes tenths of a second, or hundredths where `kept_code` has it from an earlier process.

        Raises RuntimeError where LLVM cannot compile for this machine.
        """
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        cpu, features = llvm.get_host_cpu_name(), _features()
        machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3, jit=True)
        special = [_PAIR_DECLARATIONS] if has_pair_products() else []
        special += [_BYTE_DECLARATION] if has_byte_products() else []
        source = "\n".join([_DECLARATIONS, *special, *(f.text for f in functions)])
        module = llvm.parse_assembly(source)
        place = kept_code.place(llvmlite.__version__, machine.triple, cpu, features, source)
        kept = kept_code.read(place)
        if kept is None:
            _optimize(module, machine)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.set_object_cache(lambda _, made: kept_code.write(place, made), lambda _: kept)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


def _optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_vectorization = tuning.slp_vectorization = False  # everything is a vector already
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)


@cache
def has_byte_products() -> bool:
    """Has this CPU an instruction for products of bytes, in vectors of 16 lanes?"""
    found = llvm.get_host_cpu_features()
    return bool(found.get("avx512vnni") and found.get("avx512f"))


@cache
def has_pair_products() -> bool:
    """Has this CPU an instruction for products of bfloat16 pairs? Without it they are made of float32 ones."""
    found = llvm.get_host_cpu_features()
    return bool(found.get("avx512bf16") and found.get("avx512f"))


def _features() -> str:
    """What the CPU can do, in LLVM's words. By itself LLVM uses half of a 512-bit register, on account of old CPUs."""
    found = llvm.get_host_cpu_features()
    return str(found.flatten()) + (",-prefer-256-bit" if found.get("avx512f") else "")
