"""`pdq serve`: one model on one machine as a tree of processes.

    pdq serve ─┬─ valkey          unless --redis-url is given (embedded.py)
               ├─ valkey-kv       likewise, unless --kv-url is given
               ├─ gateway         python -m pdq.gateway
               ├─ prefill-1 ...   python -m pdq.workers.prefill
               └─ decode-1 ...    python -m pdq.workers.decode

Decides what runs, with which settings and how many threads, waits until requests can be answered, and takes all down in
the order that loses nothing: first the gateway, which takes no more requests and ends those it has, then the workers,
Valkey last. The children are kept alive by supervisor.py. Imports neither torch nor aiohttp.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pdq import connection
from pdq.api_keys import any_key
from pdq.config import DecodeSettings, GatewaySettings, PrefillSettings, ServeSettings, WorkerSettings, cache_folder
from pdq.errors import ConfigError, Unavailable
from pdq.keys import Keys
from pdq.serve import embedded, machine
from pdq.serve.health import Answer, get, url
from pdq.serve.screen import Screen
from pdq.serve.supervisor import WRONG_SETTING, Output, Program, Restarts, Supervisor, ending, sentence, spawn

T = TypeVar("T")
KILLED = 130
MEMORY_SHARE = 4  # the embedded Valkeys get one in this many bytes
_MARGIN_SECONDS = 5.0  # a child that drains by its own clock gets this much more before it is killed
_VALKEY_SECONDS = 30.0  # to write what is left of its file
_POLL_SECONDS = 0.5


def run(settings: ServeSettings, screen: Screen, restarts: Restarts | None = None) -> int:
    """Serve until a signal says stop. The exit code: 0 drained, 1 a child had to be killed, 130 second signal.

    Raises PdqError if it cannot start: a port in use, an unsupported model, a wrong setting.
    """
    return asyncio.run(_run(settings, screen, restarts))


async def _run(settings: ServeSettings, screen: Screen, restarts: Restarts | None) -> int:
    machine.check_port(settings.host, settings.port)
    valkeys: list[embedded.Embedded] = []
    if not settings.redis_url:
        memory = settings.valkey_memory_bytes or machine.memory() // MEMORY_SHARE
        queue = await embedded.prepare(cache_folder(), settings.pool, settings.port, max(memory // 8, 1))
        valkeys, settings = [queue], replace(settings, redis_url=queue.url)
        if settings.kv_url is None:
            valkeys.append(queue.for_blocks(max(memory - memory // 8, 1)))
            settings = replace(settings, kv_url=valkeys[-1].url)
    if settings.port == 0:
        settings = replace(settings, port=machine.free_port(settings.host))
    supervisor = Supervisor(screen.say, restarts)
    try:
        return await _until_stopped(Pool(settings, valkeys, supervisor, screen), supervisor, screen)
    finally:
        screen.progress("")
        await supervisor.kill()
        for valkey in valkeys[:1]:
            valkey.release()


async def _until_stopped(pool: Pool, supervisor: Supervisor, screen: Screen) -> int:
    first, second = _stop_signals()
    up, stop = asyncio.create_task(pool.up()), asyncio.create_task(first.wait())
    await asyncio.wait({up, stop}, return_when=asyncio.FIRST_COMPLETED)
    if up.done() and (error := up.exception()):
        stop.cancel()
        await pool.down(seconds=1.0)
        raise error
    await stop
    up.cancel()
    await asyncio.wait({up})
    screen.progress("")
    screen.say("pdq", "finishing what runs; Ctrl-C again to kill it")
    down, again = asyncio.create_task(pool.down(pool.settings.drain_seconds)), asyncio.create_task(second.wait())
    await asyncio.wait({down, again}, return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        await supervisor.kill()
        await down
        return KILLED
    again.cancel()
    return 0 if down.result() else 1


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first and by any further SIGINT, SIGTERM or SIGHUP."""
    first, second = asyncio.Event(), asyncio.Event()

    def count() -> None:
        (second if first.is_set() else first).set()

    numbers = [signal.SIGINT, signal.SIGTERM]  # even if the shell that put us in the background had them ignored
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, count)
    return first, second


