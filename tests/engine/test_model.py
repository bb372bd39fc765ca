"""Loading: what can run loads and computes the same; what cannot is refused by name, before it can talk nonsense."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config, T5ForConditionalGeneration, dynamic_module_utils

from pdq.config import PrefillSettings
from pdq.engine.base import Segment
from pdq.engine.load import load_engine
from pdq.engine.model import load_model
from pdq.engine.probe import layout_of
from pdq.errors import ModelUnsupported
from pdq.models import fingerprint
from tests.engine.pd import GREEDY, engine
from tests.engine.tiny import WINDOW, save_tiny, tiny_model


def load(folder: Path) -> Any:
    return load_model(folder, dtype="float32", device="cpu")


def test_a_saved_model_loads_and_computes_what_it_did(tmp_path: Path) -> None:
    model = load(save_tiny("llama", tmp_path))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    it = engine(model)
    logits = it.logits([Segment(it.open(10), [3, 1, 4, 1, 5], GREEDY)])
    expected = tiny_model("llama")(torch.tensor([[3, 1, 4, 1, 5]])).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_bfloat16_is_loaded_as_bfloat16(tmp_path: Path) -> None:
    model = load_model(save_tiny("llama", tmp_path), dtype="bfloat16", device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert engine(model, dtype="bfloat16").spec.token_bytes == 2 * 2 * 16 * 2
    with pytest.raises(ValueError, match="bfloat16"):
        engine(model, dtype="float32")


SMALL_MIXER = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}
NEXT = {
    "layer_types": ["full_attention", "linear_attention"],
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}


@pytest.mark.parametrize(
    ("arch", "settings", "message"),
    [
        ("mamba", {}, r"MambaForCausalLM: layer 0 is of type linear_attention"),
        ("jamba", SMALL_MIXER, r"JambaForCausalLM: layer 0 is of type linear_attention"),
        ("qwen3_next", NEXT, r"Qwen3NextForCausalLM: layer 1 is of type linear_attention"),
        ("llama4_text", {"intermediate_size_mlp": 64}, r"Llama4ForCausalLM: layer 0 is of type chunked_attention"),
        ("rwkv", {}, r"RwkvForCausalLM takes no position_ids"),
        ("bert", {}, r"BertLMHeadModel asks for a mask that is neither causal nor a sliding window"),
        ("doge", {}, r"DogeForCausalLM: layer model.layers.0 \(DogeDecoderLayer\) changes its attention mask"),
        ("openai-gpt", {}, r"OpenAIGPTLMHeadModel takes no KV cache"),
        ("xglm", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}, r"XGLMDecoderLayer\) does not"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(
    tmp_path: Path, arch: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        load(save_tiny(arch, tmp_path, **settings))


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="T5ForConditionalGeneration is not a decoder-only"):
        load(tmp_path)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_thing", "architectures": ["NoSuch"]}))
    with pytest.raises(ModelUnsupported, match="no_such_thing"):
        load(tmp_path)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OddConfig(LlamaConfig):
    model_type = "odd"

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that transformers does not know, with its own code."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = save_tiny("llama", tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    config |= {"model_type": "odd", "architectures": ["OddForCausalLM"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_odd.py").write_text(CODE)
    return folder


def settings(folder: Path, **more: Any) -> PrefillSettings:
    return PrefillSettings(model=str(folder), dtype="float32", **more)


def test_code_of_a_model_runs_only_when_it_is_trusted(with_code: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"OddForCausalLM .*only with --trust-remote-code"):
        load_engine(settings(with_code), with_code)
    assert "transformers_modules" not in sys.modules
    it = load_engine(settings(with_code, trust_remote_code=True), with_code)
    assert it.spec.layout == "2x2x8+8"
    (token,) = it.forward([Segment(it.open(10), [3, 1, 4, 1, 5], GREEDY)])
    assert token == int(tiny_model("llama")(torch.tensor([[3, 1, 4, 1, 5]])).logits[0, -1].argmax())


def test_other_code_is_another_model(with_code: Path) -> None:
    def found(trust: bool) -> bytes:
        return fingerprint(with_code, dtype="float32", block_size=32, trust_remote_code=trust)

    trusted, plain = found(True), found(False)
    (with_code / "modeling_odd.py").write_text(CODE + "# changed")
    assert found(True) != trusted
    assert found(False) == plain


def test_missing_weights_are_refused_instead_of_made_up(tmp_path: Path) -> None:
    weights = save_tiny("llama", tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"1 missing keys.*layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    weights = save_tiny("llama", tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"model\.norm\.weight"):
        load(tmp_path)


def test_an_incomplete_folder_is_a_file_error(tmp_path: Path) -> None:
    (save_tiny("llama", tmp_path) / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_model_that_ignores_position_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inner = model.model.rotary_emb
    stock = inner.forward
    monkeypatch.setattr(inner, "forward", lambda x, position_ids: stock(x, torch.arange(x.shape[1])[None]))
    with pytest.raises(ModelUnsupported, match="off the model's own"):
        layout_of(model)


def test_a_bidirectional_model_is_refused() -> None:
    with pytest.raises(ModelUnsupported, match="neither causal nor a sliding window"):
        layout_of(tiny_model("gemma3_text", use_bidirectional_attention=True))


def test_windows_come_from_the_masks_the_model_asks_for() -> None:
    def windows(arch: str, **settings: Any) -> list[int | None]:
        return [layer.window for layer in layout_of(tiny_model(arch, **settings)).layout.layers]

    assert windows("llama") == [None, None]
    assert windows("mistral") == [WINDOW, WINDOW]
    assert windows("gemma2") == [WINDOW, None]
    # Phi-3.5-MoE masks a window without telling its attention function.
    assert windows("phimoe", sliding_window=3, num_local_experts=2) == [3, 3]


def layout(arch: str, **settings: Any) -> str:
    return layout_of(tiny_model(arch, **settings)).layout.text


def test_the_layout_is_of_what_is_stored() -> None:
    assert layout("llama") == "2x2x8+8"
    assert layout("gpt_bigcode") == "2x1x8+8"
    assert layout("falcon grouped") == "2x2x8+8"  # the stock cache holds all four heads
    assert layout("deepseek_v3") == "2x1x8+4"  # latent and rotary part, not the heads made of them
    assert layout("mimo_v2_flash") == "1x4x12+8,1x2x12+8"


def test_layers_that_share_kv_store_it_once() -> None:
    probed = layout_of(tiny_model("gemma3n_text"))
    assert probed.layout.text == "4x2x8+8"
    assert probed.reads == (0, 1, 2, 3, 2, 3)


def test_dynamic_rope_is_served_up_to_where_it_begins_to_change() -> None:
    assert layout_of(tiny_model("llama dynamic")).max_positions == 128
    assert layout_of(tiny_model("llama yarn")).max_positions is None


def test_a_model_that_counts_tokens_in_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    stock = model.model.rotary_emb.forward

    def late(cache: Any = None, **arguments: Any) -> Any:
        seen = 0 if cache is None else cache.get_seq_length()
        monkeypatch.setattr(model.model.rotary_emb, "forward", lambda x, position_ids: stock(x, position_ids + seen))
        return inner(cache=cache, **arguments)

    inner = model.model.forward
    monkeypatch.setattr(model.model, "forward", late)
    with pytest.raises(ModelUnsupported, match="off the model's own"):
        layout_of(model)


def test_long_rope_is_served_up_to_where_its_frequencies_change() -> None:
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    made = {"rope_parameters": scaling, "original_max_position_embeddings": 64}
    assert layout_of(tiny_model("phi3", **made)).max_positions == 64
    with pytest.raises(ModelUnsupported, match="longer than 64 tokens"):
        engine(tiny_model("phi3", **made))
