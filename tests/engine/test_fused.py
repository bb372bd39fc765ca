"""Forwards that are compiled as a whole: which models have one, and what may not change a bit of it.

That they compute what the stock models compute is in `test_equivalence`, under the names of COMPILED.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pdq.config import DecodeSettings
from pdq.engine import forwards, kernel_selection
from pdq.engine.base import Segment
from pdq.engine.code import Code
from pdq.engine.forward import StockForward
from pdq.engine.fused import FusedForward
from pdq.engine.kv import TorchSlot
from pdq.engine.load import load_engine
from pdq.engine.probe import layout_of
from pdq.engine.runner import TorchEngine
from tests.engine.gates import use_kernels
from tests.engine.pd import GREEDY, engine
from tests.engine.tiny import (
    COMPILED,
    CONFIGS,
    CONTEXT,
    LLAMA3,
    WINDOW,
    compiled_model,
    loaded,
    rope_of,
    save_tiny,
    tiny_model,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALSO = {"llama linear", "llama dynamic"}  # the same code as those in COMPILED
pytestmark = pytest.mark.skipif(not COMPILED, reason="forwards are compiled for CPUs with AVX2")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def changed(name: str, change: Callable[[Any], None] = lambda model: None, **overrides: Any) -> PreTrainedModel:
    model = tiny_model(name, **overrides)
    change(model)
    return loaded(model)


def is_fused(it: TorchEngine) -> bool:
    assert isinstance(it._forward, FusedForward | StockForward)
    return isinstance(it._forward, FusedForward)


@pytest.mark.parametrize("name", CONFIGS)
def test_only_models_of_usual_blocks_are_compiled_as_a_whole(name: str) -> None:
    assert is_fused(engine(changed(name))) == (name in {*COMPILED.values(), *ALSO})


def scale(name: str, factor: float) -> Callable[[Any], None]:
    """Code that does a little more than its modules show."""

    def change(model: Any) -> None:
        module = model.get_submodule(name)
        stock = module.forward
        module.forward = lambda *args, **kwargs: stock(*args, **kwargs) * factor

    return change


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["model.embed_tokens", "model.layers.1.mlp", "model.layers.0.input_layernorm", "model.norm"]
)
def test_a_model_that_does_more_than_its_modules_show_runs_by_its_own_code(name: str, dtype: str) -> None:
    def change(model: Any) -> None:
        scale(name, 1.15)(model)
        model.to(DTYPES[dtype])

    it = engine(changed("llama", change), dtype=dtype)
    assert is_fused(it) == (name == "model.embed_tokens")  # that module itself is run
    assert is_fused(engine(changed("llama", lambda model: model.to(DTYPES[dtype])), dtype=dtype))


@pytest.mark.parametrize("left_out", [{"decode": False}, {"prefill": False}, {"linear": "torch"}], ids=str)
def test_where_a_kernel_is_not_used_the_stock_code_runs(
    monkeypatch: pytest.MonkeyPatch, left_out: dict[str, Any]
) -> None:
    use_kernels(monkeypatch, replace(kernel_selection.select(torch.float32), **left_out))
    assert not is_fused(engine(changed("llama")))


# Ministral 3 has Llama's modules, and scales its queries by how often a position goes into the original context.
SCALED_QUERIES = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.5, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
MINISTRAL = "transformers.models.ministral3.modeling_ministral3.Ministral3ForCausalLM"


def far_error(it: TorchEngine, model: PreTrainedModel, length: int) -> float:
    """Of the last logits of a text, relative to the stock model's."""
    ids = texts(1, length)[0]
    exact = model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
    return float((logits(it, ids, [length // 2])[0] - exact).norm() / exact.norm())


def test_queries_scaled_by_position_are_not_computed_as_llamas() -> None:
    it, stock = engine(changed("ministral3", **SCALED_QUERIES)), tiny_model("ministral3", **SCALED_QUERIES)
    assert not is_fused(it)
    assert [far_error(it, stock, length) < 1e-5 for length in (8, 17, 100)] == [True] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("checked", ["narrow copy and model", "model"])
def test_the_load_check_finds_what_begins_beyond_the_original_context(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, checked: str, dtype: str
) -> None:
    """Even a class that is wrongly believed is computed by its own code."""
    caplog.set_level("INFO")
    monkeypatch.setattr(forwards, "FUSED_CLASSES", {MINISTRAL})
    if checked == "model":
        monkeypatch.setattr(forwards, "_narrow_difference", lambda kind: None)
    rope = SCALED_QUERIES["rope_parameters"] | {"original_max_position_embeddings": 64}
    model = changed("ministral3", lambda model: model.to(DTYPES[dtype]), rope_parameters=rope)
    assert not is_fused(engine(model, dtype=dtype))
    assert "in a text from position 48 on" in caplog.text  # of 32 tokens: it crosses 64
    assert ("narrow copy" in caplog.text) == (checked != "model")


THRESHOLDS: dict[str, dict[str, Any]] = {
    "original context of llama3": rope_of("llama3", **LLAMA3),
    "original context of yarn": rope_of("yarn", original_max_position_embeddings=32),
    "linear": rope_of("linear"),
    "window": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "window and yarn": {"sliding_window": WINDOW} | rope_of("yarn", original_max_position_embeddings=32),
    "part of a head": {"partial_rotary_factor": 0.5, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    "longrope": {"original_max_position_embeddings": CONTEXT, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": CONTEXT,
        "short_factor": [1.1, 1.2, 1.3, 1.4], "long_factor": [2.0, 2.0, 2.0, 2.0]}},
}  # fmt: skip
CLASSES = ("phi3", "llama", "mistral", "qwen2", "qwen3", "smollm3")
# Phi 3 knows one scaling, whose original context no text may pass (`test_model`).
OF_PHI3 = ("longrope", "window", "part of a head")
CROSSED = [(name, threshold) for name in CLASSES[1:] for threshold in THRESHOLDS if threshold != "longrope"]
CROSSED += [("phi3", threshold) for threshold in OF_PHI3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "threshold"), CROSSED)
def test_each_class_is_computed_right_beyond_every_threshold_of_its_config(
    name: str, threshold: str, dtype: str
) -> None:
    stock = tiny_model(name, **THRESHOLDS[threshold])
    model = changed(name, lambda model: model.to(DTYPES[dtype]), **THRESHOLDS[threshold])
    it = engine(model, dtype=dtype)
    assert is_fused(it)
    for length in (8, WINDOW + 20, 33, 40, 100, CONTEXT - 1):
        assert far_error(it, stock, length) < (1e-5 if dtype == "float32" else 0.2)


def test_the_classes_that_are_compiled_as_a_whole_are_those_of_this_file() -> None:
    assert {forwards._full_name(type(tiny_model(name))) for name in CLASSES} == forwards.FUSED_CLASSES


def texts(count: int, length: int) -> list[list[int]]:
    return [[(i * i * 7 + i * 3 + k * 11) % 101 for i in range(length + k)] for k in range(count)]


def logits(it: TorchEngine, ids: list[int], cuts: list[int]) -> Tensor:
    """Of the last token, with the text computed in pieces that end at `cuts`."""
    slot = it.open(CONTEXT)
    for cut in cuts:
        it.forward([Segment(slot, ids[slot.length : cut])])
    found = it.logits([Segment(slot, ids[slot.length :], GREEDY)])
    it.close(slot)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_cuts_nor_neighbours_nor_threads_change_a_bit(dtype: str) -> None:
    it = engine(compiled_model("llama compiled", DTYPES[dtype]), dtype=dtype)
    it._threads = None
    ids = texts(1, 90)[0]
    torch.set_num_threads(1)
    right = logits(it, ids, [])
    assert torch.equal(logits(it, ids, [7, 64]), right)
    torch.set_num_threads(2)
    assert torch.equal(logits(it, ids, [31]), right)
    slots = [it.open(CONTEXT) for _ in range(4)]
    mixed = it.logits([Segment(slot, text, GREEDY) for slot, text in zip(slots, [*texts(3, 20), ids], strict=True)])
    assert torch.equal(mixed[3:], right)


def test_single_tokens_of_a_batch_are_computed_as_alone() -> None:
    it = engine(compiled_model("qwen3 compiled", torch.bfloat16), dtype="bfloat16")
    prompts = texts(14, 5)
    slots = [it.open(CONTEXT) for _ in prompts]
    it.forward([Segment(slot, text[:-1]) for slot, text in zip(slots, prompts, strict=True)])
    together = it.logits([Segment(slot, text[-1:], GREEDY) for slot, text in zip(slots, prompts, strict=True)])
    for i, text in enumerate(prompts):
        assert torch.equal(logits(it, text, [len(text) - 1]), together[i : i + 1])


@pytest.mark.parametrize("rows", [0, 2])
def test_rows_that_nobody_samples_leave_the_same_kv(rows: int) -> None:
    model = compiled_model("llama compiled")
    it = engine(model)
    ids, found = texts(1, 10)[0], []
    for keep in (list(range(10)), list(range(rows))):
        slot = TorchSlot(layout_of(model).layout, 10, torch.device("cpu"))
        with torch.inference_mode():
            out = it._forward([(slot, 10)], torch.tensor(ids), torch.arange(10), torch.tensor(keep, dtype=torch.long))
        assert out.shape == (len(keep), 101)
        found.append((torch.cat([plane.flatten() for plane in slot.planes(0, 10)]), out[:rows]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("name", ["llama compiled", "mistral compiled"])
def test_what_is_not_a_number_fails_its_own_sequence_only(name: str) -> None:
    it = engine(compiled_model(name))
    ids = texts(2, 9)
    slots = [it.open(CONTEXT) for _ in ids]
    it.forward([Segment(slot, text[:-1]) for slot, text in zip(slots, ids, strict=True)])
    assert isinstance(slots[0], TorchSlot)
    slots[0].planes(0, 8)[1][0, 0, 6] = float("nan")
    tokens = it.forward([Segment(slot, text[-1:], GREEDY) for slot, text in zip(slots, ids, strict=True)])
    assert tokens[0] is None
    assert tokens[1] == int(logits(it, ids[1], [len(ids[1]) - 1]).argmax())


def test_logits_in_bfloat16_are_not_rounded() -> None:
    it = engine(compiled_model("llama compiled", torch.bfloat16), dtype="bfloat16")
    found = logits(it, [1, 2, 3], [])
    assert not torch.equal(found.bfloat16().float(), found)


def test_nothing_is_compiled_when_that_is_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path)
    made: dict[str, list[int]] = {}
    for choice in ("auto", "off"):
        settings = DecodeSettings(redis_url="redis://localhost", model=str(folder), dtype="float32", compile=choice)
        with monkeypatch.context() as patch:
            if choice == "off":
                patch.setattr(Code, "__init__", lambda *args: pytest.fail("something is compiled"))
            it = load_engine(settings, folder)
        assert isinstance(it, TorchEngine)
        assert is_fused(it) == (choice == "auto")
        made[choice] = [int(logits(it, ids, [3]).argmax()) for ids in texts(5, 8)]
    assert made["auto"] == made["off"]
