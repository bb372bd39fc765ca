"""Command-line options made from settings classes (config.py), so that a setting is written down once.

A field `max_batch: int = setting(16, "Sequences decoded together.", low=1)` becomes
`--max-batch INTEGER  Sequences decoded together. (PDQ_MAX_BATCH, 1 to 1024, default 16)`.
Values stay text here, and variables are left alone: config.py reads and checks both, with the same words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from pdq.config import Settings, env_name, number
from pdq.errors import ConfigError

S = TypeVar("S", bound=Settings)
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT"}


def command(
    cls: type[S],
    run: Callable[[S], int],
    *,
    model_argument: bool = False,
    variable: Callable[[str], str | None] = env_name,
) -> Callable[..., int]:
    """A function for typer with an option for every field of `cls`; it calls `run` with the settings.

    model_argument: the model may also be given as the only positional argument. variable: name of the variable that
    `cls.load` reads for a field, for the help; None if there is none.
    """

    def call(**values: Any) -> int:
        positional = values.pop("positional", None)
        if positional is not None:
            if values["model"] is not None:
                raise ConfigError("model: given twice, as an argument and with --model")
            values["model"] = positional
        return run(cls.load(**values))

    parameters = [_option(cls, f, variable(f.name)) for f in fields(cls)]
    if model_argument:
        parameters.insert(0, _model_argument(cls))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__doc__ = run.__doc__
    return call


def _model_argument(cls: type[Settings]) -> inspect.Parameter:
    model = next(f for f in fields(cls) if f.name == "model")
    text = model.metadata["help"] + _remark(model, env_name("model"))
    argument = typer.Argument(metavar="MODEL", help=text, show_default=False)
    return _parameter("positional", argument)


def _option(cls: type[Settings], f: Field[Any], variable: str | None) -> inspect.Parameter:
    flag = get_type_hints(cls)[f.name] is bool
    name = f.name.replace("_", "-")
    option = typer.Option(
        f"--{name}/--no-{name}" if flag and f.default else f"--{name}",
        metavar=None if flag else _metavar(cls, f),
        help=f.metadata["help"] + _remark(f, variable),
        show_default=False,
        rich_help_panel=_panel(cls, f.name),
    )
    return _parameter(f.name, option, bool if flag else str)


def _parameter(name: str, info: Any, value: type[str] | type[bool] = str) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[value | None, info])


def _metavar(cls: type[Settings], f: Field[Any]) -> str:
    if f.metadata["choices"]:
        return "|".join(f.metadata["choices"])
    hint = get_type_hints(cls)[f.name]
    return next(name for kind, name in _METAVARS.items() if hint in (kind, kind | None))


def _remark(f: Field[Any], variable: str | None) -> str:
    """The variable, the limits and the default of a setting, in brackets; a flag shows its default by its name."""
    low, high = f.metadata["low"], f.metadata["high"]
    default: Any = f.default
    parts = [variable] if variable else []
    if high is not None:
        parts.append(f"{number(low)} to {number(high)}")
    elif low is not None:
        parts.append(f"at least {number(low)}")
    if default not in (None, "") and not isinstance(default, bool):
        parts.append(f"default {default if isinstance(default, str) else number(default)}")
    return f" ({', '.join(parts)})" if parts else ""


def _panel(cls: type[Settings], name: str) -> str:
    """Options are shown in groups: by the class that declares them."""
    owner = next(c for c in reversed(cls.__mro__) if name in inspect.get_annotations(c))
    return (owner.__doc__ or "").split("\n")[0].replace("`", "").rstrip(".") or owner.__name__
