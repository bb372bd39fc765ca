"""Forces the gates of kernel selection: another CPU than this one, or kernels that would not be chosen here."""

from __future__ import annotations

import pytest

from pdq.engine import cpu, kernel_selection
from pdq.engine.cpu import Cpu
from pdq.engine.kernel_selection import KernelSet

AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")
AVX2_ONLY = cpu.host().without("avx512", "amx", "avx10")
# Of each level one. What is compiled for those that this machine is below cannot run here.
CPUS = {
    "avx2": AVX2_ONLY,
    "avx512": AVX2_ONLY.with_features(*AVX512),
    "avx512+bf16+vnni": AVX2_ONLY.with_features(*AVX512, "avx512bf16", "avx512vnni"),
    "avx512+amx+bf16+vnni": AVX2_ONLY.with_features(
        *AVX512, "avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"
    ),
    "aarch64": Cpu("aarch64", "neoverse-v2", (("neon", True), ("bf16", True))),
    "x86 without avx2": cpu.host().without("avx2", "fma", "avx512", "amx", "avx10"),
}


def runs_here(host: Cpu) -> bool:
    """Can this machine run what is compiled for `host`?"""
    own = dict(cpu.host().features)
    return host.arch == cpu.host().arch and all(own.get(name, False) for name, on in host.features if on)


def use_cpu(monkeypatch: pytest.MonkeyPatch, host: Cpu) -> None:
    monkeypatch.setattr(cpu, "host", lambda: host)


def use_kernels(monkeypatch: pytest.MonkeyPatch, kernels: KernelSet) -> None:
    monkeypatch.setattr(kernel_selection, "select", lambda dtype, may_compile=True: kernels)
