"""A whole pool inside a test's event loop: real Redis, real workers, scripted engine."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

from pdq.client import AsyncClient
from pdq.config import DecodeSettings, PrefillSettings, RedisSettings
from pdq.engine.load import load_engine
from pdq.engine.scripted import ScriptedEngine
from pdq.kv_transfer import KVTransfer
from pdq.program import Parts
from pdq.slots import Slots
from pdq.text import ByteTokenizer
from pdq.worker import Worker
from pdq.workers.decode import DecodeStage
from pdq.workers.prefill import PrefillStage
from tests.servers import Server


class LocalWorker:
    """One worker; `engine` is open to inspection."""

    def __init__(self, stage: str, server: Server, **options: Any) -> None:
        kind = PrefillSettings if stage == "prefill" else DecodeSettings
        wanted = options.pop("engine", "scripted")  # its name, or a function that makes one
        named = wanted if isinstance(wanted, str) else "scripted"
        self.settings = kind(redis_url=server.url, engine=named, **options)
        engine = load_engine(self.settings, None) if isinstance(wanted, str) else wanted()
        self.engine: Any = engine
        self.worker = Worker(
            self.settings,
            stage,
            model="scripted",
            fingerprint=engine.spec.fingerprint,
            context=engine.spec.max_model_len,
        )
        parts = Parts(
            engine,
            ByteTokenizer(),
            self.worker,
            KVTransfer(self.settings, engine),
            Slots(engine),
            ThreadPoolExecutor(1),
        )
        if isinstance(self.settings, PrefillSettings):
            self.stage: PrefillStage | DecodeStage = PrefillStage(self.settings, parts)
        else:
            assert isinstance(self.settings, DecodeSettings)
            self.stage = DecodeStage(self.settings, parts)
        self.store = parts.transfer.store
        self.task = asyncio.create_task(self.worker.run(self.stage))

    async def stop(self) -> None:
        self.worker.drain()
        await self.task

    async def die(self) -> None:
        """As kill -9 would look from outside: no release, no goodbye."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.close()

    async def close(self) -> None:
        """After an end that was not orderly."""
        await self.stage.close()
        for client in (self.worker._redis, self.worker._waiting, self.worker._hints):
            await client.aclose()


class LocalPool:
    """Starts `prefill` and `decode` workers; settings as keywords go to both kinds, those with a prefix to one."""

    def __init__(self, server: Server, prefill: int = 1, decode: int = 1, **options: Any) -> None:
        self.server = server
        self._counts = {"prefill": prefill, "decode": decode}
        self._options = options
        self.workers: dict[str, list[LocalWorker]] = {"prefill": [], "decode": []}
        self.client = AsyncClient(RedisSettings(redis_url=server.url))

    async def __aenter__(self) -> Self:
        for stage, count in self._counts.items():
            for _ in range(count):
                self.add(stage)
        return self

    def add(self, stage: str, **more: Any) -> LocalWorker:
        options = {k: v for k, v in self._options.items() if not k.startswith(("prefill_", "decode_"))}
        options |= {k.removeprefix(f"{stage}_"): v for k, v in self._options.items() if k.startswith(f"{stage}_")}
        worker = LocalWorker(stage, self.server, **{"block_size": 4, "kv_memory": "1MiB", **options, **more})
        self.workers[stage].append(worker)
        return worker

    @property
    def engines(self) -> list[ScriptedEngine]:
        return [w.engine for group in self.workers.values() for w in group]

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(w.stop() for group in self.workers.values() for w in group if not w.task.done()))
        await self.client.aclose()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(ValueError):
                asyncio.get_running_loop().remove_signal_handler(number)
