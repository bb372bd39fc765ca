"""The `pdq` program's outermost layer: errors become one line and an exit code.

The commands are in commands.py, which needs typer and rich; this module imports neither, so that the light install
(`pip install pdq`) can say what is missing.

Exit codes: 0 fine, 1 failed, 2 a wrong setting, option or installation (trying again is no use), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from pdq.errors import ConfigError, ModelUnsupported, PdqError

DEBUG = "--debug"
FAILED, WRONG, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return FAILED
    except PdqError as e:
        return _failed(e, WRONG if isinstance(e, ConfigError | ModelUnsupported) else FAILED, e.message, words)
    except ModuleNotFoundError as e:
        # A module of ours that is not there is a bug, one of others an extra that was not installed.
        package = (e.name or "pdq").partition(".")[0]
        ours = package == "pdq"
        text = f"internal error: {e}" if ours else f"{package} is not installed: pip install 'pdq[serve]'"
        return _failed(e, FAILED if ours else WRONG, text, words)
    except Exception as e:  # noqa: BLE001  outermost: whatever it is, one line
        return _failed(e, FAILED, f"internal error: {type(e).__name__}: {e} ({DEBUG} shows where)", words)


def _run(words: list[str]) -> int:
    from pdq.cli.commands import run

    return run([w for w in words if w != DEBUG])


def _failed(error: Exception, code: int, text: str, words: list[str]) -> int:
    if DEBUG in words:
        traceback.print_exception(error)
    print(f"error: {' '.join(text.split())}", file=sys.stderr)  # noqa: T201  this is the program's voice
    return code


def _forget_stdout() -> None:
    """Nobody reads stdout any more (`pdq ... | head`): keep the interpreter from complaining when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
