"""GGUF files become model folders that compute what the original computes; what is not understood is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.numpy import load_file

from pdq.errors import ConfigError, ModelNotFound, ModelUnsupported
from pdq.messages import Message
from pdq.models import converted, find_model, gguf
from pdq.models.checkpoint import check_supported, context_limit, eos_token_ids, missing_part
from pdq.models.hf_tokenizer import HFTokenizer
from tests.unit.small_models import byte_alphabet

Array = np.ndarray[Any, Any]
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS = 4, 2, 16, 64, 2
TOKENS = [*byte_alphabet(), "<|start|>", "<|end|>", "<think>", "ĠĠ", "12"]
KINDS = [1] * 256 + [3, 3, 4, 1, 1]
START, END, THINK = 256, 257, 258
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}<|start|>"
HF_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def original(kind: str, **changed: Any) -> Any:
    """A small random model of transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        kind, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, vocab_size=len(TOKENS), max_position_embeddings=512,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, initializer_range=0.3,
        bos_token_id=START, eos_token_id=END, **changed,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def interleaved(weight: Array, heads: int) -> Array:
    """As llama.cpp's converter stores q and k of "llama" models."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model: Any, kind: str) -> dict[str, Array]:
    """The model's tensors under their GGUF names."""
    names = {hf: own for own, hf in HF_NAMES.items()}
    found = {}
    for hf_name, weight in model.state_dict().items():
        if hf_name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                found["output.weight"] = weight.numpy()
            continue
        stem, _, end = hf_name.removeprefix("model.").rpartition(".")
        layer, prefix = "", ""
        if stem.startswith("layers."):
            _, layer, stem = stem.split(".", 2)
            prefix = f"blk.{layer}."
        own = names[stem]
        value = weight.numpy()
        if kind == "llama" and own in ("attn_q", "attn_k"):
            value = interleaved(value, HEADS if own == "attn_q" else KV_HEADS)
        found[f"{prefix}{own}.{end}"] = value
    return found


