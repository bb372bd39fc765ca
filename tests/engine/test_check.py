"""`pdq models check`: from config.json alone, for models far larger than this machine could hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdq.cli import main
from pdq.engine import forwards
from pdq.engine.check import Report, check
from tests.engine.test_fused import MINISTRAL, SCALED_QUERIES
from tests.engine.tiny import COMPILED

YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
LONGROPE = {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [1.1] * 48}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
    "max_position_embeddings": 131072, "num_attention_heads": 128, "num_hidden_layers": 126, "num_key_value_heads": 8,
    "vocab_size": 128256, "rope_theta": 500000.0,
    "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "max_position_embeddings": 163840, "vocab_size": 129280,
    "rope_scaling": YARN,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
    "num_local_experts": 32, "sliding_window": 128, "max_position_embeddings": 131072, "vocab_size": 201088,
}  # fmt: skip
PHI3_128K = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "vocab_size": 32064,
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE,
}  # fmt: skip
FALCON_7B = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
    "num_hidden_layers": 32, "multi_query": True, "alibi": False, "vocab_size": 65024,
}  # fmt: skip


def checked(folder: Path, config: dict[str, Any], **settings: Any) -> Report:
    (folder / "config.json").write_text(json.dumps(config))
    return check(folder, **({"dtype": "bfloat16", "max_model_len": None, "trust_remote_code": False} | settings))


@pytest.mark.parametrize(
    ("config", "layout", "token_bytes", "windows", "context"),
    [
        (LLAMA_405B, "126x8x128+128", 516_096, (), 131_072),
        (DEEPSEEK_V3, "61x1x512+64", 70_272, (), 163_840),
        (GPT_OSS, "24x8x64+64", 49_152, (128,), 131_072),
        (PHI3_128K, "32x32x96+96", 393_216, (), 4096),  # beyond, LongRoPE turns all positions
        (FALCON_7B, "32x1x64+64", 8192, (), None),  # its config.json does not say
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_the_kv_layout_of_a_large_model_is_told_and_a_narrow_copy_compared(
    tmp_path: Path, config: dict[str, Any], layout: str, token_bytes: int, windows: tuple[int, ...], context: int | None
) -> None:
    report = checked(tmp_path, config)
    assert (report.supported, report.compared, report.reason) == (True, True, None)
    assert report.model_class == config["architectures"][0]
    assert (report.layout, report.token_bytes, report.windows) == (layout, token_bytes, windows)
    assert report.context == context


@pytest.mark.parametrize(
    ("config", "fused"),
    [(LLAMA_405B | {"num_hidden_layers": 4}, True), (PHI3_128K, True), (GPT_OSS, False)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_it_says_whether_the_forward_is_compiled_as_a_whole(
    tmp_path: Path, config: dict[str, Any], fused: bool
) -> None:
    assert checked(tmp_path, config).fused == (fused and bool(COMPILED))


def test_a_class_with_llamas_modules_and_scaled_queries_is_not_compiled_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "num_hidden_layers": 2}
    config |= {"rope_parameters": SCALED_QUERIES["rope_parameters"] | {"original_max_position_embeddings": 16384}}
    for classes in (forwards.FUSED_CLASSES, {MINISTRAL}):
        monkeypatch.setattr(forwards, "FUSED_CLASSES", classes)
        report = checked(tmp_path, config)
        assert (report.supported, report.fused) == (True, False)


def test_shared_kv_is_counted_once(tmp_path: Path) -> None:
    report = checked(tmp_path, {"model_type": "gemma3n_text"}, dtype="float32")
    assert (report.layers, report.kv_layers) == (35, 20)
    assert report.token_bytes == 20 * 2 * (256 + 256) * 4


def test_layers_with_widths_of_their_own_stay_different_in_the_narrow_copy(tmp_path: Path) -> None:
    config = {"model_type": "gemma4_text", "num_hidden_layers": 6, "attention_k_eq_v": True}
    report = checked(tmp_path, config | {"num_global_key_value_heads": 2})
    assert (report.supported, report.compared) == (True, True)
    assert report.layout == "5x4x256+256,1x2x512+512"


def test_a_context_limit_counts(tmp_path: Path) -> None:
    assert checked(tmp_path, FALCON_7B, max_model_len=2048).context == 2048
    assert checked(tmp_path, PHI3_128K, max_model_len=1000).context == 1000


def test_what_only_numbers_tell_is_left_open(tmp_path: Path) -> None:
    report = checked(tmp_path, {"model_type": "jetmoe"})  # which expert computes a query depends on the weights
    assert (report.supported, report.compared) == (True, True)
    assert (report.layout, report.token_bytes) == (None, None)


@pytest.mark.parametrize(
    ("config", "name", "reason"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "MambaForCausalLM", "recurrent"),
        ({"model_type": "rwkv"}, "unknown", "recurrent"),
        ({"model_type": "qwen3_next"}, "unknown", "recurrent"),
        (
            {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
            "T5ForConditionalGeneration",
            "T5ForConditionalGeneration of model type 't5' is not supported: it is an encoder-decoder",
        ),
        ({"model_type": "gemma3", "vision_config": {"hidden_size": 1}}, "unknown", "multimodal"),
        ({"model_type": "llama4_text"}, "Llama4ForCausalLM", "layer 0 is of type chunked_attention"),
        ({"model_type": "deepseek_v32"}, "DeepseekV32ForCausalLM", "layer 0 is of type indexed_attention"),
        ({"model_type": "gpt_neo"}, "GPTNeoForCausalLM", "(GPTNeoBlock) does not attend to KV by a pluggable"),
        ({"model_type": "odd", "auto_map": {"AutoConfig": "a.B"}}, "unknown", "only with --trust-remote-code"),
        ({"model_type": "llama", "hidden_size": "wide"}, "unknown", "cannot make sense of its config.json"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_cannot_run_is_named_with_the_reason(
    tmp_path: Path, config: dict[str, Any], name: str, reason: str
) -> None:
    report = checked(tmp_path, config)
    assert (report.supported, report.model_class) == (False, name)
    assert reason in (report.reason or "")


def test_an_architecture_that_ignores_positions_is_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = LlamaRotaryEmbedding.forward

    def by_row(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return stock(self, x, torch.arange(x.shape[1], device=x.device)[None])

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", by_row)
    assert "off the model's own" in (checked(tmp_path, LLAMA_405B).reason or "")


def test_the_command_says_yes_with_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["models", "check", str(tmp_path), "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(None, 1)[0] for line in lines] == [
        "model", "supported", "forward", "KV", "layout", "windows", "context", "chat",
    ]  # fmt: skip
    assert lines[0].endswith("(GptOssForCausalLM)")
    assert lines[2] == "forward    by the model's own code"
    assert lines[3] == "KV         98,304 bytes per token in float32, for 24 of 24 layers"
    assert lines[-1] == "chat       template present"


def test_the_command_says_no_with_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert main(["models", "check", str(tmp_path)]) == 1
    assert "supported  no\nreason     model type 'mamba' is not supported" in capsys.readouterr().out


def test_the_command_speaks_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PHI3_128K))
    assert main(["models", "check", str(tmp_path), "--json", "--max-model-len", "512"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["supported"], found["token_bytes"], found["context"]) == (True, 393_216, 512)
    assert found["chat_template"] is False


def test_a_folder_without_a_config_is_a_wrong_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "check", str(tmp_path)]) == 2
    assert "lacks config.json" in capsys.readouterr().err
