"""Layers with one input become one product: which do, what they compute, and what they must not keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pdq.engine import model as loading
from pdq.engine.model import replace
from pdq.engine.packed import PackedLinear, Product, bfloat16, can_pack, pack, separate, stacked
from pdq.engine.probe import CannotRun, layout_of
from pdq.engine.siblings import families
from tests.engine.conftest import Arch
from tests.engine.pd import engine
from tests.engine.test_equivalence import BFLOAT16, COUNT, in_pieces
from tests.engine.tiny import CONFIGS, tiny_model

Archs = Callable[[str], Arch]
each_arch = pytest.mark.parametrize("name", CONFIGS)
needs_packing = pytest.mark.skipif(not can_pack(), reason="this CPU or torch build has no packed bfloat16 products")


def plain(group: Sequence[nn.Linear]) -> Product:
    weight, bias = stacked(group)
    return lambda x: functional.linear(x, weight, bias)


def named(model: nn.Module, run: Callable[[], object]) -> list[list[str]]:
    names = {module: name for name, module in model.named_modules()}
    return [[names[linear] for linear in family] for family in families(model, run)]


def probed(name: str) -> list[list[str]]:
    model = tiny_model(name)
    return named(model, lambda: layout_of(model))


def packed_with(model: PreTrainedModel, make: Callable[[Sequence[nn.Linear]], Product | None]) -> PreTrainedModel:
    replace(model, families(model, lambda: layout_of(model)), make)
    assert not any(m.shared.contiguous for m in model.modules() if isinstance(m, PackedLinear))
    return model


@each_arch
def test_one_product_for_all_siblings_gives_the_stock_models_logits(arch: Archs, name: str) -> None:
    it = arch(name)
    ids = it.prompt(17 + COUNT)
    ours = in_pieces(engine(packed_with(tiny_model(name), plain)), ids)
    torch.testing.assert_close(ours, it.logits(ids)[16:], rtol=0, atol=1e-4)


@needs_packing
@each_arch
def test_packed_bfloat16_is_about_as_near_to_float32_as_the_stock_model(arch: Archs, name: str) -> None:
    it = arch(name)
    ids = it.prompt(17 + COUNT)
    exact = it.logits(ids)[16:]
    packed = engine(packed_with(tiny_model(name).to(torch.bfloat16), bfloat16), dtype="bfloat16")
    stock, ours = (
        float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).median())
        for found in (it.half.logits(ids)[16:], in_pieces(packed, ids))
    )
    assert ours < BFLOAT16 * stock


def test_q_k_and_v_are_siblings_and_so_are_gate_and_up() -> None:
    attention, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
    expected = [
        [(part + name).format(layer) for name in names]
        for layer in (0, 1)
        for part, names in ((attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj")))
    ]
    assert probed("llama") == expected


def test_layers_that_read_the_kv_of_others_have_no_siblings_there() -> None:
    attention = [family for family in probed("gemma3n_text") if "self_attn" in family[0]]
    assert [family[0].split(".")[2] for family in attention] == ["0", "1", "2", "3"]  # of six; the last two share


class Two(nn.Module):
    """Two layers, one input, and something `between` them that may change it."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 4, bias=False)
        self._between = between
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.one(x)
        return first, self.two(self._between(x))


def same(x: Tensor) -> Tensor:
    return x


def doubled(x: Tensor) -> Tensor:
    return x.mul_(2)


def test_layers_with_one_input_are_siblings_in_the_order_of_their_calls() -> None:
    model = Two(same)
    assert named(model, lambda: (model(torch.ones(2, 3)), model(torch.zeros(1, 3)))) == [["one", "two"]]


@pytest.mark.parametrize("between", [doubled, torch.clone], ids=["changed in place", "another tensor"])
def test_layers_between_which_the_input_changes_are_no_siblings(between: Callable[[Tensor], Tensor]) -> None:
    model = Two(between)
    assert named(model, lambda: model(torch.ones(2, 3))) == []


def test_layers_that_are_not_always_called_together_are_no_siblings() -> None:
    model = Two(same)
    assert named(model, lambda: (model(torch.ones(2, 3)), model.two(torch.ones(1, 3)))) == []


def test_watching_leaves_nothing_behind_even_if_the_run_fails() -> None:
    model = Two(same)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        families(model, lambda: model(torch.ones(2, 5)))
    assert not model.one._forward_pre_hooks


def paired() -> tuple[Two, Two, list[Tensor]]:
    """A model, its like with a shared product, and the inputs that product has computed."""
    stock, model, inputs = Two(same), Two(same), []

    def counting(product: Product, x: Tensor) -> Tensor:
        inputs.append(x)
        return product(x)

    assert pack(model, [(model.one, model.two)], lambda group: partial(counting, plain(group))) == 2
    return stock, model, inputs


def test_the_first_sibling_computes_for_all_and_layers_without_a_bias_get_none() -> None:
    stock, model, inputs = paired()
    x = torch.randn(5, 3)
    torch.testing.assert_close(model(x), stock(x))
    assert len(inputs) == 1


def test_an_input_that_has_changed_since_the_last_forward_is_computed_again() -> None:
    stock, model, inputs = paired()
    x = torch.randn(5, 3)
    model(x)
    torch.testing.assert_close(model(x.mul_(3)), stock(x))
    model.one(x)  # as a forward that failed in the middle
    torch.testing.assert_close(model(x.add_(1)), stock(x))
    assert len(inputs) == 4


def test_a_sibling_with_another_input_gets_its_own_result() -> None:
    stock, model, _ = paired()
    x, y = torch.randn(5, 3), torch.randn(2, 3)
    model.one(x)
    torch.testing.assert_close(model.two(y), stock.two(y))
    torch.testing.assert_close(model.two(x), stock.two(x))


def test_nothing_is_kept_once_all_siblings_have_been_called() -> None:
    _, model, _ = paired()
    model(torch.randn(5, 3))
    assert isinstance(model.one, PackedLinear)
    assert model.one.shared._last is None


def test_packed_layers_give_up_their_weights_but_not_a_tied_embedding() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    head, embedding = model.lm_head, model.get_input_embeddings()
    assert pack(model, [], plain) == 15
    assert head.weight is None
    assert embedding.weight.shape == (101, 32)


def test_modelling_code_that_cannot_take_columns_gets_tensors_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    siblings = families(model, lambda: layout_of(model))
    real = loading.try_out

    def picky(given: PreTrainedModel, *rest: Any) -> None:
        query = given.model.layers[0].self_attn.q_proj(torch.ones((1, 3, 32)))
        if not query.is_contiguous():
            raise CannotRun("view size is not compatible")
        real(given, *rest)

    monkeypatch.setattr(loading, "try_out", picky)
    replace(model, siblings, plain)
    assert model.model.layers[1].mlp.up_proj.shared.contiguous


def test_contiguous_results_are_the_same() -> None:
    stock, model, _ = paired()
    separate(model)
    x = torch.randn(5, 3)
    found = model(x)
    torch.testing.assert_close(found, stock(x))
    assert all(part.is_contiguous() for part in found)
