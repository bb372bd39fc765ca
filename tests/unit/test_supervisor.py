"""The supervisor with small children: output, restarts, stopping, and that no child outlives its parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pdq.errors import ConfigError, Unavailable
from pdq.serve.supervisor import Output, Program, Restarts, Supervisor, ending, sentence

QUICK = Restarts(first=0.01, limit=0.05, healthy=60.0, tries=4)
FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile 1: signal.pause()"
)


def program(code: str, name: str = "child", **changes: object) -> Program:
    return Program(name=name, argv=(sys.executable, "-S", "-c", code), **changes)  # type: ignore[arg-type]


class Lines(list[tuple[str, str]]):
    """What was said, and a way to wait for it."""

    def __call__(self, name: str, line: str) -> None:
        self.append((name, line))

    def of(self, name: str = "child") -> list[str]:
        return [line for n, line in self if n == name]

    async def until(self, done: Callable[[list[str]], bool], name: str = "child") -> list[str]:
        async with asyncio.timeout(10):
            while not done(self.of(name)):
                await asyncio.sleep(0.005)
        return self.of(name)


@asynccontextmanager
async def supervised(restarts: Restarts = QUICK) -> AsyncIterator[tuple[Supervisor, Lines]]:
    lines = Lines()
    supervisor = Supervisor(lines, restarts)
    try:
        yield supervisor, lines
    finally:
        await supervisor.kill()


async def running(supervisor: Supervisor, name: str = "child") -> int:
    """The process id of a child, which may print before its parent has noted that it started."""
    async with asyncio.timeout(10):
        while (pid := supervisor.pid(name)) is None:
            await asyncio.sleep(0.005)
    return pid


def alive(pid: int) -> bool:
    """Is there such a process that is not a zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


async def test_every_line_of_a_child_arrives_under_its_name() -> None:
    code = (
        "import os; os.write(1, b'one\\ntw'); os.write(1, b'o\\n\\n')\n"
        "os.write(2, b'err\\r\\n10%\\r20%\\n\\xff\\nno newline'); os._exit(2)"
    )
    async with supervised() as (supervisor, lines):
        supervisor.start(program(code, "decode-1"))
        await supervisor.failed
    assert lines.of("decode-1") == ["one", "two", "err", "20%", "\ufffd", "no newline"]


async def test_output_without_line_ends_is_cut_not_collected() -> None:
    async with supervised() as (supervisor, lines):
        supervisor.start(program("import os; f = os.fdopen(1, 'wb'); f.write(b'x' * 300_000); f.flush(); os._exit(2)"))
        await supervisor.failed
    assert "".join(lines.of()) == "x" * 300_000
    assert len(lines.of()) > 1


async def test_a_child_that_dies_is_started_again_with_growing_pauses() -> None:
    async with supervised(Restarts(first=0.01, limit=0.05, tries=100)) as (supervisor, lines):
        supervisor.start(program("import sys; sys.exit(3)"))
        said = await lines.until(lambda said: len(said) >= 5)
    assert said[:5] == [
        f"ended with exit code 3; starting again in {s} s" for s in ("0.01", "0.02", "0.04", "0.05", "0.05")
    ]


async def test_a_healthy_life_makes_the_next_pause_short_again() -> None:
    async with supervised(Restarts(first=0.01, limit=10.0, healthy=0.0, tries=100)) as (supervisor, lines):
        supervisor.start(program("import sys; sys.exit(1)"))
        said = await lines.until(lambda said: len(said) >= 4)
    assert said[:4] == ["ended with exit code 1; starting again in 0.01 s"] * 4


async def test_a_child_that_ends_without_an_error_is_started_again_too() -> None:
    async with supervised() as (supervisor, lines):
        supervisor.settled = True
        supervisor.start(program("pass"))
        said = await lines.until(lambda said: len(said) >= 2)
    assert said[0] == "ended with exit code 0; starting again in 0.01 s"


async def test_a_killed_child_is_started_again_and_the_reason_is_told() -> None:
    async with supervised() as (supervisor, lines):
        supervisor.start(program(FOREVER))
        await lines.until(lambda said: said == ["up"])
        pid = await running(supervisor)
        os.kill(pid, signal.SIGKILL)
        said = await lines.until(lambda said: said.count("up") == 2)
        assert said[1] == "was killed by SIGKILL (out of memory?); starting again in 0.01 s"
        assert await running(supervisor) != pid


async def test_a_wrong_setting_ends_the_start_with_the_childs_own_words() -> None:
    code = "import sys; print('2026-01-01 10:00:00,123 E dtype: no such thing', file=sys.stderr); sys.exit(2)"
    async with supervised() as (supervisor, lines):
        supervisor.start(program(code))
        error = await supervisor.failed
        assert isinstance(error, ConfigError)
        assert error.message == "dtype: no such thing"
        assert supervisor.pid("child") is None
    assert len(lines.of()) == 1


async def test_a_wrong_setting_after_the_start_is_a_death_like_others() -> None:
    async with supervised() as (supervisor, lines):
        supervisor.settled = True
        supervisor.start(program("import sys; sys.exit(2)"))
        await lines.until(lambda said: len(said) >= QUICK.tries + 2)
        assert not supervisor.failed.done()


async def test_a_child_that_never_comes_up_ends_the_start() -> None:
    async with supervised() as (supervisor, lines):
        supervisor.start(program("raise MemoryError('no room')"))
        error = await supervisor.failed
    assert isinstance(error, Unavailable)
    assert error.message == "MemoryError: no room"
    assert sum("starting again" in line for line in lines.of()) == QUICK.tries - 1


async def test_a_silent_death_is_told_by_its_exit_code() -> None:
    async with supervised() as (supervisor, _):
        supervisor.start(program("import sys; sys.exit(2)", "gateway"))
        assert (await supervisor.failed).message == "gateway ended with exit code 2"


