"""Settings: limits, precedence, and that a wrong value never becomes a default."""

from dataclasses import FrozenInstanceError, fields, replace
from typing import get_type_hints

import pytest

from pdq import config
from pdq.config import (
    DecodeSettings,
    GatewaySettings,
    ModelSettings,
    PrefillSettings,
    RedisSettings,
    ServeSettings,
    Settings,
    WorkerSettings,
    cache_folder,
    known_variables,
    number,
    parse_bytes,
)
from pdq.errors import ConfigError

ALL = [RedisSettings, ModelSettings, WorkerSettings, PrefillSettings, DecodeSettings, GatewaySettings, ServeSettings]


def wrong(text: str, cls: type[Settings] = ServeSettings, **values: object) -> None:
    with pytest.raises(ConfigError) as caught:
        cls.load({}, **values)
    assert caught.value.message == text


def test_an_option_beats_a_variable_and_a_variable_beats_the_default() -> None:
    environ = {"PDQ_PORT": "9000", "PDQ_HOST": "0.0.0.0"}
    settings = GatewaySettings.load(environ, port="9001")
    assert (settings.port, settings.host, settings.max_queued) == (9001, "0.0.0.0", 1024)


def test_an_option_that_was_not_given_leaves_the_variable() -> None:
    assert GatewaySettings.load({"PDQ_PORT": "9000"}, port=None).port == 9000


def test_an_empty_variable_counts_as_not_set() -> None:
    assert GatewaySettings.load({"PDQ_PORT": "", "PDQ_KV_URL": ""}) == GatewaySettings()


def test_text_becomes_the_type_of_the_field() -> None:
    environ = {"PDQ_THREADS": "2", "PDQ_LEASE_SECONDS": "1.5", "PDQ_MAX_MODEL_LEN": "4096", "PDQ_NAME": "w1"}
    settings = DecodeSettings.load(environ)
    assert (settings.threads, settings.lease_seconds, settings.max_model_len, settings.name) == (2, 1.5, 4096, "w1")
    assert type(settings.lease_seconds) is float


@pytest.mark.parametrize(("text", "flag"), [("1", True), ("True", True), ("on", True), ("0", False), ("no", False)])
def test_a_flag_has_words_for_yes_and_no(text: str, flag: bool) -> None:
    assert ModelSettings.load({"PDQ_TRUST_REMOTE_CODE": text}).trust_remote_code is flag


def test_a_flag_survives_the_way_to_a_child() -> None:
    settings = ServeSettings(trust_remote_code=True)
    assert ServeSettings.load(settings.environ()) == settings
    wrong("trust_remote_code: expected bool, got 'maybe'", trust_remote_code="maybe")


def test_a_whole_number_is_a_fine_float_but_keeps_the_type() -> None:
    assert type(DecodeSettings(lease_seconds=3).lease_seconds) is float


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("port: expected int, got 'x'", {"port": "x"}),
        ("port: expected int, got '80.5'", {"port": "80.5"}),
        ("port: expected int, got True", {"port": True}),
        ("port: expected int, got 8.0", {"port": 8.0}),
        ("port: must be at least 0, got -1", {"port": "-1"}),
        ("port: must be at most 65535, got 65536", {"port": "65536"}),
        ("lease_seconds: expected float, got ''", {"lease_seconds": ""}),
        ("lease_seconds: expected float, got nan", {"lease_seconds": "nan"}),
        ("lease_seconds: expected float, got inf", {"lease_seconds": "1e999"}),
        ("lease_seconds: expected float, got -inf", {"lease_seconds": float("-inf")}),
        ("lease_seconds: must be at least 0.5, got 0.4", {"lease_seconds": 0.4}),
        ("kv_ttl: must be at most 2592000, got 2592001.0", {"kv_ttl": "2592001"}),
        ("threads: must be at least 1, got 0", {"threads": "0"}),
        ("model: expected str, got 5", {"model": 5}),
        ("dtype: one of bfloat16, float16, float32 is wanted, got 'int8'", {"dtype": "int8"}),
        ("kv_miss: one of requeue, recompute, fail is wanted, got 'FAIL'", {"kv_miss": "FAIL"}),
        ("pool: letters, digits, - and _ are wanted, got 'a b'", {"pool": "a b"}),
        ("pool: letters, digits, - and _ are wanted, got ''", {"pool": ""}),
        ("pool: letters, digits, - and _ are wanted, got '-'", {"pool": "-"}),
        ("pool: letters, digits, - and _ are wanted, got 'a}:b'", {"pool": "a}:b"}),
        ("pool: letters, digits, - and _ are wanted, got 'ä'", {"pool": "ä"}),
        ("name: printable ASCII is wanted, got 'a\\nb'", {"name": "a\nb"}),
        ("name: printable ASCII is wanted, got ' '", {"name": " "}),
        ("redis_url: expected a URL such as redis://127.0.0.1:6379/0, got 'localhost:6379'",
         {"redis_url": "localhost:6379"}),
        ("kv_url: expected a URL such as redis://127.0.0.1:6379/0, got 'http://kv'", {"kv_url": "http://kv"}),
        ("kv_memory: expected a size such as 512MiB, got 'lots'", {"kv_memory": "lots"}),
        ("max_body: must be at least one byte, got '0'", {"max_body": "0"}),
        ("valkey_memory: expected a size such as 512MiB, got '50%'", {"valkey_memory": "50%"}),
        ("unknown setting prot", {"prot": 1}),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_in_one_line_that_names_the_setting(text: str, values: dict[str, object]) -> None:
    wrong(text, **values)


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^lease_seconds: expected float, got 1000"):
        WorkerSettings(lease_seconds=10**400)