def write(
    path: Path,
    kind: str,
    tensors: dict[str, Array],
    *,
    quantized: GGMLQuantizationType | None = None,
    change: Callable[[GGUFWriter], None] = lambda _: None,
    pre: str = "smollm",
) -> Path:
    """A GGUF file; matrices are stored as `quantized`, if given. change: adds further keys."""
    writer = GGUFWriter(path, kind)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types(KINDS)
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    change(writer)
    for name, value in tensors.items():
        if quantized is not None and value.ndim > 1:
            writer.add_tensor(name, quantize(value, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(source: Path) -> Path:
    folder = source.with_suffix("")
    folder.mkdir()
    gguf.convert(source, folder, lambda _: None)
    return folder


def refusal(source: Path) -> str:
    with pytest.raises(ModelUnsupported) as e:
        convert(source)
    return e.value.message


def logits(model: Any) -> Array:
    import torch

    with torch.no_grad():
        found: Array = model(torch.tensor([[1, 50, 100, 257, 9, 9, 30, 200]])).logits.numpy()
    return found


def loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
    ids=["llama tied", "llama", "llama biased", "qwen2", "qwen3"],
)
def test_the_converted_model_computes_what_the_original_does(
    tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    model = original(kind, **changed)
    folder = convert(write(tmp_path / "m.gguf", kind, tensors_of(model, kind)))
    assert np.array_equal(logits(loaded(folder)), logits(model))
    assert missing_part(folder) is None
    check_supported(folder)
    assert context_limit(folder, None) == 512
    assert eos_token_ids(folder) == {END}


def test_llama_3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    model = original("llama")
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**model.config.to_dict(), "rope_parameters": rope})
    scaled = AutoModelForCausalLM.from_config(config).eval()
    scaled.load_state_dict(model.state_dict())
    plain = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = (plain / scaled.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(divisors.round(3))) > 2
    tensors = {"rope_freqs.weight": divisors, **tensors_of(model, "llama")}
    folder = convert(write(tmp_path / "m.gguf", "llama", tensors))
    assert json.loads((folder / "config.json").read_text())["rope_parameters"] == rope
    tensors["rope_freqs.weight"] = divisors[::-1].copy()
    assert "rope_freqs are not those of Llama 3" in refusal(write(tmp_path / "other.gguf", "llama", tensors))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_quantised_weights_are_stored_as_unpacked(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    tensors = tensors_of(original("llama"), "llama")
    stored = load_file(convert(write(tmp_path / "m.gguf", "llama", tensors, quantized=kind)) / "model.safetensors")
    down = dequantize(quantize(tensors["blk.1.ffn_down.weight"], kind), kind)
    assert stored["model.layers.1.mlp.down_proj.weight"].dtype == np.float32
    assert np.array_equal(stored["model.layers.1.mlp.down_proj.weight"], down)
    query = dequantize(quantize(tensors["blk.0.attn_q.weight"], kind), kind)
    assert np.array_equal(interleaved(stored["model.layers.0.self_attn.q_proj.weight"], HEADS), query)
    assert np.array_equal(stored["model.norm.weight"], tensors["output_norm.weight"])


def test_a_big_tensor_is_converted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(
        tmp_path / "m.gguf", "llama", tensors_of(original("llama"), "llama"), quantized=GGMLQuantizationType.Q8_0
    )
    whole = (convert(source) / "model.safetensors").read_bytes()
    monkeypatch.setattr(gguf, "CHUNK_BYTES", 1000)
    (tmp_path / "m").rename(tmp_path / "first")
    assert (convert(source) / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize(
    ("kind", "dtype"), [(GGMLQuantizationType.F16, "float16"), (GGMLQuantizationType.BF16, "bfloat16")]
)
def test_half_precision_is_kept_as_it_is(tmp_path: Path, kind: GGMLQuantizationType, dtype: str) -> None:
    tensors = tensors_of(original("llama"), "llama")
    folder = convert(write(tmp_path / "m.gguf", "llama", tensors, quantized=kind))
    model = loaded(folder)
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
    expected = dequantize(quantize(tensors["blk.1.ffn_up.weight"], kind), kind)
    assert np.array_equal(model.model.layers[1].mlp.up_proj.weight.detach().numpy(), expected)
    query = interleaved(model.model.layers[0].self_attn.q_proj.weight.detach().numpy(), HEADS)
    assert np.array_equal(query, dequantize(quantize(tensors["blk.0.attn_q.weight"], kind), kind))


def test_weights_of_a_big_model_are_rounded_to_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(gguf, "WIDE_BYTES", 1)
    tensors = tensors_of(original("llama"), "llama")
    folder = convert(write(tmp_path / "m.gguf", "llama", tensors))
    stored = loaded(folder).state_dict()
    up = torch.from_numpy(tensors["blk.0.ffn_up.weight"])
    assert torch.equal(stored["model.layers.0.mlp.up_proj.weight"], up.to(torch.bfloat16).float())
    assert np.array_equal(stored["model.norm.weight"].numpy(), tensors["output_norm.weight"])


def test_the_tokenizer_splits_text_as_the_file_says(tmp_path: Path) -> None:
    tensors = tensors_of(original("llama"), "llama")
    digits = HFTokenizer(convert(write(tmp_path / "a.gguf", "llama", tensors)))
    assert digits.encode("12") == [ord("1"), ord("2")]
    assert digits.encode("<|start|>a<think>") == [START, 97, THINK]
    assert digits.decode([START, 97, THINK, END]) == "a<think>"
    assert digits.encode_chat([Message("user", "a")]) == [START, 97, END, START]
    assert digits.eos_id == END


@pytest.mark.parametrize(
    ("pre", "text", "split"),
    [
        ("smollm", "a  12 b", ["a", "ĠĠ", "1", "2", "Ġb"]),
        ("gpt-2", "a  12 b", ["a", "Ġ", "Ġ12", "Ġb"]),
        ("llama-bpe", "a1234\n\nb", ["a", "123", "4", "ĊĊ", "b"]),
        ("qwen2", "a123 It's", ["a", "1", "2", "3", "ĠIt", "'s"]),
    ],
)
def test_each_split_is_the_one_its_merges_were_learned_with(pre: str, text: str, split: list[str]) -> None:
    from pdq.models.gguf_tokenizer import byte_level

    meta = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": []}
    assert [part for part, _ in byte_level(meta).pre_tokenizer.pre_tokenize_str(text)] == split


@pytest.mark.parametrize(("flag", "pre", "first"), [(None, "smollm", []), (True, "smollm", [START]),
                                                   (None, "llama-bpe", [START]), (False, "llama-bpe", [])])  # fmt: skip
def test_prompts_begin_with_bos_when_the_file_says_so(flag: bool | None, pre: str, first: list[int]) -> None:
    from pdq.models.gguf_tokenizer import byte_level

    meta = {
        "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": START, "tokenizer.ggml.token_type": KINDS,
    }  # fmt: skip
    if flag is not None:
        meta["tokenizer.ggml.add_bos_token"] = flag
    assert byte_level(meta).encode("a").ids == [*first, 97]


def test_a_sentencepiece_file_is_converted_too(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "▁ab"]

    def change(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([0.0] * 259 + [-5.0, -4.0, -4.5, -1.0, -2.0])
        writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    source = tmp_path / "m.gguf"
    tensors = tensors_of(original("llama"), "llama")
    tensors["token_embd.weight"] = np.ones((len(pieces), HIDDEN), dtype=np.float32)
    writer_without_gpt2(source, tensors, change)
    tokenizer = HFTokenizer(convert(source))
    assert tokenizer.encode("ab a") == [1, pieces.index("▁ab"), pieces.index("▁a")]
    assert tokenizer.decode(tokenizer.encode("ab é🙂")) == "ab é🙂"
    assert tokenizer.eos_id == 2


def writer_without_gpt2(path: Path, tensors: dict[str, Array], change: Callable[[GGUFWriter], None]) -> None:
    """`write`, with the tokenizer's keys left to `change` alone."""

    def only(writer: GGUFWriter) -> None:
        for key in [k for k in writer.kv_data[0] if k.startswith("tokenizer.")]:
            del writer.kv_data[0][key]
        change(writer)

    write(path, "llama", tensors, change=only)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.attention.sliding_window", 8, "llama.attention.sliding_window is not understood"),
        ("llama.rope.dimension_count", 8, "rotary"),
        ("split.count", 2, "split file"),
    ],
)
def test_keys_that_change_the_computation_are_refused(tmp_path: Path, key: str, value: int, reason: str) -> None:
    tensors = tensors_of(original("llama"), "llama")
    source = write(tmp_path / "m.gguf", "llama", tensors, change=lambda w: w.add_uint32(key, value))
    assert reason in refusal(source)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(original("llama"), "llama")
    assert "'gemma2' and not one of llama, qwen2, qwen3" in refusal(write(tmp_path / "m.gguf", "gemma2", tensors))


def test_a_text_split_that_is_not_known_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(original("llama"), "llama")
    assert "text split 'brandnew'" in refusal(write(tmp_path / "m.gguf", "llama", tensors, pre="brandnew"))


def test_missing_and_unknown_tensors_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(original("llama"), "llama")
    extra = write(tmp_path / "a.gguf", "llama", tensors | {"blk.0.ffn_gate_inp.weight": np.ones((4, 4), np.float32)})
    assert "blk.0.ffn_gate_inp.weight has no place" in refusal(extra)
    del tensors["blk.1.ffn_up.weight"]
    assert "blk.1.ffn_up.weight is missing" in refusal(write(tmp_path / "b.gguf", "llama", tensors))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "m.gguf", "llama", tensors_of(original("llama"), "llama"))
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"takes 0\.\d GB, .* has 0\.0 GB free"):
        convert(source)
    assert not (tmp_path / "m" / "model.safetensors").exists()