async def test_a_program_that_cannot_be_started_ends_the_start() -> None:
    async with supervised() as (supervisor, _):
        supervisor.start(program("pass", cwd=Path("/nowhere")))
        error = await supervisor.failed
    assert isinstance(error, ConfigError)
    assert error.message.startswith("child cannot be started: ")


async def test_stop_lets_a_child_finish() -> None:
    code = (
        "import signal, time\n"
        "def end(*_):\n"
        "    print('finishing', flush=True); time.sleep(0.1); print('finished', flush=True); raise SystemExit\n"
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\nwhile 1: signal.pause()"
    )
    async with supervised() as (supervisor, lines):
        supervisor.start(program(code))
        await lines.until(lambda said: said == ["up"])
        assert await supervisor.stop("child", 10.0) is True
        assert lines.of() == ["up", "finishing", "finished"]
        assert supervisor.pid("child") is None


async def test_stop_kills_a_child_that_does_not_listen_and_its_descendants() -> None:
    code = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-S', '-c', {FOREVER!r}]).pid, flush=True)\n"
    )
    async with supervised() as (supervisor, lines):
        supervisor.start(program(code + STUBBORN))
        said = await lines.until(lambda said: said.count("up") == 2)
        grandchild = next(int(line) for line in said if line != "up")
        assert alive(grandchild)
        assert await supervisor.stop("child", 0.05) is False
        assert gone(grandchild)


async def test_stop_between_two_lives_returns_at_once() -> None:
    async with supervised(Restarts(first=60.0)) as (supervisor, lines):
        supervisor.start(program("import sys; sys.exit(1)"))
        await lines.until(lambda said: len(said) == 1)
        began = time.monotonic()
        assert await supervisor.stop("child", 30.0) is True
        assert time.monotonic() - began < 5.0


async def test_stop_while_a_child_is_being_made_is_not_lost() -> None:
    async with supervised() as (supervisor, _):
        supervisor.start(program(FOREVER))
        await asyncio.sleep(0)
        assert await supervisor.stop("child", 10.0) is True
        assert supervisor.pid("child") is None


async def test_stop_of_a_child_that_was_never_started_is_no_fault() -> None:
    async with supervised() as (supervisor, _):
        assert await supervisor.stop("gateway", 1.0) is True


async def test_kill_ends_all_at_once() -> None:
    async with supervised() as (supervisor, lines):
        for name in ("a", "b"):
            supervisor.start(program(STUBBORN, name))
            await lines.until(lambda said: said == ["up"], name)
        pids = [await running(supervisor, name) for name in ("a", "b")]
        began = time.monotonic()
        await supervisor.kill()
        assert time.monotonic() - began < 5.0
        assert not any(alive(pid) for pid in pids)


async def test_children_lead_their_own_session_so_that_a_terminals_ctrl_c_spares_them() -> None:
    async with supervised() as (supervisor, lines):
        supervisor.start(program("import os; print(os.getsid(0) == os.getpid() == os.getpgid(0)); raise SystemExit(2)"))
        await supervisor.failed
    assert lines.of() == ["True"]


async def test_a_child_reads_an_empty_stdin_and_runs_where_and_with_what_it_was_told(tmp_path: Path) -> None:
    code = (
        "import os, sys; print(sys.stdin.read() == '', os.getcwd(), os.environ['X'], os.environ.get('HOME'))\n"
        "sys.exit(2)"
    )
    async with supervised() as (supervisor, lines):
        supervisor.start(program(code, cwd=tmp_path, env={"X": "1"}))
        await supervisor.failed
    assert lines.of() == [f"True {tmp_path} 1 None"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_children_do_not_outlive_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pdq.serve.supervisor import Output, Program, Supervisor\n"
        f"CODE = 'import os; print(os.getpid());' + {STUBBORN!r}\n"
        "async def main():\n"
        "    s = Supervisor(lambda name, line: print(line, flush=True))\n"
        "    for name in ('a', 'b'):\n"
        "        s.start(Program(name=name, argv=(sys.executable, '-S', '-c', CODE)))\n"
        "    await s.failed\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline().strip() for _ in range(4)]
        pids = [int(line) for line in lines if line != "up"]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        parent.kill()
        parent.wait()
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("code", "words"),
    [(0, "ended with exit code 0"), (-signal.SIGSEGV, "was killed by SIGSEGV"), (-60, "was killed by signal 60")],
)
def test_endings_in_words(code: int, words: str) -> None:
    assert ending(code) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2026-11-29 17:00:00,123 E port: taken", "port: taken"),
        ("error: port: taken", "port: taken"),
        ("port: taken", "port: taken"),
        ("2026 was a year", "2026 was a year"),
    ],
)
def test_the_sentence_in_a_log_line(line: str, words: str) -> None:
    assert sentence(line) == words


async def cancelled_in_every_moment_after(trigger: Callable[[], None], start: Callable[[], asyncio.Task[None]]) -> int:
    """Cancel the task 0, 1, 2, ... turns of the loop after `trigger`, until that is too late; how often it was not."""
    for turns in range(20):
        task = start()
        for _ in range(3):
            await asyncio.sleep(0)  # it waits
        trigger()
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            return turns
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled(), f"the cancel after {turns} turns was lost"
    raise AssertionError("the task does not end")


async def test_a_cancel_that_comes_as_a_pipe_closes_is_not_lost() -> None:
    output = Output(lambda _: None)

    def start() -> asyncio.Task[None]:
        nonlocal output
        output = Output(lambda _: None)
        return asyncio.create_task(output.rest())

    assert await cancelled_in_every_moment_after(lambda: output.connection_lost(None), start) > 0
