"""What `pdq serve` shows: the lines of its children, what is still loading, the banner.

Notes and children's lines go to stderr, the banner to stdout. Colours and the spinner appear on a terminal only, and
colours not with NO_COLOR (rich's own rules). A reader that goes away (`pdq serve | head`) must not stop anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.status import Status
from rich.text import Text

_COLOURS = {"gateway": "cyan", "prefill": "magenta", "decode": "green", "valkey": "red", "model": "blue"}
_WIDTH = 9


class _Console(Console):
    """A console that falls silent when nobody reads it; rich would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # what is buffered must go somewhere at the end


class Screen:
    """Two consoles and at most one progress line."""

    def __init__(self) -> None:
        self._out = _Console(highlight=False)
        self._err = _Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._progress = ""

    def say(self, name: str, line: str) -> None:
        """A line of the child `name`, or a note about it."""
        colour = _COLOURS.get(name.partition("-")[0], "bold")
        self._print(self._err, Text.assemble((f"{name:<{_WIDTH}} ", colour), line))

    def progress(self, text: str) -> None:
        """What is being waited for; "" ends it. Off a terminal each new text is one line."""
        if text == self._progress:
            return
        self._progress = text
        if not self._err.is_terminal:
            if text:
                self.say("pdq", text)
            return
        if self._status is not None:
            self._status.stop()
            self._status = None
        if text:
            self._status = self._err.status(Text(text))
            self._status.start()

    def banner(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """The rows under a title; nothing is wrapped, since a command is there to be copied."""
        self._print(self._out, Text(f"\n{title}\n", "bold"))
        for name, value in rows:
            self._print(self._out, Text.assemble("  ", (f"{name:<{_WIDTH}} ", "bold"), value))
        self._print(self._out, Text(""))

    def _print(self, console: Console, text: Text) -> None:
        with suppress(OSError):  # nobody reads any more
            console.print(text, soft_wrap=True)
