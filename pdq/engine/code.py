"""Compiles what was written with `llvm` for the CPU of this machine (`cpu.host`).

Owns the declarations of what LLVM brings along, and the settings of its optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import llvmlite
import llvmlite.binding as llvm

from pdq.engine import cpu, kept_code, objects

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
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, i32, <16 x i1>)
declare void @llvm.masked.store.v16i8.p0(<16 x i8>, ptr, i32, <16 x i1>)
declare <16 x float> @llvm.masked.load.v16f32.p0(ptr, i32, <16 x i1>, <16 x float>)
declare <16 x i16> @llvm.masked.load.v16i16.p0(ptr, i32, <16 x i1>, <16 x i16>)
"""
_PAIR_DECLARATIONS = f"""
declare <16 x float> {PAIR_PRODUCT}(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> {NARROW_TWO}(<16 x float>, <16 x float>)
"""
_BYTE_DECLARATION = f"""
declare <16 x i32> {BYTE_PRODUCT}(<16 x i32>, <16 x i32>, <16 x i32>)
"""  # newer versions of LLVM rewrite it and its calls

_CODEGEN_LEVEL = 3
# Vectorization is off: everything is a vector already.
_PASSES = {"speed_level": 2, "loop_vectorization": 0, "slp_vectorization": 0}


class Written(Protocol):
    @property
    def text(self) -> str:
        """A function in LLVM's words."""
        ...


class Code:
    """Compiled functions. They live as long as this does; `address` is where one begins."""

    def __init__(self, functions: Sequence[Written]) -> None:
        """Takes tenths of a second, or hundredths where `kept_code` has it from an earlier process.

        Raises RuntimeError where LLVM cannot compile for this machine, or makes of it calls of functions that are not
        there.
        """
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        host = cpu.host()
        features = host.llvm_features
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=host.name, features=features, opt=_CODEGEN_LEVEL, jit=True
        )
        special = [_PAIR_DECLARATIONS] if host.pair_products else []
        special += [_BYTE_DECLARATION] if host.byte_products else []
        source = "\n".join([_DECLARATIONS, *special, *(f.text for f in functions)])
        module = llvm.parse_assembly(source)
        place = kept_code.place(*_compiler(), machine.triple, host.name, features, source)
        self._made = kept_code.read(place)
        kept = self._made
        if kept is None:
            _optimize(module, machine)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.set_object_cache(lambda _, made: self._keep(place, made), lambda _: kept)
        self._engine.finalize_object()
        if missing := objects.missing_symbols(self._made or b""):
            raise RuntimeError(f"LLVM calls {', '.join(missing)}, which is not there")

    def _keep(self, place: Path, made: bytes) -> None:
        self._made = made
        kept_code.write(place, made)

    def address(self, name: str) -> int:
        return int(self._engine.get_function_address(name))


def _compiler() -> tuple[str, ...]:
    """All that machine code follows from beside its source and the CPU."""
    version = ".".join(map(str, llvm.llvm_version_info))
    return llvmlite.__version__, version, str(_CODEGEN_LEVEL), *(f"{name}={value}" for name, value in _PASSES.items())


def _optimize(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=_PASSES["speed_level"])
    tuning.loop_vectorization = bool(_PASSES["loop_vectorization"])
    tuning.slp_vectorization = bool(_PASSES["slp_vectorization"])
    builder = llvm.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
