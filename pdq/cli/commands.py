"""The commands of `pdq`, each a thin call into the module that does the work.

`serve` supervises the whole pool here; `gateway` and `worker` *become* the program they name, with the options turned
into `PDQ_*` variables, so that signals and exit codes are the program's own. Torch and aiohttp are not imported here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from typing import Annotated, NoReturn

import typer

from pdq.bench.settings import VARIABLES, BenchSettings
from pdq.cli.cache import app as cache
from pdq.cli.chat import DEFAULT_URL, Options
from pdq.cli.chat import run as talk
from pdq.cli.models import models
from pdq.cli.options import command
from pdq.config import DecodeSettings, GatewaySettings, ModelSettings, PrefillSettings, ServeSettings, Settings
from pdq.errors import ConfigError

UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]  # typer names only this subclass of it

app = typer.Typer(name="pdq", add_completion=False, pretty_exceptions_enable=False)
worker = typer.Typer()
app.add_typer(worker, name="worker")
app.add_typer(cache, name="cache")
app.add_typer(models, name="models")


def run(words: Sequence[str]) -> int:
    """Run the command line `words`; its exit code. Raises PdqError; ConfigError for a wrong command line."""
    try:
        code = typer.main.get_command(app).main(args=list(words), prog_name="pdq", standalone_mode=False)
    except UsageError as e:
        raise ConfigError(f"{e.format_message()} (see {e.ctx.command_path if e.ctx else 'pdq'} --help)") from e
    except typer.Abort as e:
        raise KeyboardInterrupt from e
    return code if isinstance(code, int) else 0


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the traceback.")] = False,
) -> None:
    """Serve a language model with prefill and decode in separate processes."""
    del debug  # cli.py takes it from anywhere in the command line
    _help_without_command(context)


@worker.callback(invoke_without_command=True)
def _worker(context: typer.Context) -> None:
    """Run one worker."""
    _help_without_command(context)


def _help_without_command(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def _serve(settings: ServeSettings) -> int:
    """Serve a model on this machine: Valkey, gateway and workers as one tree of processes."""
    _require("serve", "aiohttp", *_engine_modules(settings))
    from pdq.serve.run import run as serve
    from pdq.serve.screen import Screen

    return serve(settings, Screen())


def _gateway(settings: GatewaySettings) -> int:
    """Run the HTTP gateway."""
    _require("gateway", "aiohttp")
    _become("pdq.gateway", settings)


def _prefill(settings: PrefillSettings) -> int:
    """Run one prefill worker."""
    _require("worker", *_engine_modules(settings))
    _become("pdq.workers.prefill", settings)


def _decode(settings: DecodeSettings) -> int:
    """Run one decode worker."""
    _require("worker", *_engine_modules(settings))
    _become("pdq.workers.decode", settings)


def _bench(settings: BenchSettings) -> int:
    """Measure any OpenAI-style server under load: TTFT, TPOT, ITL, E2E, throughput, goodput, cache hits."""
    _require("gateway", "aiohttp", "orjson")
    from pdq.bench.run import run as bench

    return bench(settings)


app.command("serve")(command(ServeSettings, _serve, model_argument=True))
app.command("gateway")(command(GatewaySettings, _gateway))
worker.command("prefill")(command(PrefillSettings, _prefill))
worker.command("decode")(command(DecodeSettings, _decode))
app.command("bench")(command(BenchSettings, _bench, variable=VARIABLES.get))


@app.command()
def chat(
    url: Annotated[
        str, typer.Option(envvar="PDQ_URL", help="Where the gateway listens; any OpenAI-style server will do.")
    ] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="Model name; default: the first the server lists.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Key that the server wants.", show_default=False)
    ] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    temperature: Annotated[float | None, typer.Option(help="0 is always the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="After each answer: time to first token, tokens/s.")] = False,
) -> int:
    """Talk to a running server; with input from a pipe: answer that and end."""
    return talk(Options(url, model, api_key, system, temperature, max_tokens, seed, stats))


@app.command()
def version() -> int:
    """Print the version."""
    typer.echo(f"pdq {installed_version('pdq')}")
    return 0


@app.command()
def health(
    role: Annotated[str, typer.Argument(metavar="gateway|prefill|decode", help="What runs on this host.")],
) -> int:
    """Exit with 0 if the process of this host is alive: for health checks of containers. Set by PDQ_* variables."""
    from pdq.serve.health import check

    check(role)
    return 0


def _become(module: str, settings: Settings) -> NoReturn:
    """Replace this process by `python -m module`, run with exactly `settings`."""
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", module], settings.environ_of_child())  # noqa: S606


def _engine_modules(settings: ModelSettings) -> tuple[str, ...]:
    return ("torch", "transformers", "xxhash") if settings.engine == "torch" else ("xxhash",)


def _require(extra: str, *modules: str) -> None:
    """Raises ConfigError that names the extra to install if one of `modules` is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed: pip install 'pdq[{extra}]'")