class Pool:
    """The processes of one `pdq serve`; `settings` are complete: Redis, port, and after `up` the model's folder."""

    def __init__(
        self, settings: ServeSettings, valkeys: Sequence[embedded.Embedded], supervisor: Supervisor, screen: Screen
    ) -> None:
        self.settings = settings
        self._valkeys = valkeys
        self._supervisor = supervisor
        self._screen = screen
        self._cores = machine.cores()
        self._locks = cache_folder() / "cores" / f"{settings.pool}-{settings.port}"
        self._workers: list[Program] = []

    async def up(self) -> None:
        """Start everything; returns when requests are answered and the banner is out. Raises PdqError."""
        for valkey in self._valkeys:
            self._supervisor.start(valkey.program())
        for valkey in self._valkeys:
            await self._or_failure(valkey.ready())
        if self._valkeys:
            await asyncio.to_thread(forget_workers, self.settings)
        if self.settings.engine == "torch":
            self._screen.progress(f"looking for the model {self.settings.model}")
            self.settings = await find_model(self.settings, self._screen)
        self.start_programs()
        model = await self._or_failure(self._ready())
        self._supervisor.settled = True
        self._screen.progress("")
        self._screen.banner("pdq is ready", banner(self.settings, model, self._cores))

    def start_programs(self) -> None:
        """Start the gateway and the workers."""
        shutil.rmtree(self._locks, ignore_errors=True)  # what a killed server left would be taken for idle workers
        self._workers = worker_programs(self.settings, self._cores, self._locks)
        for program in (gateway_program(self.settings), *self._workers):
            self._supervisor.start(program)

    async def down(self, seconds: float) -> bool:
        """Stop everything in order; True if nothing had to be killed."""
        patience = seconds + _MARGIN_SECONDS
        ended = [await self._supervisor.stop("gateway", patience)]
        ended += await asyncio.gather(*(self._supervisor.stop(w.name, patience) for w in self._workers))
        names = [v.name for v in self._valkeys]
        ended += await asyncio.gather(*(self._supervisor.stop(name, _VALKEY_SECONDS) for name in names))
        shutil.rmtree(self._locks, ignore_errors=True)
        return all(ended)

    async def _ready(self) -> dict[str, Any]:
        """Wait for the gateway's /ready; the entry of /v1/models."""
        address = (self.settings.host, self.settings.port)
        api_key = any_key(self.settings.api_key, self.settings.api_keys_file)
        while True:
            ready = await asyncio.to_thread(get, *address, "/ready")
            if ready is not None and ready.status == 200:
                models = await asyncio.to_thread(get, *address, "/v1/models", api_key)
                if models is not None and models.body.get("data"):
                    return dict(models.body["data"][0])
            self._screen.progress(f"waiting for {_missing(ready)}")
            await asyncio.sleep(_POLL_SECONDS)

    async def _or_failure(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, or the error of a child that cannot start."""
        task, failed = asyncio.create_task(work), self._supervisor.failed
        either: set[asyncio.Future[Any]] = {task, failed}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise failed.result()
            return task.result()
        finally:
            task.cancel()


def forget_workers(settings: ServeSettings) -> None:
    """Remove the heartbeats that the last run left in its data: nobody works for this Redis yet."""
    keys = Keys(settings.pool)
    with connection.bulk(settings.redis_url, 1) as redis:
        names: Any = redis.zrange(keys.workers, 0, -1)
        redis.delete(keys.workers, *(keys.worker(name.decode()) for name in names))


async def find_model(settings: ServeSettings, screen: Screen) -> ServeSettings:
    """`settings` with the model as a folder and the name clients use; fetched and converted first if need be.

    Done once, in a process of its own (fetch.py). Raises ConfigError.
    """
    names = [settings.model, *([settings.served_model_name] if settings.served_model_name else [])]
    command = (sys.executable, "-m", "pdq.serve.fetch", *names)
    program = Program(name="model", argv=command, env=settings.environ_of_child())
    output = Output(screen.progress)
    async with output.pipe() as write:
        process = await spawn(program, stdout=asyncio.subprocess.PIPE, stderr=write)
    try:
        found, _ = await process.communicate()
        code = await process.wait()
        await output.rest()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == 0:
        folder, name = json.loads(found)
        return replace(settings, model=folder, served_model_name=name)
    text = sentence(output.last) or f"looking for the model {ending(code)}"
    raise ConfigError(text) if code == WRONG_SETTING else Unavailable(text)


def gateway_program(settings: ServeSettings) -> Program:
    env = settings.part(GatewaySettings).environ_of_child()
    return Program(name="gateway", argv=(sys.executable, "-m", "pdq.gateway"), env=env | {"PYTHONUNBUFFERED": "1"})


def worker_programs(settings: ServeSettings, cores: int, locks: Path | None = None) -> list[Program]:
    """Prefill workers, then decode workers; without --threads they share the cores.

    locks: folder in which they lend each other idle ones; not if there are more threads than cores anyway.
    """
    threads = worker_threads(settings, cores)
    if settings.threads or sum(threads) > cores or not settings.lend_cores:
        locks = None
    prefill, decode = settings.part(PrefillSettings), settings.part(DecodeSettings)
    rest = threads[settings.prefill :]
    programs = [_worker(prefill, "prefill", i + 1, threads[i], locks) for i in range(settings.prefill)]
    return programs + [_worker(decode, "decode", i + 1, n, locks) for i, n in enumerate(rest)]


def worker_threads(settings: ServeSettings, cores: int) -> list[int]:
    """Threads of the prefill workers, then of the decode workers."""
    workers = settings.prefill + settings.decode
    return [settings.threads] * workers if settings.threads else machine.divide(cores, workers)


def _worker(settings: WorkerSettings, stage: str, number: int, threads: int, locks: Path | None) -> Program:
    name = f"{stage}-{number}"
    cores = str(locks / name) if locks else None
    own = replace(settings, threads=threads, cores=cores, name=settings.name and f"{settings.name}-{name}")
    env = own.environ_of_child() | {"PYTHONUNBUFFERED": "1"}
    return Program(name=name, argv=(sys.executable, "-m", f"pdq.workers.{stage}"), env=env)


def banner(settings: ServeSettings, model: dict[str, Any], cores: int) -> list[tuple[str, str]]:
    """Rows of the banner; `model` is an entry of /v1/models."""
    body = {"model": model["id"], "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    address = url(settings.host, settings.port)
    locked = settings.api_key or settings.api_keys_file
    head = "-H 'Content-Type: application/json'" + (' -H "Authorization: Bearer $OPENAI_API_KEY"' if locked else "")
    curl = f"curl {address}/v1/chat/completions {head} -d {shlex.quote(json.dumps(body))}"
    return [
        ("URL", f"{address}/v1"),
        ("model", str(model["id"])),
        ("context", f"{model.get('max_model_len', '?')} tokens"),
        ("Redis", settings.redis_url),
        *([("KV blocks", settings.kv_url)] if settings.kv_url else []),
        ("workers", _worker_text(settings, cores)),
        ("try", curl),
    ]


def _worker_text(settings: ServeSettings, cores: int) -> str:
    threads = worker_threads(settings, cores)
    parts = []
    for stage, some in (("prefill", threads[: settings.prefill]), ("decode", threads[settings.prefill :])):
        counts = str(some[0]) if min(some) == max(some) else f"{min(some)}-{max(some)}"
        parts.append(f"{len(some)} {stage} x {counts} thread{'s' if counts != '1' else ''}")
    over = f" (more than the {cores} cores: expect them to slow each other)" if sum(threads) > cores else ""
    return ", ".join(parts) + over


def _missing(ready: Answer | None) -> str:
    """What /ready says is not there yet."""
    return "gateway" if ready is None else ", ".join(map(str, ready.body.get("missing", ["gateway"])))
