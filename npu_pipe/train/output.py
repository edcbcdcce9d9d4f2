"""What a run prints: for a person, and no reason for the run to end when it cannot be printed."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.console import Console

__all__ = ["open_console"]


def open_console(*, quiet: bool = False) -> Console:
    """A console on stdout that outlives its reader: the terminal, a pager, the disk of a log."""
    return Console(file=_Lasting(sys.stdout), quiet=quiet)  # type: ignore[arg-type]


class _Lasting:
    """A stream that turns to /dev/null for good when it can no longer be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            written = self._stream.write(text)
            self._stream.flush()
            return written
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        """Every write is flushed."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
