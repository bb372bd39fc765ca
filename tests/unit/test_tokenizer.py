"""The model's own tokenizer and its chat template, against transformers where that is the measure."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from pdq.errors import ConfigError, InvalidRequest, ModelUnsupported
from pdq.messages import Message
from pdq.models.hf_tokenizer import HFTokenizer
from tests.unit.small_models import SPECIAL, byte_fallback, byte_level, write_json, write_tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif %}
    {%- if loop.first and system is defined %}
        {{- '[INST] <<SYS>>' + system + '<</SYS>> ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}
"""
ELABORATE = """
{% set ns = namespace(turns=0) %}
{% if tools is not none or documents is not none %}no{% endif %}
{% for message in messages %}
    {% if message.name is defined %}{{ message.name }}: {% endif %}
    {% if ns.turns >= 3 %}{% break %}{% endif %}
    {% generation %}
    {{ message | tojson }} {{ {"b": [1, "é<"], "a": none} | tojson(indent=1, sort_keys=true) }}
    {% endgeneration %}
    {% set ns.turns = ns.turns + 1 %}
{% endfor %}
{{ strftime_now("%Y") }} {{ dict(a=1).a }} {{ unk_token is defined }} {{ ns.turns }}
"""
CONVERSATIONS = [
    [Message("user", "What is the capital of France?")],
    [Message("system", " Be brief. "), Message("user", "Hi\n 🙂 <b>&amp;"), Message("assistant", "中"),
     Message("user", "")],
    [Message("user", "<|im_end|> a\x00b '\"\\", "Eve"), Message("assistant", "2"), Message("user", "3"),
     Message("assistant", "4"), Message("user", "5")],
]  # fmt: skip


def load(folder: Path, template: str | None = None, tokenizer: Tokenizer | None = None, **config: Any) -> HFTokenizer:
    return HFTokenizer(write_tokenizer(folder, tokenizer, template, **config))


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def refusal(tokenizer: HFTokenizer, *messages: Message) -> str:
    with pytest.raises(InvalidRequest) as e:
        tokenizer.encode_chat(messages)
    assert e.value.param == "messages"
    return e.value.message


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, ELABORATE], ids=["chatml", "alternating", "elaborate"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "system", "name"])
def test_chats_are_encoded_as_transformers_does(tmp_path: Path, template: str, messages: list[Message]) -> None:
    found = load(tmp_path, template, bos_token={"__type": "AddedToken", "content": "<|im_start|>"}).encode_chat(
        messages
    )
    plain = [{"role": m.role, "content": m.content} | ({"name": m.name} if m.name else {}) for m in messages]
    assert found == reference(tmp_path).apply_chat_template(plain, add_generation_prompt=True)["input_ids"]
    assert len(found) > 10


@pytest.mark.parametrize("text", ["", "a", "  two  ", "é🙂中", "a\x00b", "<|im_start|>x<|im_end|>", "\n\n1. 22"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"add_bos_token": False, "bos_token": "<|im_start|>"},
        {"add_bos_token": True},
    ],
    ids=["by file", "bos", "no bos", "bos without a token"],
)
@pytest.mark.parametrize("in_file", [False, True])
def test_prompts_are_encoded_as_transformers_does(
    tmp_path: Path, text: str, config: dict[str, Any], in_file: bool
) -> None:
    backend = byte_level()
    if in_file:
        backend.post_processor = processors.TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", backend.token_to_id("<|end|>"))]
        )
    tokenizer = load(tmp_path, None, backend, **config)
    assert tokenizer.encode(text) == reference(tmp_path)(text)["input_ids"]
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_a_prompt_of_nothing_is_no_token_without_bos_and_bos_with_it(tmp_path: Path) -> None:
    assert load(tmp_path / "a").encode("") == []
    assert load(tmp_path / "b", tokenizer=byte_fallback()).encode("")[0] == 1


