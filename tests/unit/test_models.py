"""Finding a model, and what its folder says."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pdq import models
from pdq.config import ModelSettings
from pdq.errors import ConfigError, InvalidRequest, ModelNotFound, PdqError, Unavailable
from pdq.messages import Message
from pdq.models import (
    BUILT_IN,
    check_supported,
    context_limit,
    eos_token_ids,
    find_model,
    load_tokenizer,
)
from pdq.models.hf_tokenizer import HFTokenizer
from pdq.text import ByteTokenizer
from tests.unit.small_models import hub_copy, write_json, write_model, write_tokenizer


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every hub look-up goes to an empty cache and no hub, unless the test brings its own."""
    if "real_model" in request.keywords:
        return
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("PDQ_CACHE", str(tmp_path / "cache"))


# --- imports


def test_finding_models_and_tokenizing_load_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    program = """
import sys
import pdq.models, pdq.models.hf_tokenizer
from pdq.models import *
folder = find_model(sys.argv[1]).folder
check_supported(folder), context_limit(folder, None), eos_token_ids(folder)
fingerprint(folder, dtype="bfloat16", block_size=32)
assert load_tokenizer("torch", folder).encode("a") == [97]
print([name for name in ("torch", "transformers", "numpy", "aiohttp") if name in sys.modules])
"""
    command = [sys.executable, "-c", program, str(tmp_path / "m")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


# --- folders and files


def test_the_default_of_the_settings_is_the_built_in_model() -> None:
    assert ModelSettings().model == BUILT_IN


def test_a_folder_is_taken_as_it_is_and_gives_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_model(tmp_path / "my-model")
    assert find_model(str(folder)) == models.ModelFiles("my-model", folder)
    assert find_model(str(folder), served_model_name="other").name == "other"
    monkeypatch.chdir(folder)
    assert find_model(".") == models.ModelFiles("my-model", folder)


@pytest.mark.parametrize("part", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_part_says_which(tmp_path: Path, part: str) -> None:
    folder = write_model(tmp_path / "m")
    (folder / part).unlink()
    with pytest.raises(ConfigError, match=f"lacks .*{part.removeprefix('model')}"):
        find_model(str(folder))


def test_pickled_weights_do_not_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled weights are not read"):
        find_model(str(folder))


def test_a_part_of_split_weights_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    write_json(folder / "model.safetensors.index.json", index)
    with pytest.raises(ConfigError, match=r"lacks model-2\.safetensors"):
        find_model(str(folder))


def test_a_tokenizer_needs_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert find_model(str(folder), tokenizer_only=True).folder == folder


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c", "", "bad name", "x.gguf"])
def test_a_path_that_leads_nowhere_is_model_not_found(name: str) -> None:
    with pytest.raises(ModelNotFound, match="there is no f"):
        find_model(name) if name else find_model("/x" + name)


def test_a_scripted_engine_needs_no_model() -> None:
    assert isinstance(load_tokenizer("scripted:step=1", None), ByteTokenizer)
    assert isinstance(load_tokenizer("scripted", None), ByteTokenizer)


def test_a_real_engine_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a model folder"):
        load_tokenizer("torch", None)
    assert isinstance(load_tokenizer("torch", write_tokenizer(tmp_path)), HFTokenizer)


# --- the hub


class Hub:
    """A model hub of one's own: answers every request with `status` after `delay` seconds."""

    def __init__(self, status: int, headers: dict[str, str], delay: float = 0.0) -> None:
        outer = self
        self.asked: list[str] = []
        self.release = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.release.wait(delay)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_HEAD = do_GET  # noqa: N815  the interface of http.server

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


def download_from(url: str) -> PdqError:
    with pytest.raises(PdqError) as e:
        models._download("org/model", lambda _: None, False, endpoint=url)
    return e.value


def test_a_complete_copy_in_the_hub_cache_is_used_without_the_hub(tmp_path: Path) -> None:
    folder = hub_copy(tmp_path / "hub", "org/model")
    assert find_model("org/model") == models.ModelFiles("org/model", folder)


def test_a_copy_without_weights_in_the_hub_cache_is_no_copy(tmp_path: Path) -> None:
    folder = hub_copy(tmp_path / "hub", "org/model")
    (folder / "model.safetensors").unlink()
    assert find_model("org/model", tokenizer_only=True).folder == folder
    with pytest.raises(Unavailable, match="the hub does not answer"):
        find_model("org/model")


def test_a_hub_that_refuses_connections_fails_at_once_in_clear_words() -> None:
    start = time.monotonic()
    with pytest.raises(Unavailable, match=r"org/model is no folder here .* and the hub does not answer: ConnectError"):
        find_model("org/model")
    assert time.monotonic() - start < 5


def test_a_model_the_hub_does_not_have_is_model_not_found() -> None:
    hub = Hub(404, {"X-Error-Code": "RepoNotFound"})
    try:
        fault = download_from(hub.url)
    finally:
        hub.close()
    assert isinstance(fault, ModelNotFound)
    assert "org/model is no folder here" in fault.message
    assert hub.asked[0].startswith("/api/models/org/model")


def test_a_hub_in_trouble_is_unavailable() -> None:
    hub = Hub(503, {})
    try:
        fault = download_from(hub.url)
    finally:
        hub.close()
    assert isinstance(fault, Unavailable)


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "HUB_SECONDS", 1.0)
    hub = Hub(200, {}, delay=30)
    start = time.monotonic()
    try:
        fault = download_from(hub.url)
    finally:
        hub.close()
    assert isinstance(fault, Unavailable)
    assert 0.4 < time.monotonic() - start < 5


def test_a_hub_whose_name_look_up_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "HUB_SECONDS", 0.2)
    release = threading.Event()

    class Api:
        def model_info(self, model: str, *, timeout: float) -> None:
            release.wait(30)

    try:
        with pytest.raises(Unavailable, match=r"no answer within 0\.2 s"):
            models._ask(Api(), "org/model")  # type: ignore[arg-type]
    finally:
        release.set()


def test_a_download_that_breaks_off_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_ask", lambda api, model: None)
    hub = Hub(500, {})
    try:
        fault = download_from(hub.url)
    finally:
        hub.close()
    assert isinstance(fault, Unavailable)
    assert "broke off" in fault.message


# --- the real thing


@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_the_built_in_model_is_found_and_speaks_its_own_format(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    found = find_model(BUILT_IN, say=said.append)
    assert found.name == "smollm2-135m-instruct"
    check_supported(found.folder)
    assert context_limit(found.folder, None) == 8192
    assert 2 in eos_token_ids(found.folder)
    tokenizer = load_tokenizer("torch", found.folder)
    ids = tokenizer.encode_chat([Message("user", "What is the capital of France?")])
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    user = [4093, 198, 1780, 314, 260, 3575, 282, 4649, 47]
    assert ids == [1, *system, 2, 198, 1, *user, 2, 198, 1, 520, 9531, 198]
    # Digits stand alone and whitespace before them stays together, as the merges were learned.
    assert tokenizer.encode("\n\n1. x  12") == [1116, 33, 30, 1792, 256, 33, 34]
    assert tokenizer.decode([504, 3575, 282, 4649, 314, 7042, 30, 2]) == "The capital of France is Paris."
    with pytest.raises(InvalidRequest):
        tokenizer.encode("\ud800")
