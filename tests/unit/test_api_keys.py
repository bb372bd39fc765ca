"""API keys: the file's format, whose a key is, and that a changed file counts while a broken one does not."""

import logging
import os
from pathlib import Path

import pytest

from pdq.api_keys import ApiKeys, any_key, read
from pdq.config import GatewaySettings, ServeSettings
from pdq.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_line_is_a_key_or_a_tenant_and_a_key(file: Path) -> None:
    file.write_text("# all\n\nacme sk-1  # the first\nacme:sk-2:x\n\tbolt\tsk-3\nsk-4#5\n")
    found = read(file)
    assert list(found) == ["sk-1", "sk-2:x", "sk-3", "sk-4#5"]
    assert list(found.values())[:3] == ["acme", "acme", "bolt"]


def test_a_key_without_a_tenant_is_one_of_its_own_which_does_not_show_it(file: Path) -> None:
    file.write_text("sk-1\nsk-2\n")
    one, two = read(file).values()
    assert one != two
    assert one.startswith("key:")
    assert "sk-1" not in one
    assert ApiKeys("sk-1").tenant("sk-1") == one  # whichever way a gateway was given it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"acme sk-1 extra", "line 1: a key, or a tenant and a key, is wanted"),
        (b"ok\n:sk-secret", "line 2: a key, or a tenant and a key, is wanted"),
        (b"acme:", "line 1: a key, or a tenant and a key, is wanted"),
        ("sk-sécret".encode(), "line 1: a key, or a tenant and a key, is wanted"),
        (b"a sk-secret\nb sk-secret", "line 2: a key of two tenants"),
        (b"# nothing\n\n", "holds no keys"),
        (b"", "holds no keys"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_a_broken_file_is_refused_by_line_without_a_word_of_it(file: Path, text: bytes, words: str) -> None:
    file.write_bytes(text)
    with pytest.raises(ConfigError) as caught:
        ApiKeys(file=str(file))
    assert caught.value.message == f"api_keys_file: {file}: {words}"


def test_a_file_that_is_not_there_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiKeys(file=str(file))
    assert caught.value.message == f"api_keys_file: {file}: No such file or directory"


def test_without_keys_none_is_needed() -> None:
    keys = ApiKeys()
    assert (keys.required, keys.from_file, keys.tenant("anything")) == (False, False, None)


def test_a_single_key_and_a_file_count_together(file: Path) -> None:
    file.write_text("acme sk-1\nacme sk-both\n")
    keys = ApiKeys("sk-both", str(file))
    assert keys.required
    assert keys.tenant("sk-1") == keys.tenant("sk-both") == "acme"
    assert ApiKeys("sk-2", str(file)).tenant("sk-2") not in (None, "acme")


@pytest.mark.parametrize("given", ["", "sk-", "sk-11", "SK-1", " sk-1", "sk-1\n", "acme", "acme sk-1", "\udcff", "é"])
def test_nothing_but_the_key_itself_is_taken(file: Path, given: str) -> None:
    file.write_text("acme sk-1\n")
    assert ApiKeys(file=str(file)).tenant(given) is None


def test_a_changed_file_counts_at_the_next_look(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write_text("acme sk-1\n")
    keys = ApiKeys(file=str(file))
    keys.refresh()
    assert caplog.messages == []
    file.write_text("acme sk-2\nbolt sk-3\n")
    keys.refresh()
    assert [keys.tenant(k) for k in ("sk-1", "sk-2", "sk-3")] == [None, "acme", "bolt"]
    assert caplog.messages == ["api_keys_file: read again, 2 keys"]


def test_a_file_put_in_the_place_of_another_counts_whatever_its_time(file: Path, tmp_path: Path) -> None:
    file.write_text("acme sk-1\n")
    keys = ApiKeys(file=str(file))
    new = tmp_path / "new"
    new.write_text("acme sk-2\n")
    os.utime(new, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    new.replace(file)
    keys.refresh()
    assert (keys.tenant("sk-1"), keys.tenant("sk-2")) == (None, "acme")


@pytest.mark.parametrize("text", ["", "a b sk-secret\n", None])
def test_a_file_that_broke_or_went_leaves_the_keys_and_is_logged_once(
    file: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("acme sk-1\n")
    keys = ApiKeys(file=str(file))
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    keys.refresh()
    keys.refresh()
    assert keys.tenant("sk-1") == "acme"
    [line] = caplog.messages
    assert line.startswith(f"api_keys_file: {file}: ")
    assert line.endswith("; the keys read before stay valid")
    assert "sk-secret" not in line
    file.write_text("acme sk-2\n")
    keys.refresh()
    assert (keys.tenant("sk-1"), keys.tenant("sk-2")) == (None, "acme")


def test_a_file_is_read_again_on_demand_though_it_looks_the_same(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write_text("acme sk-1\n")
    keys = ApiKeys(file=str(file))
    keys.forget()
    keys.refresh()
    assert caplog.messages == ["api_keys_file: read again, 1 keys"]


def test_some_key_for_those_who_have_the_settings(file: Path) -> None:
    assert any_key(None, None) is None
    file.write_text("acme sk-1\nacme sk-2\n")
    assert any_key(None, str(file)) == "sk-1"
    assert any_key("sk-3", str(file)) == "sk-3"


@pytest.mark.parametrize("key", ["", " ", "a b", "é", "a\n", "a\tb"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GatewaySettings(api_key=key)
    assert caught.value.message == "api_key: printable ASCII without blanks is wanted"


def test_settings_do_not_show_the_key_but_hand_it_on_to_the_gateway_alone() -> None:
    settings = ServeSettings(api_key="sk-secret", redis_url="redis://h")
    assert "sk-secret" not in repr(settings)
    assert settings.part(GatewaySettings).environ_of_child({})["PDQ_API_KEY"] == "sk-secret"
