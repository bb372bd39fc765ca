"""What a model folder says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from pdq.errors import ConfigError, ModelUnsupported
from pdq.models import check_supported, context_limit, eos_token_ids, fingerprint
from pdq.models.checkpoint import WHOLE_FILE_BYTES, causal_lm_classes
from pdq.models.hf_tokenizer import HFTokenizer
from tests.unit.small_models import LLAMA, write_json, write_model, write_tokenizer, write_weights


def fp(folder: Path, **changed: Any) -> bytes:
    return fingerprint(folder, **{"dtype": "bfloat16", "block_size": 32} | changed)


# --- what a folder says


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, r"'t5' .*encoder-decoder"),
        ({"model_type": "mamba"}, r"'mamba' .*recurrent"),
        ({"model_type": "qwen3_next"}, r"'qwen3_next' .*recurrent or linear-attention"),
        (
            {"model_type": "recurrent_gemma", "block_types": ["recurrent", "recurrent", "attention"]},
            r"layer 0 is 'recu",
        ),
        ({"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]}, r"layer 1 is 'mamba'"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]}, r"layer 1 is 'linear_att"),
        ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]}, r"layer 0 is 'chunked_attention'"),
        ({"model_type": "lfm2", "conv_L_cache": 3}, r"conv_L_cache"),
        ({"model_type": "unheard", "ssm_state_size": 3}, r"ssm_state_size"),
        ({"model_type": "gemma3", "vision_config": {"a": 1}}, r"multimodal \(vision_config\)"),
        ({"model_type": "qwen2_audio", "audio_config": {"a": 1}}, r"multimodal \(audio_config\)"),
        ({"model_type": "unheard", "auto_map": {"AutoConfig": "x.y"}}, r"auto_map"),
        ({"model_type": "unheard"}, r"'unheard' .*transformers has no causal language model"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, r"BertForMaskedLM has no causal"),
        ({"model_type": None}, r"'None'"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_reason(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    write_json(tmp_path / "config.json", config)
    with pytest.raises(ModelUnsupported, match=reason):
        check_supported(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gemma2", "layer_types": ["sliding_attention", "full_attention"], "text_config": None},
        {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2, "mamba_d_state": 128},
        {"model_type": "phi3", "auto_map": {"AutoConfig": "x.y"}, "architectures": ["Phi3ForCausalLM"]},
        {"model_type": "qwen3"},
    ],
)
def test_attention_models_are_supported(tmp_path: Path, config: dict[str, Any]) -> None:
    write_json(tmp_path / "config.json", config)
    check_supported(tmp_path)


def test_the_table_of_causal_models_is_the_one_transformers_uses() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_lm_classes() == dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"])
def test_the_context_is_what_the_config_says(tmp_path: Path, key: str) -> None:
    write_json(tmp_path / "config.json", {key: 128})
    assert context_limit(tmp_path, None) == 128
    assert context_limit(tmp_path, 100) == 100
    assert context_limit(tmp_path, 128) == 128
    with pytest.raises(ConfigError, match="max_model_len: 129 is more than the model's context of 128 tokens"):
        context_limit(tmp_path, 129)


def test_a_model_without_a_context_limit_needs_one(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"max_position_embeddings": None})
    assert context_limit(tmp_path, 64) == 64
    with pytest.raises(ConfigError, match="max_model_len"):
        context_limit(tmp_path, None)


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_longrope_ends_the_context_where_it_would_turn_all_positions(tmp_path: Path, name: str) -> None:
    write_json(
        tmp_path / "config.json",
        LLAMA | {"original_max_position_embeddings": 64, "rope_scaling": {name: "longrope", "long_factor": [2.0]}},
    )
    assert context_limit(tmp_path, None) == 64
    with pytest.raises(ConfigError, match="context of 64"):
        context_limit(tmp_path, 65)


def test_code_in_the_repository_is_an_obstacle_unless_it_is_trusted(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": "unheard", "auto_map": {"AutoConfig": "x.y"}})
    with pytest.raises(ModelUnsupported, match="only with --trust-remote-code"):
        check_supported(tmp_path)
    check_supported(tmp_path, trust_remote_code=True)
    write_json(tmp_path / "config.json", {"model_type": "unheard"})
    with pytest.raises(ModelUnsupported, match="no causal language model"):
        check_supported(tmp_path, trust_remote_code=True)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 400),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 20}, 128),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 100}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 128),
    ],
)
def test_yarn_stretches_the_context(tmp_path: Path, rope: dict[str, Any], limit: int) -> None:
    write_json(tmp_path / "config.json", {"max_position_embeddings": 128, "rope_scaling": rope})
    assert context_limit(tmp_path, None) == limit


def test_end_tokens_are_gathered_from_all_files(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token="<|im_end|>")
    write_json(tmp_path / "config.json", {"eos_token_id": 7})
    assert eos_token_ids(tmp_path) == {7, 258}
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [1, 2]})
    assert eos_token_ids(tmp_path) == {1, 2, 7, 258}


def test_end_tokens_may_be_missing_or_strange(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == frozenset()
    write_json(tmp_path / "config.json", {"eos_token_id": [None, True, "3", 4]})
    assert eos_token_ids(tmp_path) == {4}


def test_the_tokenizers_end_token_is_found_in_its_plain_vocabulary_too(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token={"content": "a"})
    assert eos_token_ids(tmp_path) == {HFTokenizer(tmp_path).eos_id} == {97}


# --- fingerprints


def test_the_same_bytes_in_another_folder_have_the_same_fingerprint(tmp_path: Path) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two")
    changed = {"_name_or_path": "/x", "transformers_version": "9", "torch_dtype": "float16", "architectures": ["X"]}
    write_json(two / "config.json", dict(reversed((LLAMA | changed).items())))
    assert fp(one) == fp(two)
    assert len(fp(one)) == 32


def test_a_fingerprint_does_not_change_between_runs_of_python(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    program = (
        "import sys; from pathlib import Path; from pdq.models import fingerprint;"
        "print(fingerprint(Path(sys.argv[1]), dtype='bfloat16', block_size=32).hex())"
    )
    for seed in ("1", "2"):
        command = [sys.executable, "-c", program, str(folder)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == fp(folder).hex()


@pytest.mark.parametrize(
    "changed",
    [{"rope_parameters": {"rope_theta": 1.0}}, {"quantization_config": {"bits": 4}}, {"num_hidden_layers": 3}],
)
def test_what_changes_the_computation_changes_the_fingerprint(tmp_path: Path, changed: dict[str, Any]) -> None:
    one, two = write_model(tmp_path / "one"), write_model(tmp_path / "two", **changed)
    assert fp(one) != fp(two)


def test_dtype_and_block_size_change_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    assert len({fp(folder), fp(folder, dtype="float32"), fp(folder, block_size=16)}) == 3


def test_one_changed_weight_of_a_small_model_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    before = fp(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["w1"][3, 7] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    assert fp(folder) != before


def test_a_fine_tune_of_any_one_tensor_of_a_big_file_changes_the_fingerprint(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    write_weights(path, rows=50_000, tensors=6)
    assert path.stat().st_size > WHOLE_FILE_BYTES
    found = {fp(folder)}
    for name in list(load_file(path)):
        tensors = load_file(path)
        tensors[name] = tensors[name] + 1e-6
        save_file(tensors, path)
        found.add(fp(folder))
    assert len(found) == 7


def test_a_big_file_is_sampled_and_not_read(tmp_path: Path) -> None:
    """50 GB of holes: reading them would take far longer than this test may."""
    folder = write_model(tmp_path / "m")
    size, count = 50 * 10**9, 500
    step = size // count
    header = json.dumps(
        {f"w{i}": {"dtype": "U8", "shape": [step], "data_offsets": [i * step, (i + 1) * step]} for i in range(count)}
    ).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    start = time.monotonic()
    fp(folder)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("head", [b"\xff" * 8, (10**9).to_bytes(8, "little"), (9).to_bytes(8, "little") + b'{"a": 1} '])
def test_a_big_file_that_is_no_safetensors_is_a_config_error(tmp_path: Path, head: bytes) -> None:
    folder = write_model(tmp_path / "m")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(head)
        file.truncate(WHOLE_FILE_BYTES + 1)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        fp(folder)


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors file"):
        fp(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_broken_config_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for ask in (check_supported, eos_token_ids, fp, lambda folder: context_limit(folder, None)):
        with pytest.raises(ConfigError, match=r"config\.json"):
            ask(tmp_path)
