"""The gateway as a process: loading, draining, signals, exit codes, and what it may import."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import pytest

from pdq.config import GatewaySettings
from pdq.errors import ConfigError
from pdq.gateway import server
from pdq.gateway.context import Served
from pdq.messages import Event
from pdq.text import ByteTokenizer
from tests.unit.small_models import write_model

from .fakes import CONTEXT, MODEL, FakeClient, both, spoken
from .helpers import CHAT, chat, frames

SERVED = Served(MODEL, ByteTokenizer(), CONTEXT)


@pytest.fixture
async def serve(caplog):
    """Starts `server.serve` in this process; gives its task and base URL. Ends it with a signal."""
    caplog.set_level("INFO")
    tasks = []

    async def begin(client, load=lambda _: SERVED, drain_seconds=10.0):
        settings = GatewaySettings(port=0, drain_seconds=drain_seconds)
        task = asyncio.create_task(server.serve(settings, client, load))
        tasks.append(task)
        async with asyncio.timeout(5):
            while not (found := re.search(r"listening on (http://\S+)", caplog.text)):
                assert not task.done()
                await asyncio.sleep(0.01)
        return task, found[1]

    yield begin
    for task in tasks:
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(ConfigError):
            await asyncio.wait_for(task, 5)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def until_ready(http):
    """It listens before it has looked for the workers, and refuses requests until then."""
    async with asyncio.timeout(5):
        while (await http.get("/ready")).status != 200:
            await asyncio.sleep(0.01)


async def test_everything_but_health_is_503_while_the_model_loads(serve):
    loaded = threading.Event()

    def load(_):
        loaded.wait()
        return SERVED

    _, url = await serve(FakeClient(workers_now=both()), load)
    async with aiohttp.ClientSession(url) as http:
        assert (await http.get("/health")).status == 200
        for method, path in [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/nowhere")]:
            response = await http.request(method, path, json=chat())
            assert response.status == 503
            assert response.headers["Retry-After"] == "5"
            assert (await response.json())["error"]["code"] == "model_loading"
        ready = await http.get("/ready")
        assert ready.status == 503
        assert (await ready.json())["missing"] == ["model"]
        loaded.set()
        async with asyncio.timeout(5):
            while (await http.get("/ready")).status != 200:
                await asyncio.sleep(0.01)
        assert (await http.post(CHAT, json=chat())).status == 200


async def test_a_model_that_cannot_be_loaded_ends_the_process(serve):
    def load(_):
        raise ConfigError("model: nowhere to be found")

    task, _ = await serve(FakeClient(), load)
    with pytest.raises(ConfigError, match="nowhere"):
        await asyncio.wait_for(task, 5)


async def test_the_first_signal_lets_running_answers_finish_and_takes_no_more(serve):
    said = asyncio.Event()
    first, *rest = spoken(("a", "b"), 1)
    fake = FakeClient(script=lambda _: [first, said, *rest], workers_now=both())
    task, url = await serve(fake)
    async with aiohttp.ClientSession(url) as http:
        await until_ready(http)
        response = await http.post(CHAT, json=chat(stream=True))
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            while True:
                try:
                    await http.get("/health")
                except aiohttp.ClientConnectorError:
                    break
                await asyncio.sleep(0.01)
        assert not task.done()
        said.set()
        assert frames(await response.text())[-1] == "[DONE]"
        await asyncio.wait_for(task, 5)
    assert not fake.handles[0].cancelled.is_set()


async def test_a_client_that_leaves_while_it_waits_cancels(serve):
    never = asyncio.Event()
    fake = FakeClient(script=lambda _: [never], workers_now=both())
    _, url = await serve(fake)
    async with aiohttp.ClientSession(url) as http:
        await until_ready(http)
        asking = asyncio.create_task(http.post(CHAT, json=chat()))
        async with asyncio.timeout(5):
            while not fake.handles:
                await asyncio.sleep(0.01)
            await fake.handles[0].reading.wait()
            asking.cancel()
            await fake.handles[0].cancelled.wait()


async def test_open_connections_are_told_that_the_server_drains(serve):
    never = asyncio.Event()
    fake = FakeClient(script=lambda _: [Event(0, (1,), "x"), never], workers_now=both())
    task, url = await serve(fake, drain_seconds=3.0)
    async with aiohttp.ClientSession(url) as http:
        await until_ready(http)
        held = await http.post(CHAT, json=chat(stream=True))
        host, port = re.fullmatch(r"http://(.+):(\d+)", url).groups()
        reader, writer = await asyncio.open_connection(host, int(port))
        request = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(request % b"/health")
        await reader.readuntil(b'{"status":"ok"}')
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        writer.write(request % b"/v1/models")
        answer = (await asyncio.wait_for(reader.read(), 5)).decode()
        assert answer.startswith("HTTP/1.1 503 ")
        assert '"draining"' in answer
        assert "Retry-After: 2" in answer
        writer.close()
        held.close()
    await asyncio.wait_for(task, 10)


async def test_what_is_left_after_the_drain_is_cancelled(serve):
    never = asyncio.Event()
    fake = FakeClient(script=lambda _: [Event(0, (1,), "x"), never], workers_now=both())
    fake.linger = 0.3
    task, url = await serve(fake, drain_seconds=0.1)
    async with aiohttp.ClientSession(url) as http:
        await until_ready(http)
        response = await http.post(CHAT, json=chat(stream=True))
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(task, 10)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    assert fake.handles[0].cancelled.is_set()


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PDQ_")}
    return kept | {"PDQ_ENGINE": "scripted", "PDQ_PORT": "0", "PDQ_REDIS_URL": "redis://127.0.0.1:1/0"} | more


@contextlib.contextmanager
def program(**more):
    """`python -m pdq.gateway`, its output as lines."""
    command = [sys.executable, "-m", "pdq.gateway"]
    with subprocess.Popen(command, env=environment(**more), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_as_a_program_without_redis_it_listens_says_so_and_ends_cleanly():
    with program() as process:
        url = re.search(r"listening on (\S+)", process.stderr.readline())[1]
        async with aiohttp.ClientSession(url) as http:
            assert (await http.get("/health")).status == 200
            async with asyncio.timeout(10):
                while (body := await (await http.get("/ready")).json())["missing"] == ["model"]:
                    await asyncio.sleep(0.02)
            assert body["missing"] == ["redis"]
            begin = asyncio.get_running_loop().time()
            response = await http.post(CHAT, json=chat(model="scripted"))
            assert response.status == 503
            assert asyncio.get_running_loop().time() - begin < 1.0
            assert (await http.post(CHAT, json=chat(model="scripted", n=2))).status == 400
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_a_model_folder_is_served_under_its_name_and_without_torch(tmp_path):
    folder = write_model(tmp_path / "tiny")
    with program(PDQ_ENGINE="torch", PDQ_MODEL=str(folder), PDQ_MAX_MODEL_LEN="100") as process:
        lines = iter(process.stderr.readline, "")
        assert any("ready to serve tiny, context 100 tokens" in line for line in lines)
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()


async def test_a_hangup_has_the_keys_file_read_again(tmp_path):
    file = tmp_path / "keys"
    file.write_text("acme sk-1\n")
    with program(PDQ_API_KEYS_FILE=str(file)) as process:
        lines = iter(process.stderr.readline, "")
        assert any("ready to serve" in line for line in lines)
        process.send_signal(signal.SIGHUP)
        assert "api_keys_file: read again, 1 keys" in next(lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert "sk-1" not in process.stderr.read()


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/models a secret prompt\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\na secret prompt\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\x01\r\n\r\n",
    ],
    ids=["request", "chunk", "header"],
)
async def test_bytes_that_are_no_http_are_not_quoted_in_the_log(serve, caplog, data):
    _, url = await serve(FakeClient(workers_now=both()))
    host, port = re.fullmatch(r"http://(.+):(\d+)", url).groups()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    assert b" 400 Bad Request" in await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert "not HTTP: Bad" in caplog.text
    assert "secret" not in caplog.text


def test_a_second_signal_kills_at_once():
    with program(PDQ_SERVED_MODEL_NAME="m") as process:
        assert "listening" in process.stderr.readline()
        assert "ready to serve m, context 8192 tokens" in process.stderr.readline()
        os.kill(process.pid, signal.SIGSTOP)  # both signals are there when it goes on
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(10) in (128 + signal.SIGINT, 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({"PDQ_PORT": "x"}, 2, "port: expected int"),
        ({"PDQ_PROT": "1"}, 2, "unknown variable PDQ_PROT"),
        ({"PDQ_HOST": "192.0.2.1"}, 1, "cannot serve: "),
        ({"PDQ_API_KEY": "sk two"}, 2, "api_key: printable ASCII without blanks is wanted"),
        ({"PDQ_API_KEYS_FILE": "/nowhere"}, 2, "api_keys_file: /nowhere: No such file or directory"),
        ({"PDQ_ENGINE": "torch", "PDQ_MODEL": "/nowhere/at all"}, 2, "model: there is no folder /nowhere/at all"),
    ],
)
def test_what_cannot_work_ends_with_one_line_and_a_code(variables, code, words):
    found = subprocess.run(
        [sys.executable, "-m", "pdq.gateway"], env=environment(**variables), capture_output=True, text=True, timeout=30
    )
    assert found.returncode == code
    assert words in found.stderr
    assert "Traceback" not in found.stderr


def test_the_gateway_needs_neither_torch_nor_transformers_nor_the_engine():
    script = (
        "import sys, pdq.client, pdq.gateway.app, pdq.gateway.server, pdq.gateway.__main__\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers') or m.startswith('pdq.engine')])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"
