"""Kernels follow from the CPU alone; every gate forced, and what it leads to compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from pdq.engine import code, compiled, compiled_chunk, compiled_int8, compiled_product, cpu, kernel_selection, objects
from pdq.engine.code import Code
from pdq.engine.flash import Shape
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.llvm import FLOATS, HALVES, Function
from pdq.engine.packed import can_pack
from pdq.engine.products import Bmm
from tests.engine.gates import CPUS, runs_here, use_cpu
from tests.engine.pd import engine
from tests.engine.test_fused import logits, texts
from tests.engine.tiny import loaded, tiny_model

BMM = Bmm(chunks=True, singles=True)
HALF, FULL = torch.bfloat16, torch.float32
PACKED = "onednn" if can_pack() else "torch"
WHOLE = KernelSet(decode=True, prefill=True, linear="compiled")
CHOSEN = {
    ("avx2", HALF): WHOLE,
    ("avx2", FULL): WHOLE,
    ("avx512", HALF): WHOLE,
    ("avx512", FULL): WHOLE,
    ("avx512+bf16+vnni", HALF): KernelSet(decode=True, prefill=True, linear="compiled", int8="compiled", bmm=BMM),
    ("avx512+bf16+vnni", FULL): KernelSet(decode=True, prefill=True, linear="compiled", int8="compiled"),
    ("avx512+amx+bf16+vnni", HALF): KernelSet(decode=True, linear=PACKED, bmm=BMM),
    ("avx512+amx+bf16+vnni", FULL): KernelSet(decode=True),
    ("aarch64", HALF): KernelSet(linear=PACKED),
    ("aarch64", FULL): KernelSet(),
    ("x86 without avx2", HALF): KernelSet(linear=PACKED),
    ("x86 without avx2", FULL): KernelSet(),
}


@pytest.fixture
def no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign code is not compiled where only the choice is looked at."""
    monkeypatch.setattr(kernel_selection, "_compiles", lambda dtype: True)


@pytest.mark.parametrize(("name", "dtype"), list(CHOSEN), ids=str)
@pytest.mark.usefixtures("no_machine_code")
def test_kernels_follow_from_the_cpu(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    use_cpu(monkeypatch, CPUS[name])
    assert kernel_selection.select(dtype) == CHOSEN[name, dtype]
    assert CPUS[name].level in (name, CPUS[name].arch)


def test_a_busy_machine_chooses_as_an_idle_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock is read."""
    chosen = kernel_selection.select(HALF)
    for name in ("perf_counter", "monotonic", "time", "process_time"):
        monkeypatch.setattr(f"time.{name}", lambda: pytest.fail("kernels chosen by a clock"))
    assert kernel_selection.select(HALF) == chosen


@pytest.mark.parametrize("dtype", [HALF, FULL, torch.float16], ids=str)
def test_nothing_is_compiled_where_that_is_off_or_not_for_the_dtype(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(Code, "__init__", lambda *args: pytest.fail("something is compiled"))
    kernels = kernel_selection.select(dtype, may_compile=dtype is torch.float16)
    assert (kernels.decode, kernels.prefill, kernels.fusible) == (False, False, False)
    assert kernels.linear == (PACKED if dtype is HALF else "torch")


def test_a_cpu_that_llvm_does_not_know_uses_the_other_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown(shape: Shape) -> int:
        raise RuntimeError("no such target")

    use_cpu(monkeypatch, CPUS["avx2"].with_features("a new feature"))
    monkeypatch.setattr(compiled, "attention", unknown)
    assert kernel_selection.select(FULL) == KernelSet()
    assert "nothing is compiled for this CPU" in caplog.text


SHAPES = (Shape(HALF, 3, 3, 64, 64), Shape(FULL, 2, 1, 80, 48))
X86 = [name for name in CPUS if name.startswith("avx")]


@pytest.mark.parametrize("name", X86)
def test_what_each_gate_leads_to_compiles_and_calls_nothing_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also for CPUs on which it could not run here: the code is made, not called."""
    use_cpu(monkeypatch, CPUS[name])
    for dtype in (HALF, FULL):
        compiled_product.compile_for(dtype)
        if CPUS[name].byte_products:
            compiled_int8.compile_for(dtype)
    assert all(compiled.attention(shape) and compiled_chunk.attention(shape) for shape in SHAPES)


RUNNABLE = [name for name in X86 if runs_here(CPUS[name])]


@pytest.mark.parametrize(("name", "dtype"), list(product(RUNNABLE, (HALF, FULL))), ids=str)
def test_a_forward_behind_each_gate_is_right(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    use_cpu(monkeypatch, CPUS[name])
    it = engine(loaded(tiny_model("llama").to(dtype)), dtype=str(dtype).removeprefix("torch."))
    ids = texts(1, 90)[0]
    exact = tiny_model("llama")(torch.tensor([ids])).logits[0, -1]
    found = [logits(it, ids, cuts)[0] for cuts in ([], [31, 64], [88, 89])]
    assert max(float((one - exact).norm() / exact.norm()) for one in found) < (1e-5 if dtype is FULL else 0.1)


def one_number(narrow: str | None = None) -> Function:
    f = Function("number")
    value = f.take("float", "%job")
    if narrow is None:
        f.put("bfloat", value, "%job")
    else:
        halves = f.op(f"{narrow} {FLOATS} {value} to {HALVES}")
        f.do(f"store {HALVES} {halves}, ptr %job, align 2")
    return f


def test_machine_code_that_calls_a_missing_function_is_refused_instead_of_jumping_to_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_cpu(monkeypatch, CPUS["avx2"])  # has no instruction for it: LLVM calls its library for each number
    for _ in range(2):  # compiled, then from the compile cache
        with pytest.raises(RuntimeError, match="LLVM calls __truncsfbf2, which is not there"):
            Code([one_number("fptrunc")])
    Code([one_number()])


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100)], ids=repr)
def test_other_files_than_elf_have_no_missing_functions(data: bytes) -> None:
    assert objects.missing_symbols(data) == []


ROUNDED: Sequence[float] = (0.0, -0.0, 1.0, 1.00390625, 1.01171875, -3.3e38, 3.4e38, 1e-40, float("inf"), float("nan"))


@pytest.mark.parametrize("name", RUNNABLE)
def test_numbers_become_bfloat16_as_torch_makes_them(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    use_cpu(monkeypatch, CPUS[name])
    numbers = torch.tensor([*ROUNDED, *torch.randn(6).tolist()])
    expected = numbers.bfloat16()
    memory = numbers.clone()

    made = Code([one_number()])
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.address("number"))(memory.data_ptr())
    found = memory.view(torch.bfloat16)[:16]
    if CPUS[name].pair_products:  # the instruction takes denormal numbers for zero
        expected, found = expected[numbers.abs() != 1e-40], found[numbers.abs() != 1e-40]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    "change", [("_CODEGEN_LEVEL", 2), ("_PASSES", code._PASSES | {"slp_vectorization": 1})], ids=lambda c: c[0]
)
def test_code_of_other_passes_is_not_taken_from_the_compile_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, change: tuple[str, object]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PDQ_CACHE", str(folder))
    Code([one_number()])
    monkeypatch.setattr(code, *change)
    Code([one_number()])
    assert len(list((folder / "code").iterdir())) == 2


def test_the_numerics_id_names_kernels_cpu_dtype_and_versions() -> None:
    it = engine(tiny_model("gpt2"))
    host = cpu.host()
    assert it.spec.numerics == (
        f"stock({kernel_selection.select(FULL).text}) {host.level} {host.name} float32 torch-{torch.__version__}"
    )
