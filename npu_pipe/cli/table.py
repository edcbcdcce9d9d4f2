"""Tables on stdout, for people."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["make_table", "open_console", "print_text"]

_PLAIN_WIDTH = 100  # of files and pipes


def open_console() -> Console:
    """Stdout, as wide as the terminal."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def print_text(console: Console, text: str, *, style: str = "", hang: str = "") -> None:
    """A sentence or a few, in lines as wide as the console; hang: before all but the first."""
    for line in textwrap.wrap(
        text,
        console.width,
        subsequent_indent=hang,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        console.print(line, style=style, markup=False, no_wrap=True, crop=False)


def make_table(*, words: Iterable[str] = (), numbers: Iterable[str]) -> Table:
    """An empty table with columns of words, then of numbers, under these heads."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
