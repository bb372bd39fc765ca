"""The command line: options made from settings, one line for an error, exit codes, missing extras."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from pdq.cli import commands, main
from pdq.config import DecodeSettings, GatewaySettings, PrefillSettings, ServeSettings, Settings

COMMANDS: list[tuple[list[str], type[Settings]]] = [
    (["serve"], ServeSettings),
    (["gateway"], GatewaySettings),
    (["worker", "prefill"], PrefillSettings),
    (["worker", "decode"], DecodeSettings),
]


class Became(BaseException):
    """Stands for this process having become another program."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Where exec calls go; `main` ends with Became."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def execve(path: str, argv: list[str], env: dict[str, str]) -> None:
        assert path == argv[0]
        calls.append((argv, env))
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    for name in [n for n in os.environ if n.startswith("PDQ_")]:
        monkeypatch.delenv(name)
    return calls


def run(*words: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """`pdq words` as a process; `code` runs first in it."""
    start = f"{code}\nimport sys\nfrom pdq.cli import main\nsys.exit(main({list(words)!r}))"
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
    return subprocess.run(
        [sys.executable, "-c", start], capture_output=True, text=True, env=clean | env, timeout=30, check=False
    )


@pytest.mark.parametrize(("words", "cls"), COMMANDS)
def test_every_setting_is_an_option_with_its_variable_and_help(
    words: list[str], cls: type[Settings], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main([*words, "--help"]) == 0
    lines = capsys.readouterr().out.split("\n")
    for f in fields(cls):
        option = f"--{f.name.replace('_', '-')} "
        shown = " ".join(line for line in lines if option in line)
        assert f.metadata["help"] in shown, option
        assert re.search(rf"\(PDQ_{f.name.upper()}[,)]", shown), option


@pytest.mark.parametrize(("words", "cls"), COMMANDS)
def test_every_option_reaches_the_settings(
    words: list[str], cls: type[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(cls, "load", classmethod(lambda c, **values: seen.append(c) or seen.append(values) or c()))
    for name in ("_become", "_require"):
        monkeypatch.setattr(commands, name, lambda *_: None)
    monkeypatch.setattr("pdq.serve.run.run", lambda *_: 0)
    flags = {name for name, hint in get_type_hints(cls).items() if hint is bool}
    values = {f.name: True if f.name in flags else f"value of {f.name}" for f in fields(cls)}
    for name, value in values.items():
        words = [*words, f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else [])]
    assert main(words) == 0
    assert seen[-1] == values


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["gateway", "--port", "x"], "error: port: expected int, got 'x'"),
        (["serve", "--port", "70000"], "error: port: must be at most 65535, got 70000"),
        (["worker", "decode", "--kv-miss", "x"], "error: kv_miss: one of requeue, recompute, fail is wanted, got 'x'"),
        (["worker", "prefill", "--redis-url", "here"],
         "error: redis_url: expected a URL such as redis://127.0.0.1:6379/0, got 'here'"),
        (["serve", "a", "--model", "b"], "error: model: given twice, as an argument and with --model"),
        (["health", "valkey"], "error: health: one of gateway, prefill, decode is wanted, got 'valkey'"),
        (["chat", "--url", "here"], "error: url: expected something like http://127.0.0.1:8000, got 'here'"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line_and_exit_code_2(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", line + "\n")


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["serve", "--prot", "1"], r"error: No such option: --prot .*--port.* \(see pdq serve --help\)\n"),
        (["sreve"], r"error: No such command 'sreve'.* \(see pdq --help\)\n"),
        (["gateway", "--port"], r"error: Option '--port' requires an argument.* \(see pdq.* --help\)\n"),
        (["gateway", "extra"], r"error: Got unexpected extra argument.*extra.* \(see pdq gateway --help\)\n"),
        (["chat", "--seed", "x"], r"error: Invalid value for '--seed': .* \(see pdq chat --help\)\n"),
        (["health"], r"error: Missing argument .* \(see pdq health --help\)\n"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    words: list[str], pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert re.fullmatch(pattern, capsys.readouterr().err)


def test_a_wrong_variable_is_named_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDQ_PROT", "1")
    assert main(["gateway"]) == 2
    assert capsys.readouterr().err == "error: unknown variable PDQ_PROT; did you mean PDQ_PORT?\n"


@pytest.mark.parametrize("words", [[], ["worker"]])
def test_without_a_command_the_help_is_shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "Usage: pdq" in capsys.readouterr().out


def test_the_gateway_command_becomes_the_program_with_exactly_these_settings(
    became: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDQ_PORT", "9000")
    monkeypatch.setenv("PDQ_POOL", "p")
    with pytest.raises(Became):
        main(["gateway", "--port", "8000", "--model", "some folder"])
    [(argv, env)] = became
    assert argv == [sys.executable, "-m", "pdq.gateway"]
    assert {k: v for k, v in env.items() if k.startswith("PDQ_")} == {"PDQ_POOL": "p", "PDQ_MODEL": "some folder"}
    assert env["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize("words", [["b"], ["--model", "b"]])
def test_a_model_on_the_command_line_beats_the_variable(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("PDQ_MODEL", "a")
    monkeypatch.setattr("pdq.serve.run.run", lambda settings, _: seen.append(settings.model) or 0)
    assert main(["serve", *words]) == 0
    assert main(["serve"]) == 0
    assert seen == ["b", "a"]


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_worker_command_becomes_the_stages_program(
    stage: str, became: list[tuple[list[str], dict[str, str]]]
) -> None:
    with pytest.raises(Became):
        main(["worker", stage, "--engine", "scripted:step_ms=1", "--threads", "2"])
    [(argv, env)] = became
    assert argv[1:] == ["-m", f"pdq.workers.{stage}"]
    assert (env["PDQ_ENGINE"], env["PDQ_THREADS"]) == ("scripted:step_ms=1", "2")


def test_exit_codes_of_a_worker_are_its_own() -> None:
    done = run("worker", "decode", "--engine", "scripted:nonsense=1")
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("engine: bad part 'nonsense=1' of a scripted engine")


@pytest.mark.parametrize(
    ("missing", "words", "line"),
    [
        ("typer", ["serve"], "error: typer is not installed: pip install 'pdq[serve]'"),
        ("rich", ["serve", "--engine", "scripted"], "error: rich is not installed: pip install 'pdq[serve]'"),
        ("aiohttp", ["serve"], "error: aiohttp is not installed: pip install 'pdq[serve]'"),
        ("aiohttp", ["gateway"], "error: aiohttp is not installed: pip install 'pdq[gateway]'"),
        ("torch", ["worker", "decode"], "error: torch is not installed: pip install 'pdq[worker]'"),
        ("torch", ["serve"], "error: torch is not installed: pip install 'pdq[serve]'"),
        ("xxhash", ["worker", "prefill", "--engine", "scripted"],
         "error: xxhash is not installed: pip install 'pdq[worker]'"),
    ],
)  # fmt: skip
def test_a_missing_extra_is_named_in_one_line(missing: str, words: list[str], line: str) -> None:
    done = run(*words, code=f"import sys; sys.modules[{missing!r}] = None")
    assert (done.stdout, done.stderr) == ("", line + "\n")
    assert done.returncode == 2


def test_a_scripted_worker_needs_no_torch(became: list[tuple[list[str], dict[str, str]]]) -> None:
    sys_torch = sys.modules.get("torch", ...)
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(Became):
            main(["worker", "prefill", "--engine", "scripted"])
    finally:
        del sys.modules["torch"]
        if sys_torch is not ...:
            sys.modules["torch"] = sys_torch  # type: ignore[assignment]
    assert len(became) == 1


def test_the_console_script_itself_loads_neither_torch_nor_aiohttp_nor_transformers() -> None:
    code = (
        "import atexit, json, sys\n"
        "heavy = ('torch', 'aiohttp', 'transformers')\n"
        "atexit.register(lambda: print(json.dumps([m for m in heavy if m in sys.modules])))"
    )
    done = run("serve", "--help", code=code)
    assert json.loads(done.stdout.rstrip().split("\n")[-1]) == []


def test_a_traceback_is_shown_with_debug_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateway", "--port", "x"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    for words in (["--debug", "gateway", "--port", "x"], ["gateway", "--port", "x", "--debug"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith("Traceback")
        assert error.endswith("error: port: expected int, got 'x'\n")


def test_a_bug_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("it\nbroke")

    monkeypatch.setattr(commands, "_require", broken)
    assert main(["gateway"]) == 1
    assert capsys.readouterr().err == "error: internal error: ZeroDivisionError: it broke (--debug shows where)\n"


def test_ctrl_c_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_require", interrupted)
    assert main(["gateway"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m pdq serve --help | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stderr == ""


def test_output_that_is_no_terminal_has_no_colours() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("start", [["-m", "pdq"], [str(Path(sys.executable).with_name("pdq"))]])
def test_each_way_to_start_it_prints_the_version(start: list[str]) -> None:
    argv = start if start[0] != "-m" else [sys.executable, *start]
    done = subprocess.run([*argv, "version"], capture_output=True, text=True, timeout=30, check=True)
    assert re.fullmatch(r"pdq \d+\.\d+\.\d+\n", done.stdout)
