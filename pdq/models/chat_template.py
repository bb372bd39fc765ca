"""A model's chat template: conversation in, text out, in a sandbox.

Renders as transformers' `apply_chat_template` does (same environment, filters, variables and `None` tools), without
importing transformers, which costs half a second, or torch. Templates come with a model and are not trusted: they see
plain dicts and strings only. Knows nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdq.errors import InvalidRequest
from pdq.messages import Message

# What the code of a template can raise besides Jinja's own errors, e.g. by adding a string to None.
_TEMPLATE_FAULTS = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class ChatTemplate:
    """A compiled template. special_tokens: e.g. `bos_token`, as template variables. Thread-safe.

    A template that does not compile is kept as an error for `render`: plain completions work without it.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        self._fault = "this model has no chat template; use a plain completion"
        self._template: jinja2.Template | None = None
        if source is not None:
            try:
                self._template = _environment().from_string(source)
            except jinja2.TemplateSyntaxError as e:
                self._fault = f"this model's chat template is broken: {e}"

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation as the model wants to read it, up to the start of the assistant's turn.

        Raises InvalidRequest (param "messages") when there is no template, or with the template's own sentence when it
        refuses the conversation.
        """
        if self._template is None:
            raise InvalidRequest(self._fault, param="messages")
        try:
            return self._template.render(
                messages=[_plain(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _Refusal as e:
            raise InvalidRequest(str(e), param="messages") from e
        except _TEMPLATE_FAULTS as e:
            raise InvalidRequest(f"the model's chat template failed: {e}", param="messages") from e


def _plain(message: Message) -> dict[str, str]:
    plain = {"role": message.role, "content": message.content}
    return plain if message.name is None else plain | {"name": message.name}


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _PlainNamespace(jinja2.utils.Namespace):
    """A namespace without attributes that begin with an underscore, so that none of Python's own is in reach."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"chat templates cannot set {name!r}")
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    found.filters["tojson"] = _tojson
    found.globals["raise_exception"] = _refuse
    found.globals["strftime_now"] = _now
    found.globals["namespace"] = _PlainNamespace
    return found


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(text: str) -> None:
    raise _Refusal(text)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # local time on purpose: the template asks for the user's date
