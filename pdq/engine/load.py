"""From settings to a loaded engine. torch is imported only when a torch engine is asked for."""

from __future__ import annotations

from pathlib import Path

from pdq.config import WorkerSettings
from pdq.engine.base import Engine
from pdq.engine.scripted import Script, ScriptedEngine
from pdq.errors import ConfigError
from pdq.models import check_supported, context_limit, eos_token_ids, fingerprint

SCRIPTED_CONTEXT = 8192


def load_engine(settings: WorkerSettings, folder: Path | None) -> Engine:
    """The engine that `settings.engine` names. folder: of the model, None for a scripted engine.

    Raises ConfigError, ModelUnsupported.
    """
    if settings.engine.partition(":")[0] == "scripted":
        return ScriptedEngine(
            Script.parse(settings.engine),
            block_size=settings.block_size,
            max_model_len=settings.max_model_len or SCRIPTED_CONTEXT,
            memory=settings.kv_memory_bytes,
        )
    if settings.engine != "torch" or folder is None:
        raise ConfigError(f"engine: torch or scripted:... is wanted, got {settings.engine!r}")
    code, compiled = settings.trust_remote_code, settings.compile == "auto"
    check_supported(folder, trust_remote_code=code)
    from pdq.engine.model import load_model
    from pdq.engine.runner import TorchEngine

    # Workers of different dtypes may exchange KV in a form that both declare.
    exchanged = settings.dtype if settings.kv_codec == "raw" else settings.kv_codec
    return TorchEngine(
        load_model(
            folder,
            dtype=settings.dtype,
            device=settings.device,
            quantization=settings.quantization,
            trust_remote_code=code,
            compiled=compiled,
        ),
        fingerprint=fingerprint(
            folder,
            dtype=exchanged,
            block_size=settings.block_size,
            quantization=settings.quantization,
            trust_remote_code=code,
        ),
        dtype=settings.dtype,
        max_model_len=context_limit(folder, settings.max_model_len),
        eos_ids=eos_token_ids(folder),
        kv_memory_bytes=settings.kv_memory_bytes,
        threads=settings.threads,
        compiled=compiled,
    )