def test_an_empty_redis_url_is_only_right_where_it_means_an_embedded_valkey() -> None:
    assert ServeSettings.load({}, redis_url="").redis_url == ""
    wrong("redis_url: expected a URL such as redis://127.0.0.1:6379/0, got ''", GatewaySettings, redis_url="")


@pytest.mark.parametrize("url", ["redis://h/1", "rediss://u:p@h:1/0", "unix:///run/valkey.sock"])
def test_every_form_of_redis_url_is_taken(url: str) -> None:
    assert RedisSettings.load({}, redis_url=url, kv_url=url).blocks_url == url


def test_blocks_go_to_the_queue_redis_unless_told_otherwise() -> None:
    assert RedisSettings(redis_url="redis://a").blocks_url == "redis://a"


def test_a_variable_with_a_typing_mistake_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError) as caught:
        RedisSettings.load({"PDQ_REDIS_ULR": "redis://a"})
    assert caught.value.message == "unknown variable PDQ_REDIS_ULR; did you mean PDQ_REDIS_URL?"


def test_an_unknown_variable_without_a_likeness_is_an_error_too() -> None:
    with pytest.raises(ConfigError) as caught:
        RedisSettings.load({"PDQ_ZZZZZZZZ": "1"})
    assert caught.value.message == "unknown variable PDQ_ZZZZZZZZ"


def test_variables_of_other_programs_and_of_the_system_are_no_mistake() -> None:
    assert RedisSettings.load({"PDQ_MAX_BATCH": "4", "PDQ_URL": "http://a", "PATH": "/bin"}) == RedisSettings()


@pytest.mark.parametrize("cls", ALL)
def test_every_setting_has_a_variable_that_every_program_knows(cls: type[Settings]) -> None:
    assert {config.env_name(f.name) for f in fields(cls)} <= known_variables()


@pytest.mark.parametrize("cls", ALL)
def test_every_setting_is_of_a_type_that_is_checked_and_has_a_sentence_of_help(cls: type[Settings]) -> None:
    hints = get_type_hints(cls)
    for f in fields(cls):
        assert hints[f.name] in (bool, str, int, float, str | None, int | None, float | None), f.name
        assert f.metadata["help"].endswith(".")


@pytest.mark.parametrize("cls", ALL)
def test_defaults_are_valid_and_survive_the_way_through_the_environment(cls: type[Settings]) -> None:
    assert cls.load(cls().environ()) == cls()


def test_settings_survive_the_way_through_the_environment() -> None:
    settings = DecodeSettings(
        redis_url="redis://h:1/2", threads=3, flush_ms=0.5, kv_memory="1GiB", model="a b", name="x", kv_miss="fail"
    )
    assert settings.environ()["PDQ_FLUSH_MS"] == "0.5"
    assert DecodeSettings.load(settings.environ()) == settings


def test_a_child_gets_exactly_these_settings_not_the_parents_variables() -> None:
    parent = {"PDQ_PORT": "9000", "PDQ_HOST": "0.0.0.0", "PDQ_LOG_LEVEL": "DEBUG", "PDQ_CACHE": "/c", "HOME": "/h"}
    settings = GatewaySettings.load(parent, port=8000, host="::1")
    child = settings.environ_of_child(parent)
    assert child == {"PDQ_HOST": "::1", "PDQ_LOG_LEVEL": "DEBUG", "PDQ_CACHE": "/c", "HOME": "/h"}
    assert GatewaySettings.load(child) == settings


def test_a_part_of_all_settings_keeps_the_values() -> None:
    every = ServeSettings(redis_url="redis://h", max_batch=7, port=1, chunk_tokens=64)
    assert every.part(DecodeSettings) == DecodeSettings(redis_url="redis://h", max_batch=7)
    assert every.part(PrefillSettings) == PrefillSettings(redis_url="redis://h", chunk_tokens=64)
    assert every.part(GatewaySettings) == GatewaySettings(redis_url="redis://h", port=1)


def test_settings_are_frozen_and_a_changed_copy_is_checked_again() -> None:
    settings = GatewaySettings()
    with pytest.raises(FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"^port: must be at most 65535"):
        replace(settings, port=70000)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 512 * 2**20), ("4 GiB", 4 * 2**30), ("1.5kb", 1500), ("2TB", 2 * 10**12), (" 7b ", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1GiB", "1.2.3", "1e3", "1 MiB 2", "nan", "9" * 400, "٣GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x: expected a size such as 512MiB, got "):
        parse_bytes("x", text)


def test_sizes_are_available_in_bytes() -> None:
    assert WorkerSettings(kv_memory="1KiB").kv_memory_bytes == 1024
    assert GatewaySettings(max_body="2KiB").max_body_bytes == 2048
    assert ServeSettings(valkey_memory="3KiB").valkey_memory_bytes == 3072
    assert ServeSettings().valkey_memory_bytes is None


def test_numbers_for_people() -> None:
    assert [number(v) for v in (3600.0, 2592000, 0.5, 0)] == ["3600", "2592000", "0.5", "0"]


def test_the_cache_folder_is_pdqs_own_or_below_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache_folder({"PDQ_CACHE": "/a", "XDG_CACHE_HOME": "/b"})) == "/a"
    assert str(cache_folder({"XDG_CACHE_HOME": "/b"})) == "/b/pdq"
    assert str(cache_folder({})) == "/home/somebody/.cache/pdq"
