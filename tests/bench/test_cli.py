"""`pdq bench` as a command: what it prints and writes, exit codes, and one line for each mistake."""

import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from aiohttp import web

import pdq
from pdq.bench.settings import BenchSettings
from pdq.cli import main
from tests.bench.conftest import WHOLE, FakeServer, stream
from tests.servers import free_port


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PDQ_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def bench(fake: FakeServer, *words: str) -> int:
    return main(["bench", "--url", fake.url, "--requests", "4", "--input-tokens", "5", *words])


async def _refuse(request: web.Request, body: object) -> web.StreamResponse:
    return web.json_response({"error": {"message": "we are closed"}}, status=503)


def test_the_result_is_all_there_is_off_a_terminal(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(fake, "--seed", "9", "--concurrency", "2") == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[:2] == [
        f"{fake.url}, model tiny, seed 9",
        "random: 5 words in, 128 tokens out; 2 at a time",
    ]
    assert "requests    4, none failed" in lines
    assert "tokens      12 out, 40 in" in lines
    assert "cache hits  40.0% of the input tokens" in lines
    assert [line.split()[0] for line in lines[-5:]] == ["ms", "TTFT", "TPOT", "ITL", "E2E"]


def test_a_new_seed_is_shown_and_can_be_given_again(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    seeds = []
    for more in ([], [], None):
        assert bench(fake, "--concurrency", "1", *(["--seed", seeds[0]] if more is None else more)) == 0
        found = re.search(r"seed (\d+)\n", capsys.readouterr().out)
        assert found is not None
        seeds.append(found[1])
    assert seeds[0] == seeds[2] != seeds[1]
    assert fake.prompts[:4] == fake.prompts[8:]
    assert not set(fake.prompts[:4]) & set(fake.prompts[4:8])


def test_json_is_the_summary_and_nothing_else(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(fake, "--json", "--slo", "ttft:60000, e2e:0.0001", "--rate", "1000", "--burst", "2") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert (found["model"], found["requests"], found["failed"], found["hit_ratio"]) == ("tiny", 4, 0, 0.4)
    assert found["goodput"] == {"limits": {"ttft": 60000.0, "e2e": 0.0001}, "met": 0, "share": 0.0, "rate": 0.0}
    assert set(found["ttft_ms"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    assert found["sent_late_ms"]["count"] == 4


def test_the_file_has_settings_summary_and_every_request(fake: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert bench(fake, "--save", str(path), "--api-key", "secret-key", "--concurrency", "1") == 0
    assert "secret-key" not in path.read_text()
    found = json.loads(path.read_text())
    assert found["pdq"] == pdq.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["started"])
    assert found["settings"]["input_tokens"] == 5
    assert found["settings"]["model"] == "tiny"
    assert type(found["settings"]["seed"]) is int
    assert set(BenchSettings().public()) == set(found["settings"])
    assert found["summary"]["succeeded"] == len(found["requests"]) == 4
    first = found["requests"][0]
    assert first["sent_ms"] == 0.0
    assert len(first["chunks_ms"]) == 3
    assert first["chunks_ms"][0] <= first["chunks_ms"][-1] <= first["e2e_ms"]
    assert (first["prompt_tokens"], first["cached_tokens"], first["completion_tokens"]) == (10, 4, 3)
    sent = [r["sent_ms"] for r in found["requests"]]
    assert sent == sorted(sent)


def test_histograms_on_the_terminal_need_no_package(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(fake, "--plot", "-") == 0
    out = capsys.readouterr().out
    assert "\nTTFT (ms, 4 values)\n" in out
    assert "\nITL (ms, 8 values)\n" in out


def test_all_failed_is_exit_code_1_with_the_reason(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.replies(_refuse)
    assert bench(fake) == 1
    out = capsys.readouterr().out
    assert "requests    4, 4 failed (http_503 4)\n" in out
    assert "http_503    we are closed\n" in out


def test_some_failed_is_exit_code_0(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    fake.replies(_refuse, lambda request, _: stream(request, WHOLE))
    assert bench(fake) == 0
    assert "requests    4, 1 failed (http_503 1)\n" in capsys.readouterr().out


def test_url_and_key_may_be_variables(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDQ_URL", fake.url + "/v1/")
    monkeypatch.setenv("OPENAI_API_KEY", "k2")
    monkeypatch.setenv("PDQ_MODEL", "a folder for pdq serve, no name")
    assert main(["bench", "--requests", "1"]) == 0
    assert (fake.keys, fake.paths, fake.asked[0]["model"]) == (["Bearer k2"], ["/v1/chat/completions"], "tiny")


def test_every_setting_is_an_option_with_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert main(["bench", "--help"]) == 0
    lines = capsys.readouterr().out.split("\n")
    for f in fields(BenchSettings):
        option = f"--{f.name.replace('_', '-')} "
        assert f.metadata["help"] in " ".join(line for line in lines if option in line), option
    text = "\n".join(lines)
    assert "--no-ignore-eos " in text
    assert set(re.findall(r"[(](?:PDQ|OPENAI)_[A-Z_]+", text)) == {"(PDQ_URL", "(OPENAI_API_KEY"}


def test_flags_and_numbers_reach_the_request(fake: FakeServer) -> None:
    assert bench(fake, "--no-ignore-eos", "--output-tokens", "7", "--temperature", "0.25", "--endpoint", "chat") == 0
    assert {a.get("ignore_eos", "none") for a in fake.asked} == {"none"}
    assert {(a["max_tokens"], a["temperature"]) for a in fake.asked} == {(7, 0.25)}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--concurrency 0", "concurrency: must be at least 1, got 0"),
        ("--rate 0", "rate: must be at least 0.001, got 0.0"),
        ("--rate fast", "rate: expected float, got 'fast'"),
        ("--requests -1", "requests: must be at least 1, got -1"),
        ("--shape round", "shape: one of random, shared-prefix, multi-turn, interference is wanted, got 'round'"),
        (
            "--rate 2 --concurrency 3",
            "rate: cannot be used together with --concurrency, which is the other kind of load",
        ),
        ("--burst 2", "burst: needs --rate"),
        ("--turns 5", "turns: only for --shape multi-turn"),
        ("--shape random --prefix-tokens 9", "prefix_tokens: only for --shape shared-prefix"),
        ("--shape multi-turn --endpoint completions", "endpoint: --shape multi-turn needs chat"),
        ("--slo itl:5", "slo: expected something like ttft:500,tpot:50,e2e:10000 (ms), got 'itl:5'"),
        ("--slo ttft:-1", "slo: expected something like ttft:500,tpot:50,e2e:10000 (ms), got 'ttft:-1'"),
        ("--url ftp://x", "url: expected something like http://127.0.0.1:8000, got 'ftp://x'"),
        ("--url http://x:y", "url: expected something like http://127.0.0.1:8000, got 'http://x:y'"),
        ("--json --plot -", "plot: - cannot be used together with --json"),
        ("--save /no/such/folder/x.json", "save: there is no folder /no/such/folder"),
        ("--plot /", "plot: / is a folder"),
        ("--api-key a\nb", "api_key: printable ASCII is wanted"),
    ],
)
def test_a_wrong_option_is_named_in_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split(" ")]) == 2
    assert capsys.readouterr() == ("", f"error: {line}\n")


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert main(["bench", "--url", url]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: no server answers at {url} (")
    assert err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_named_after_the_result(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert bench(fake, "--save", str(tmp_path / "x.json")) == 1
    out, err = capsys.readouterr()
    assert "requests    4, none failed" in out
    assert err == f"error: save: {tmp_path}/x.json could not be written: [Errno 28] No space left on device\n"


# ---- pictures ----


def test_without_matplotlib_a_picture_is_refused_before_anything_is_sent(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "matplotlib" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    assert bench(fake, "--plot", "x.png") == 2
    assert "plot: matplotlib is not installed: pip install 'pdq[plot]'" in capsys.readouterr().err
    assert fake.asked == []


def test_a_picture_is_drawn(fake: FakeServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench(fake, "--plot", str(tmp_path / "x.png")) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# ---- a terminal, and Ctrl-C ----


@pytest.fixture
def held(fake: FakeServer) -> threading.Event:
    """Set once the second request has come; it and all later ones get no answer."""
    asked = threading.Event()

    async def hold(request: web.Request, body: object) -> web.StreamResponse:
        asked.set()
        return await stream(request, [60.0])

    fake.replies(lambda request, _: stream(request, WHOLE), hold)
    return asked


@contextmanager
def started(fake: FakeServer, **streams: int) -> Iterator[subprocess.Popen[bytes]]:
    """`pdq bench`, which is gone after the block."""
    words = ["bench", "--url", fake.url, "--requests", "4", "--concurrency", "1"]
    with subprocess.Popen([sys.executable, "-m", "pdq", *words], **streams) as process:
        try:
            yield process
        finally:
            process.kill()


def test_ctrl_c_ends_the_load_and_shows_what_was_measured(fake: FakeServer, held: threading.Event) -> None:
    with started(fake, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert held.wait(30)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"requests    1, none failed\n" in out
    assert b"note        interrupted; requests that were running are not counted\n" in out
    assert err == b""


def test_a_terminal_gets_a_progress_bar(fake: FakeServer, held: threading.Event) -> None:
    ours, theirs = pty.openpty()
    with started(fake, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"1 of 4 requests" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        try:
            while piece := os.read(ours, 4096):
                shown += piece
        except OSError:
            pass  # how Linux says that the other end of a terminal is closed
        assert process.wait(30) == 130
    os.close(ours)
    assert b"1, none failed" in shown
