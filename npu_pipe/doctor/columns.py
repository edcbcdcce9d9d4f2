"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["INDENT", "columns", "some"]

INDENT = 13
"""Of what stands below a line that begins with a name."""

_MOST = 8


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line a row, cells to the right of their columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"{'':{INDENT}}{'  '.join(cells)}".rstrip()


def some(ranks: Sequence[int], *, most: int = _MOST) -> str:
    """A group of ranks; of many, the first ones and the last."""
    if len(ranks) <= most:
        return " ".join(map(str, ranks))
    return f"{' '.join(map(str, ranks[: most - 2]))} .. {ranks[-1]}"
