"""Text from tokens, piece by piece."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdq.errors import InvalidRequest
from pdq.messages import Message
from pdq.models.hf_tokenizer import HFTokenizer
from pdq.text import MANY_PENDING, ByteTokenizer, Detokenizer, Tokenizer, check_text
from tests.unit.small_models import byte_fallback, byte_level, write_tokenizer

TEXTS = {
    "ascii": "Paris is big.",
    "spaces": "  two, then\n\n three   four",
    "emoji": "a🙂b👩‍👩‍👧‍👦c🇫🇷",
    "cjk": "你好世界。",
    "combining": "e\u0301o\u0308u\u0304\u0323 नमस्ते",
    "nul": "a\x00b",
    "replacement": "a\ufffdb",
    "mixed": " é🙂 中 x",
}


class Counting:
    """A tokenizer that counts the tokens it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.encode_chat(messages)

    def decode(self, token_ids: Sequence[int]) -> str:
        self.decoded += len(token_ids)
        return self.tokenizer.decode(token_ids)


@pytest.fixture(params=["bytes", "byte_level", "byte_level_merges", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    backend = {
        "byte_level": byte_level(),
        # merges that cross the borders of characters: the last byte of one and the first of the next
        "byte_level_merges": byte_level((("Ġ", "i"), ("Ł", "ĺ"), ("½", "å"), ("s", "Ġi"))),
        "byte_fallback": byte_fallback(),
    }[request.param]
    return HFTokenizer(write_tokenizer(tmp_path, backend))


@pytest.fixture
def fallback(tmp_path: Path) -> HFTokenizer:
    return HFTokenizer(write_tokenizer(tmp_path, byte_fallback()))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(i) for i in ids]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_deltas_together_are_the_full_decode(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_no_delta_holds_part_of_a_character(tokenizer: Tokenizer) -> None:
    for text in ("🙂", "中", "é"):
        assert [p for p in pieces(tokenizer, tokenizer.encode("a" + text + "b")) if p] == ["a", text, "b"]


def test_a_character_comes_with_its_last_token() -> None:
    assert pieces(ByteTokenizer(), "🙂!".encode()) == ["", "", "", "🙂", "!"]


def test_a_space_before_a_word_is_kept(fallback: HFTokenizer) -> None:
    ids = [fallback._backend.token_to_id(t) for t in ("▁a", "▁b", "▁a")]
    assert pieces(fallback, ids) == ["a", " b", " a"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"a\xe4\xbdb", "a\ufffdb"),
        (b"\xf0\x9f\x99 \xf0\x9f\x99\x82", "\ufffd 🙂"),
        (b"\x80\x80\x80x", "\ufffd\ufffd\ufffdx"),
        (b"x\xff\xf0\x9f\x99\x82", "x\ufffd🙂"),
    ],
)
def test_invalid_bytes_in_the_middle_become_replacement_characters(data: bytes, text: str) -> None:
    assert "".join(pieces(ByteTokenizer(), data)) == text == ByteTokenizer().decode(data)


def test_an_incomplete_character_at_the_end_is_held_back() -> None:
    assert pieces(ByteTokenizer(), b"a\xf0\x9f\x99") == ["a", "", "", ""]


def test_an_invalid_byte_does_not_change_what_was_shown_before_it(fallback: HFTokenizer) -> None:
    byte = [fallback._backend.token_to_id(f"<0x{b:02X}>") for b in "中".encode()]
    bad = fallback._backend.token_to_id("<0xFF>")
    letter = fallback._backend.token_to_id("a")
    assert pieces(fallback, [*byte, bad, letter]) == ["", "", "中", "", "\ufffda"]


def test_random_bytes_give_the_full_decode_but_for_an_unfinished_end(tmp_path: Path) -> None:
    rng = random.Random(7)
    tokenizers: list[Tokenizer] = [ByteTokenizer(), HFTokenizer(write_tokenizer(tmp_path, byte_level()))]
    for round_ in range(400):
        weights = rng.choice([b"\xf0\x9f\x99\x82a", b"\xff\x80\xe4\xbd\xa0", bytes(range(256))])
        ids = [rng.choice(weights) for _ in range(rng.randrange(1, 120))]
        tokenizer = tokenizers[round_ % 2]
        full, shown = tokenizer.decode(ids), "".join(pieces(tokenizer, ids))
        assert full.startswith(shown)
        assert set(full[len(shown) :]) <= {"\ufffd"}
        assert len(full) - len(shown) <= MANY_PENDING


def test_endless_invalid_bytes_are_shown_and_cost_no_more_with_time() -> None:
    counting = Counting(ByteTokenizer())
    shown = "".join(pieces(counting, [0xFF] * 2000))
    assert 2000 - MANY_PENDING <= len(shown) <= 2000
    assert set(shown) == {"\ufffd"}
    assert counting.decoded < 2000 * 6 * MANY_PENDING


def test_endless_invalid_bytes_after_a_character_are_shown_too(fallback: HFTokenizer) -> None:
    counting = Counting(fallback)
    byte = [fallback._backend.token_to_id(f"<0x{b:02X}>") for b in "中".encode() + b"\xff" * 500]
    shown = "".join(pieces(counting, byte))
    assert shown[0] == "中"
    assert 500 - MANY_PENDING <= shown.count("\ufffd") <= 500
    assert counting.decoded < 500 * 12 * MANY_PENDING


def test_a_character_after_endless_invalid_bytes_is_whole() -> None:
    for bad in range(10, 40):
        data = b"\xff" * bad + "🙂!".encode()
        assert "".join(pieces(ByteTokenizer(), data)) == "\ufffd" * bad + "🙂!"


def test_endless_special_tokens_cost_no_more_with_time_and_keep_the_next_space(fallback: HFTokenizer) -> None:
    a, b = (fallback._backend.token_to_id(t) for t in ("▁a", "▁b"))
    counting = Counting(fallback)
    assert "".join(pieces(counting, [a, *[2] * 1000, b])) == "a b"
    assert counting.decoded < 1000 * 3 * MANY_PENDING


def test_byte_tokenizer_spells_a_conversation() -> None:
    ids = ByteTokenizer().encode_chat([Message("system", "S"), Message("user", "é")])
    assert bytes(ids).decode() == "system: S\nuser: é\nassistant:"


def test_byte_tokenizer_refuses_an_empty_conversation() -> None:
    with pytest.raises(InvalidRequest) as e:
        ByteTokenizer().encode_chat([])
    assert e.value.param == "messages"


def test_byte_tokenizer_leaves_special_tokens_out() -> None:
    assert ByteTokenizer().decode([104, 256, 105, 300]) == "hi"


def test_half_a_surrogate_pair_is_a_client_error_that_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt: U\+D83D at character 1 is half of a surrogate pair") as e:
        ByteTokenizer().encode("a\ud83d")
    assert e.value.param == "prompt"
    with pytest.raises(InvalidRequest) as e:
        ByteTokenizer().encode_chat([Message("user", "ok"), Message("user", "\udc00")])
    assert e.value.param == "messages.1.content"


def test_whole_surrogate_pairs_are_text() -> None:
    check_text("prompt", "🙂\x00\uffff")
