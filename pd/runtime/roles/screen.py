"""What `pd serve` shows: lines and a spinner on standard error, results on standard output."""

from __future__ import annotations

import contextlib
import os
import time

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table


class _Lasting(Console):
    """Goes on in silence when nobody reads any more: what is served outlives its log."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # for what is left in buffers
        os.close(nowhere)


class Screen:
    """A context manager: leaving it takes the spinner away. What cannot be written, to a full disk say, is lost."""

    def __init__(self) -> None:
        self._errors = _Lasting(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._results = _Lasting(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_for(None)

    @property
    def is_terminal(self) -> bool:
        return self._errors.is_terminal

    def line(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._errors.print(text)

    def say(self, text: str) -> None:
        """A line of our own, in the form of the children's."""
        self.line(f"{time.strftime('%H:%M:%S')} serve {text}")

    def wait_for(self, what: str | None) -> None:
        """On a terminal: show what is awaited beside a spinner, which turns with each call. None: no more."""
        if not self.is_terminal:
            return
        if self._live is not None and what is None:
            self._live.stop()
            self._live = None
        elif what is not None:
            self._spinner.update(text=what)
            if self._live is None:  # no refreshing thread: we fork
                self._live = Live(self._spinner, console=self._errors, auto_refresh=False, transient=True)
                self._live.start()
            self._live.refresh()

    def show(self, *parts: str | Table) -> None:
        with contextlib.suppress(OSError):
            for part in parts:
                self._results.print(part)