# --- through find_model, in a process of its own


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_gguf_file_is_converted_once_and_found_by_its_content(tmp_path: Path, cache: Path) -> None:
    tensors = tensors_of(original("llama"), "llama")
    source = write(tmp_path / "my model.gguf", "llama", tensors)
    said: list[str] = []
    found = find_model(str(source), say=said.append)
    assert found.name == "my model"
    assert found.folder.parent == cache
    assert said == ["converting my model.gguf to safetensors (once)"]
    assert missing_part(found.folder) is None
    assert find_model(str(source), say=pytest.fail) == found
    source.rename(tmp_path / "moved.gguf")
    assert find_model(str(tmp_path / "moved.gguf"), served_model_name="x").name == "x"
    tensors["output_norm.weight"] = tensors["output_norm.weight"] + 1
    assert find_model(str(write(source, "llama", tensors))).folder != found.folder
    assert not list(cache.glob("*.partial"))


def test_progress_is_told(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "TELL_SECONDS", 0.0)
    source = write(tmp_path / "m.gguf", "llama", tensors_of(original("llama"), "llama"))
    (tmp_path / "m").mkdir()
    told: list[str] = []
    gguf.convert(source, tmp_path / "m", told.append)
    assert told[-1] == "100 % converted"
    assert told == sorted(told, key=lambda line: int(line.split()[0]))


def test_a_refused_gguf_file_keeps_its_reason_across_processes(tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path / "m.gguf", "gemma2", tensors_of(original("llama"), "llama"))
    with pytest.raises(ModelUnsupported, match="its architecture is 'gemma2'"):
        find_model(str(source))
    assert list(cache.glob("m-*[0-9a-f]")) == []


@pytest.mark.parametrize("cut", [0, 3, 20, 5_000, 60_000])
def test_a_file_that_is_no_gguf_or_cut_short_is_a_config_error(tmp_path: Path, cache: Path, cut: int) -> None:
    whole = write(tmp_path / "m.gguf", "llama", tensors_of(original("llama"), "llama"))
    source = tmp_path / "cut.gguf"
    source.write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(ConfigError, match=r"cannot convert cut\.gguf: "):
        find_model(str(source))


def test_a_gguf_file_that_is_not_there_is_model_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"there is no file .*x\.gguf"):
        find_model(str(tmp_path / "x.gguf"))


def test_a_conversion_that_dies_says_how(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "m.gguf", "llama", tensors_of(original("llama"), "llama"))
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho progress 1\necho cause >&2\nkill -9 $$\n")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    with pytest.raises(ConfigError, match=r"ended with status -9: cause"):
        find_model(str(source))


def test_a_change_of_the_conversion_makes_the_model_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"x" * 100)
    before = converted._content_key(tmp_path / "f")
    monkeypatch.setattr(converted, "CONVERSION", converted.CONVERSION + 1)
    assert converted._content_key(tmp_path / "f") != before


def test_the_content_key_covers_every_byte_of_a_small_file(tmp_path: Path) -> None:
    data = bytearray(300_000)
    found = set()
    for at in (None, 0, 65_536, 150_000, 299_999):
        if at is not None:
            data[at] ^= 1
        (tmp_path / "f").write_bytes(data)
        found.add(converted._content_key(tmp_path / "f"))
    assert len(found) == 5
    assert all(len(key) == len(hashlib.sha256().hexdigest()) for key in found)