def test_special_tokens_in_a_prompt_are_tokens_and_are_not_shown(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert ids == [257, ord("h"), ord("i"), 258]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.eos_id == 258
    assert tokenizer.vocab_size == 256 + len(SPECIAL)


def test_decoding_leaves_spaces_before_punctuation_alone(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode("a , b . do n't")) == "a , b . do n't"


def test_token_ids_the_tokenizer_does_not_know_are_no_text(tmp_path: Path) -> None:
    assert load(tmp_path).decode([ord("a"), 50_000, ord("b")]) == "ab"


def test_the_bytes_of_all_tokens_together_are_those_of_the_text(tmp_path: Path) -> None:
    text = "ab é🙂 中\n\x00\ufffd<|im_end|>  x"
    merges = (("Ã", "©"), ("a", "b"), ("ð", "Ł"))  # é, ab, and the first half of an emoji
    for name, backend in (("plain", byte_level()), ("merged", byte_level(merges))):
        tokenizer = load(tmp_path / name, tokenizer=backend)
        ids = tokenizer.encode(text)
        for _ in range(2):  # the second time they are remembered
            assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()
    assert tokenizer.token_bytes(ids[-1]) == b"x"
    assert tokenizer.token_bytes(258) == b"<|im_end|>"
    assert tokenizer.token_bytes(50_000) == b""


def test_the_bytes_of_sentencepiece_tokens_keep_blanks_that_decoding_drops(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, tokenizer=byte_fallback())
    ids = tokenizer.encode("a b é🙂c")
    assert [tokenizer.token_bytes(i) for i in ids[:3]] == [b"<s>", b" a", b" b"]
    assert b"".join(tokenizer.token_bytes(i) for i in ids[1:]) == " a b é🙂c".encode()


def test_truncation_and_padding_saved_in_the_file_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert load(tmp_path, None, backend).encode("abcdefgh") == [*b"abcdefgh"]


def test_a_template_refuses_with_its_own_sentence(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, ALTERNATING, bos_token="<|end|>")
    sentence = "Conversation roles must alternate user/assistant/user/assistant/..."
    assert refusal(tokenizer, Message("user", "a"), Message("user", "b")) == sentence


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].nothing.more }}", "{{ 'a' + messages[99] }}", "{{ 1 / 0 }}", "{{ [] | first | upper + none }}"],
)
def test_a_template_that_fails_is_a_client_error(tmp_path: Path, template: str) -> None:
    assert refusal(load(tmp_path, template), Message("user", "a")).startswith("the model's chat template failed: ")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_a_template_gets_nowhere_beyond_its_messages(tmp_path: Path, template: str) -> None:
    assert "template failed" in refusal(load(tmp_path, template), Message("user", "a"))


def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert refusal(tokenizer, Message("user", "a")) == "this model has no chat template; use a plain completion"
    assert tokenizer.encode("a") == [97]


def test_a_broken_template_leaves_plain_completions_alone(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{% for m in messages %}")
    assert "chat template is broken" in refusal(tokenizer, Message("user", "a"))
    assert tokenizer.encode("a") == [97]


def test_an_empty_conversation_is_refused(tmp_path: Path) -> None:
    assert refusal(load(tmp_path, CHATML)) == "messages: must not be empty"


def test_the_template_file_goes_before_the_one_in_the_config(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None, "config")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert HFTokenizer(tmp_path).encode_chat([Message("user", "a")]) == [*b"file"]


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    assert load(tmp_path, chat_template=named).encode_chat([Message("user", "a")]) == [*b"plain"]


def test_special_tokens_named_in_the_older_file_are_found(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, None, "{{ bos_token }}x{{ eos_token }}", eos_token="<|end|>")
    write_json(
        tmp_path / "special_tokens_map.json", {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>"}
    )
    assert HFTokenizer(tmp_path).encode_chat([Message("user", "a")]) == [257, ord("x"), 256]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([Message("user", "a\ud83d")], "messages.0.content"),
        ([Message("user", "ok"), Message("\ude00", "x")], "messages.1.role"),
        ([Message("user", "ok", "\ud800")], "messages.0.name"),
    ],
)
def test_half_a_surrogate_pair_names_its_field(tmp_path: Path, messages: list[Message], param: str) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair") as e:
        load(tmp_path, CHATML).encode_chat(messages)
    assert e.value.param == param


def test_half_a_surrogate_pair_in_a_prompt_names_the_prompt(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as e:
        load(tmp_path).encode("\ud83d")
    assert e.value.param == "prompt"


def test_many_threads_get_the_same_answers(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, CHATML)
    wrong: list[int] = []

    def work(n: int) -> None:
        text = f"thread {n} " * 20
        chat = [*b"user\n", *text.encode(), 258]
        for _ in range(50):
            if tokenizer.encode(text) != [*text.encode()] or tokenizer.decode([*text.encode()]) != text:
                wrong.append(n)
            if tokenizer.encode_chat([Message("user", text)])[1 : 1 + len(chat)] != chat:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_folder_with_vocabulary_files_only_still_works(tmp_path: Path) -> None:
    letters = list(byte_level().get_vocab())
    write_json(tmp_path / "vocab.json", {word: i for i, word in enumerate(letters)})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
    write_json(tmp_path / "config.json", {"model_type": "gpt2"})
    tokenizer = HFTokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("a b🙂")) == "a b🙂"
    assert tokenizer.encode("ab") == [letters.index("a"), letters.index("b")]


def test_a_tokenizer_that_exists_in_python_only_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "vocab.json", {"<unk>": 0, "<pad>": 1, "a": 2})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>"})
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    write_json(tmp_path / "config.json", {"model_type": "ctrl"})
    with pytest.raises(ModelUnsupported, match="exists in Python only"):
        HFTokenizer(tmp_path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        HFTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        HFTokenizer(tmp_path)
    for content in ("{", "[]", "\udcff"):
        (tmp_path / "tokenizer_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
            HFTokenizer(tmp_path)
