"""The start of a worker program: settings, logging, model, engine, worker. The programs in `workers/` add the stage.

Loads torch (through the engine) only when a torch engine is asked for.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pdq import event_loop, process
from pdq.config import WorkerSettings
from pdq.cores import Cores, OwnCores, SharedCores
from pdq.engine.base import Engine, Segment
from pdq.engine.load import load_engine
from pdq.errors import ConfigError, ModelUnsupported
from pdq.kv_transfer import KVTransfer
from pdq.models import find_model, load_tokenizer
from pdq.slots import Slots
from pdq.text import Tokenizer
from pdq.worker import Stage, Worker

log = logging.getLogger(__name__)
S = TypeVar("S", bound=WorkerSettings)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a stage is built from. compute: the one thread that drives the engine."""

    engine: Engine
    tokenizer: Tokenizer
    worker: Worker
    transfer: KVTransfer
    slots: Slots
    compute: ThreadPoolExecutor
    cores: Cores = field(default_factory=OwnCores)

    def forward(self, segments: Sequence[Segment], borrowing: int = 1, leaving: int = 0) -> list[int | None]:
        """`engine.forward`, from `borrowing` segments on with the cores of idle neighbours; for the compute thread.

        leaving: how many of those cores stay free for other programs.
        """
        if len(segments) < borrowing:
            self.engine.more_threads = 0
            return self.engine.forward(segments)
        with self.cores.borrowed() as lent:
            self.engine.more_threads = max(lent - leaving, 0)
            return self.engine.forward(segments)


def run_program(stage: str, settings_class: type[S], build: Callable[[S, Parts], Stage]) -> None:
    """Load everything and work until told to stop. Exit code 2 for what a restart would not change."""
    level = os.environ.get("PDQ_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(level=level, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr)
    try:
        settings = settings_class.load()
        process.prepare(settings.threads)
        served, engine, tokenizer = _load(settings)
        event_loop.run(_work(stage, settings, served, engine, tokenizer, build))
    except (ConfigError, ModelUnsupported) as e:
        log.error("%s", e)
        sys.exit(2)


def _load(settings: WorkerSettings) -> tuple[str, Engine, Tokenizer]:
    if settings.engine.partition(":")[0] == "scripted":
        served, folder = settings.served_model_name or "scripted", None
    else:
        files = find_model(settings.model, served_model_name=settings.served_model_name, say=log.info)
        served, folder = files.name, files.folder
    engine = load_engine(settings, folder)
    spec = engine.spec
    if spec.max_model_len * spec.token_bytes > settings.kv_memory_bytes:
        raise ConfigError(
            f"kv_memory: {settings.kv_memory} is less than one context of {spec.max_model_len} tokens, which needs "
            f"{spec.max_model_len * spec.token_bytes} bytes; raise it or lower max_model_len"
        )
    return served, engine, load_tokenizer(settings.engine, folder)


async def _work(
    stage: str, settings: S, served: str, engine: Engine, tokenizer: Tokenizer, build: Callable[[S, Parts], Stage]
) -> None:
    spec = engine.spec
    cores = _cores(settings)
    worker = Worker(
        settings, stage, model=served, fingerprint=spec.fingerprint, context=spec.max_model_len,
        numerics=spec.numerics, cores=cores,
    )  # fmt: skip
    compute = ThreadPoolExecutor(1, thread_name_prefix="pdq-engine")
    parts = Parts(engine, tokenizer, worker, KVTransfer(settings, engine), Slots(engine), compute, cores)
    log.info("%s: ready, model %s, context %d, pool %s", worker.name, served, spec.max_model_len, settings.pool)
    log.info("%s: computes by %s", worker.name, spec.numerics)
    with closing(cores), compute:  # whatever ends the worker, the engine outlives what runs in its thread
        await worker.run(build(settings, parts))


def _cores(settings: WorkerSettings) -> Cores:
    if settings.cores is None or settings.threads is None:
        return OwnCores()
    place = Path(settings.cores)
    return SharedCores(place.parent, place.name, settings.threads)
