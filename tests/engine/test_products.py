"""The product kernels and packed layers give what the stock ones give; forced on here, with every edge made small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from pdq.engine import kernel_selection, kernels, products
from pdq.engine.attention import causal_mask
from pdq.engine.base import Segment, Slot
from pdq.engine.kernel_selection import KernelSet
from pdq.engine.kv import TorchSlot
from pdq.engine.model import load_model
from pdq.engine.packed import Bfloat16Product, PackedLinear, can_pack, pack
from pdq.engine.runner import TorchEngine
from tests.engine.conftest import Arch
from tests.engine.gates import use_kernels
from tests.engine.pd import GREEDY, Handoff, decode_together, engine, prefill
from tests.engine.tiny import CONTEXT, save_tiny, tiny_model

Archs = Callable[[str], Arch]
needs_packing = pytest.mark.skipif(not can_pack(), reason="this CPU or torch build has no packed bfloat16 products")


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], TorchEngine]:
    """Engines that use products everywhere, in blocks of 2 rows, padded to 4 tokens, over memory full of NaN."""
    use_kernels(monkeypatch, KernelSet(bmm=products.Bmm(chunks=True, singles=True)))
    smallest = {"_FEWEST_ROWS": 2, "_FEWEST_SCORES": 0, "_FEWEST_KEYS": 0}
    for name, value in (smallest | {"_ROW_STEP": 2, "_SCORE_BYTES": 1, "PADDING": 4}).items():
        monkeypatch.setattr(products, name, value)
    fresh = TorchEngine.open

    def poisoned(self: TorchEngine, capacity: int) -> Slot:
        slot = fresh(self, capacity)
        assert isinstance(slot, TorchSlot)
        for plane in slot.planes(0, slot.capacity):
            plane.fill_(float("nan"))
        return slot

    monkeypatch.setattr(TorchEngine, "open", poisoned)
    return lambda name: engine(tiny_model(name))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3_text", "gemma2", "gpt_oss"])
def test_products_give_what_generate_gives(arch: Archs, forced: Callable[[str], TorchEngine], name: str) -> None:
    it, here, there = arch(name), forced(name), forced(name)
    lengths = (1, 2, 3, 4, 5, 8, 9, 13)
    handoffs = [prefill(here, it.prompt(length), 6) for length in lengths]
    assert decode_together(there, handoffs, 8, 1) == [it.expected(length, 8) for length in lengths]


def test_the_kernels_are_the_ones_that_ran(
    forced: Callable[[str], TorchEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    for name in ("single", "chunk"):
        stock = getattr(products, name)
        monkeypatch.setattr(products, name, lambda *a, stock=stock, name=name, **k: used.append(name) or stock(*a, **k))
    it = forced("llama")
    used.clear()  # of the first forward, at load
    prefill(it, [1, 2, 3, 4, 5], 4)
    assert used == ["chunk", "chunk", "single", "single"]  # two layers each


def test_products_reach_the_last_token_of_a_context(forced: Callable[[str], TorchEngine]) -> None:
    it = forced("llama")
    ids = [(i * 7) % 101 for i in range(CONTEXT)]
    slot = it.open(CONTEXT)
    it.forward([Segment(slot, ids[:-2])])
    it.forward([Segment(slot, ids[-2:-1])])
    logits = it.logits([Segment(slot, ids[-1:], GREEDY)])
    expected = tiny_model("llama")(torch.tensor([ids])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("window", [None, 100])
def test_bfloat16_products_are_within_a_percent_of_exact_attention(window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    start, n, heads, kv_heads, dim = 300, 130, 6, 2, 64
    visible = start + n if window is None else window - 1 + n
    query = torch.randn((1, heads, n, dim), generator=generator).bfloat16()
    key, value = (torch.randn((1, kv_heads, visible, dim), generator=generator).bfloat16() for _ in range(2))
    mask = causal_mask(start, n, window, key)
    more = {"windowed": window is not None, "scaling": None, "scratch": products.Scratch()}
    ours = products.chunk(query, key, value, mask, **more)
    exact = kernels.prefill(query.double(), key.double(), value.double(), mask.double(), kernels.Scores())
    assert float((ours - exact).norm() / exact.norm()) < 0.01
    row = query[:, :, 0].view(1, kv_heads, 3, dim)
    single = products.single(row, key, value, visible - 5, None)
    keys, values = key[:, :, : visible - 5].double(), value[:, :, : visible - 5].double()
    exact = functional.scaled_dot_product_attention(row.double(), keys, values)
    assert float((single - exact).norm() / exact.norm()) < 0.01


def test_float32_always_uses_the_fused_kernel() -> None:
    assert kernel_selection.select(torch.float32).bmm == products.Bmm(chunks=False, singles=False)


@needs_packing
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # without and with biases
def test_packed_layers_compute_what_the_stock_ones_do(name: str) -> None:
    stock, packed = tiny_model(name).bfloat16(), tiny_model(name).bfloat16()
    linears = sum(type(m) is nn.Linear for m in stock.modules())
    assert pack(packed) == linears == sum(isinstance(m, PackedLinear) for m in packed.modules())
    ids = torch.arange(1, 30)[None]
    expected = stock(ids).logits.float()
    assert float((packed(ids).logits.float() - expected).norm() / expected.norm()) < 0.02


@needs_packing
def test_a_chunk_without_a_sample_runs_through_a_packed_head() -> None:
    model = tiny_model("llama").bfloat16()
    it = engine(model, dtype="bfloat16")
    pack(model)
    slot = it.open(10)
    assert it.forward([Segment(slot, [1, 2, 3])]) == [None]
    assert it.logits([Segment(slot, [4])]).shape == (0, 101)


@needs_packing
def test_linear_layers_are_packed_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path, tie_word_embeddings=True)
    half = load_model(folder, dtype="bfloat16", device="cpu")
    use_kernels(monkeypatch, KernelSet(linear="onednn"))
    other = load_model(folder, dtype="bfloat16", device="cpu")
    use_kernels(monkeypatch, KernelSet())
    full = load_model(folder, dtype="float32", device="cpu")
    assert not any(type(m) is nn.Linear for it in (half, other) for m in it.modules())
    assert all(isinstance(m.shared.product, Bfloat16Product) for m in other.modules() if isinstance(m, PackedLinear))
    assert not any(isinstance(m, PackedLinear) for m in full.modules())  # MKL packs by itself
    assert half.get_input_embeddings().weight.shape == (101, 32)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_bfloat16_handed_over_gives_what_one_engine_gives(tmp_path: Path, name: str) -> None:
    folder = save_tiny(name, tmp_path)
    here, there = (engine(load_model(folder, dtype="bfloat16", device="cpu"), dtype="bfloat16") for _ in range(2))
    prompts = [[(i * i + length) % 101 for i in range(length)] for length in (1, 4, 9, 30)]
    alone = []
    for prompt in prompts:
        slot = here.open(CONTEXT)
        while len(prompt) - slot.length > 7:
            here.forward([Segment(slot, prompt[slot.length : slot.length + 7])])
        tokens = [here.forward([Segment(slot, prompt[slot.length :], GREEDY)])[0]]
        while len(tokens) < 12:
            last = tokens[-1]
            assert last is not None
            tokens.append(here.forward([Segment(slot, [last], GREEDY)])[0])
        here.close(slot)
        alone.append(tokens)
    handed: list[Handoff] = [prefill(here, prompt, 7) for prompt in prompts]
    assert [decode_together(there, [h], 12, 1)[0] for h in handed] == alone
