"""`pdq models`: what can be said of a model without serving it. `engine.check` does the work, and loads torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pdq.config import ModelSettings

if TYPE_CHECKING:
    from pdq.engine.check import Report

models = typer.Typer()

SUPPORTED, NOT_SUPPORTED = 0, 1


@models.callback(invoke_without_command=True)
def _models(context: typer.Context) -> None:
    """Look at models."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@models.command()
def check(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder, .gguf file or hub id.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the KV whose bytes are told: bfloat16, float16, float32.")
    ] = None,
    max_model_len: Annotated[str | None, typer.Option(metavar="INTEGER", help="Context limit in tokens.")] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Say whether MODEL can be served here, and why not; its weights are not needed. Exit code 0 if it can, else 1."""
    settings = ModelSettings.load(
        model=model, dtype=dtype, max_model_len=max_model_len, trust_remote_code=trust_remote_code
    )
    report = _report(settings)
    if as_json:
        typer.echo(json.dumps({"model": settings.model} | asdict(report)))
    else:
        typer.echo("\n".join(f"{name:<11}{text}" for name, text in _lines(settings.model, report)))
    return SUPPORTED if report.supported else NOT_SUPPORTED


def _report(settings: ModelSettings) -> Report:
    from pdq.engine.check import check as look
    from pdq.models import find_model

    folder = Path(settings.model).expanduser()
    if not folder.is_dir():
        folder = find_model(settings.model, say=lambda text: typer.echo(text, err=True), tokenizer_only=True).folder
    return look(
        folder,
        dtype=settings.dtype,
        max_model_len=settings.max_model_len,
        trust_remote_code=settings.trust_remote_code,
    )


def _lines(model: str, report: Report) -> list[tuple[str, Any]]:
    if not report.supported:
        return [("model", model), ("supported", "no"), ("reason", report.reason), ("chat", _chat(report))]
    return [
        ("model", f"{model} ({report.model_class})"),
        ("supported", "yes" if report.compared else "yes, as far as shapes and masks show; loading it compares logits"),
        ("forward", "compiled as a whole on this CPU" if report.fused else "by the model's own code"),
        *_kv(report),
        ("context", f"{report.context:,} tokens" if report.context else "not stated; --max-model-len is needed"),
        ("chat", _chat(report)),
    ]


def _kv(report: Report) -> list[tuple[str, str]]:
    if report.layout is None:
        return [("KV", "known once it is loaded")]
    size, layers = f"{report.token_bytes:,} bytes per token in {report.dtype}", f"{report.kv_layers} of {report.layers}"
    windows = ", ".join(map(str, report.windows))
    return [
        ("KV", f"{size}, for {layers} layers"),
        ("layout", f"{report.layout} (layers x heads x key + value size)"),
        ("windows", f"{windows} tokens" if windows else "none"),
    ]


def _chat(report: Report) -> str:
    return "template present" if report.chat_template else "no template: completions only"
