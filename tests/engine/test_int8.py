"""--quantization int8: the products, what it does to whole models, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdq.config import PrefillSettings
from pdq.engine import cpu, int8
from pdq.engine.base import Segment
from pdq.engine.compiled_int8 import CompiledInt8Product
from pdq.engine.compiled_product import DTYPES, CompiledProduct
from pdq.engine.forward import StockForward
from pdq.engine.fused import FusedForward
from pdq.engine.int8 import Int8Product, Quantized, require_int8
from pdq.engine.load import load_engine
from pdq.engine.model import load_model
from pdq.engine.packed import PackedLinear, Product
from pdq.engine.probe import layout_of
from pdq.errors import ConfigError
from tests.engine.conftest import stock, stock_logits
from tests.engine.pd import GREEDY, decode_together, engine, prefill
from tests.engine.test_equivalence import in_pieces
from tests.engine.tiny import VOCAB, save_tiny, tiny_model


def available() -> bool:
    try:
        require_int8("cpu")
    except ConfigError:
        return False
    return True


needs_int8 = pytest.mark.skipif(not available(), reason="this CPU or torch build has no fast products of bytes")
MEDIAN, WORST = 0.1, 0.3  # relative errors of tiny models' logits; a wrong column, scale or bias gives more than 1


def by_onednn(weight: Tensor, bias: Tensor | None, largest: Tensor | None = None, dtype: Any = None) -> Product:
    return Int8Product(Quantized.of(weight, largest), bias)


def compiled(weight: Tensor, bias: Tensor | None, largest: Tensor | None = None, dtype: Any = torch.float32) -> Product:
    it = Quantized.of(weight, largest)
    return CompiledInt8Product(it.levels, it.scales, it.columns, bias, dtype)


Make = Callable[..., Product]
each_product = pytest.mark.parametrize("make", [by_onednn, *([compiled] if cpu.host().byte_products else [])])


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@needs_int8
@each_product
@pytest.mark.parametrize("inputs", [40, 41, 43])
@pytest.mark.parametrize("rows", [1, 2, 17])
def test_numbers_that_are_levels_are_multiplied_exactly(make: Make, rows: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (24, inputs), generator=generator).float()
    x = torch.randint(-127, 128, (rows, inputs), generator=generator).float()
    weight[:, 0], x[:, 1], bias = 127, -127, torch.arange(24.0)
    found = make(weight * 0.5, bias)(x * 0.25)
    torch.testing.assert_close(found, x @ weight.t() * 0.125 + bias, rtol=1e-6, atol=1e-3)


@needs_int8
@each_product
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_are_a_percent_off_in_every_dtype(make: Make, dtype: torch.dtype, rows: int) -> None:
    if make is compiled and dtype is torch.float16:
        assert dtype not in DTYPES
        return
    torch.manual_seed(0)
    weight, x, bias = torch.randn(96, 64), torch.randn(2, rows, 64).to(dtype), torch.randn(96)
    found = make(weight, bias, dtype=dtype)(x)
    assert (found.dtype, found.shape) == (dtype, (2, rows, 96))
    assert 0.001 < off(found, functional.linear(x.float(), weight, bias)) < 0.015


@needs_int8
@each_product
def test_a_row_does_not_depend_on_the_others(make: Make) -> None:
    torch.manual_seed(0)
    product, rows = make(torch.randn(96, 64), torch.randn(96)), torch.randn(4, 64)
    rows[2] *= 1e6
    together = product(rows)
    for i, row in enumerate(rows):
        torch.testing.assert_close(together[i : i + 1], product(row[None]), rtol=1e-5, atol=1e-5)


@needs_int8
@each_product
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("neighbours", [0, 2])
def test_a_row_that_is_not_numbers_stays_so_and_spoils_no_other(make: Make, wrong: float, neighbours: int) -> None:
    torch.manual_seed(0)
    product, rows = make(torch.randn(8, 16), torch.randn(8)), torch.randn(1 + neighbours, 16)
    expected = product(rows[1:])
    rows[0, 3] = wrong
    found = product(rows)
    assert not found[0].isfinite().any()
    torch.testing.assert_close(found[1:], expected)


@needs_int8
@each_product
@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_of_zeros_gives_the_bias(make: Make, rows: int) -> None:
    bias = torch.arange(8.0)
    assert torch.equal(make(torch.randn(8, 16), bias)(torch.zeros(rows, 16)), bias.expand(rows, 8))
    assert make(torch.zeros(8, 16), None)(torch.ones(rows, 16)).count_nonzero() == 0
    assert make(torch.randn(8, 16), bias)(torch.ones(2, 0, 16)).shape == (2, 0, 8)


@needs_int8
@each_product
def test_large_columns_of_the_input_cost_the_others_little(make: Make) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 64), torch.randn(32, 64)
    x[:, 5] *= 100
    weight[:, 5] /= 100
    exact = functional.linear(x, weight)
    blind, seeing = (make(weight, None, largest)(x) for largest in (None, x.abs().amax(0)))
    assert off(seeing, exact) < 0.02
    assert off(blind, exact) > 5 * off(seeing, exact)


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "opt", "gpt_neox", "gemma2", "gemma3n_text", "mixtral", "minicpm3"])
def test_a_model_in_8_bits_is_near_the_stock_model(tmp_path: Path, name: str, dtype: str) -> None:
    ids = [(i * i * 7 + i * 3 + 363) % VOCAB for i in range(33)]
    exact = stock_logits(stock(name), ids)[16:]
    model = load_model(save_tiny(name, tmp_path), dtype=dtype, device="cpu", quantization="int8")
    errors = [off(a, b) for a, b in zip(in_pieces(engine(model, dtype=dtype), ids), exact, strict=True)]
    assert 0.003 < sorted(errors)[len(errors) // 2] < MEDIAN
    if name != "mixtral":  # rounding may send a token to another expert
        assert max(errors) < WORST


@needs_int8
def test_columns_that_are_large_in_made_up_texts_are_balanced(tmp_path: Path) -> None:
    """The same function of its inputs: norms that make one column 300 times as large, weights that take it back."""
    ids = [(i * i * 7 + i * 3 + 363) % VOCAB for i in range(33)]
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.input_layernorm.weight[7] *= 300
        layer.post_attention_layernorm.weight[7] *= 300
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight[:, 7] /= 300
    model.save_pretrained(tmp_path)
    exact = stock_logits(stock("llama"), ids)[16:]
    loaded = load_model(tmp_path, dtype="float32", device="cpu", quantization="int8")
    assert off(in_pieces(engine(loaded), ids), exact) < MEDIAN


@needs_int8
def test_all_linear_layers_but_the_head_are_in_8_bits(tmp_path: Path) -> None:
    model: Any = load_model(save_tiny("llama", tmp_path), dtype="float32", device="cpu", quantization="int8")
    packed = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    head = packed.pop("lm_head", None)
    assert len(packed) == 14
    used = CompiledInt8Product if cpu.host().byte_products else Int8Product
    assert all(type(m.shared.product) is used for m in packed.values())
    assert head is None or isinstance(head.shared.product, CompiledProduct)


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_compiled_as_a_whole_gives_what_the_stock_code_gives(tmp_path: Path, dtype: str) -> None:
    ids = [(i * i * 7 + i * 3 + 363) % VOCAB for i in range(33)]
    model = load_model(save_tiny("qwen2", tmp_path), dtype=dtype, device="cpu", quantization="int8")
    it = engine(model, dtype=dtype)
    assert isinstance(it._forward, FusedForward)
    fused = in_pieces(it, ids)
    it._forward = StockForward(model, layout_of(model).layout.layers, layout_of(model).reads)
    assert off(fused, in_pieces(it, ids)) < (1e-2 if dtype == "float32" else 0.05)  # levels are rounded either way


@needs_int8
def test_text_handed_over_in_8_bits_is_what_one_engine_gives(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    here, there = (engine(load_model(folder, dtype="float32", device="cpu", quantization="int8")) for _ in range(2))
    prompts = [[(i * i + length) % VOCAB for i in range(length)] for length in (1, 4, 9, 30)]
    alone = [decode_together(here, [prefill(here, prompt, 7)], 12, 1)[0] for prompt in prompts]
    assert decode_together(there, [prefill(here, prompt, 7) for prompt in prompts], 12, 1) == alone
    assert len({tuple(tokens) for tokens in alone}) == 4


@needs_int8
def test_kv_of_quantized_and_other_workers_is_not_exchanged(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)

    def loaded(quantization: str, **more: Any) -> bytes:
        settings = PrefillSettings(model=str(folder), dtype="float32", quantization=quantization, **more)
        it = load_engine(settings, folder)
        assert it.forward([Segment(it.open(4), [1, 2, 3], GREEDY)]) != [None]
        return it.spec.fingerprint

    assert loaded("int8") == loaded("int8") != loaded("none")
    assert loaded("int8", kv_codec="bfloat16") != loaded("none", kv_codec="bfloat16")


@needs_int8
def test_a_model_without_layers_to_quantize_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: GPT2LMHeadModel has no layers that int8 is for"):
        load_model(save_tiny("gpt2", tmp_path), dtype="float32", device="cpu", quantization="int8")


def test_int8_is_refused_on_other_devices() -> None:
    with pytest.raises(ConfigError, match="int8 runs on a CPU only, not on 'cuda:0'"):
        require_int8("cuda:0")


def test_int8_is_refused_on_a_cpu_that_does_not_multiply_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(int8, "_multiplies_bytes", lambda: False)
    with pytest.raises(ConfigError, match="wants a CPU with AVX512 VNNI or AMX"):
        load_model(save_tiny("llama", tmp_path), dtype="float32", device="cpu", quantization="int8")


@needs_int8
def test_int8_is_refused_where_sums_of_products_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Int8Product.__call__
    monkeypatch.setattr(Int8Product, "__call__", lambda self, x: real(self, x).clamp(max=60.0))
    with pytest.raises(ConfigError, match="are wrong on this CPU"):
        require_int8("cpu")


def test_int8_is_refused_by_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        pass

    monkeypatch.setattr(torch.ops, "onednn", Nothing())
    with pytest.raises(ConfigError, match="this build of torch has no int8 linear layers"):
        require_int8("cpu")
