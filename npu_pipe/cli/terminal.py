"""Print a grid: in colour on a terminal, plain elsewhere."""

from __future__ import annotations

import os
import sys

from npu_pipe.ir.action import Action, Step
from npu_pipe.timeline.grid import lay_grid, text_grid
from npu_pipe.timeline.palette import Chunks, fill, ink
from npu_pipe.timeline.timeline import Timeline

__all__ = ["print_grid"]

_PLAIN_WIDTH = 160  # of files and pipes


def print_grid(timeline: Timeline) -> None:
    """The grid on stdout, as wide as the terminal."""
    if not sys.stdout.isatty():
        print(text_grid(timeline, width=_PLAIN_WIDTH))
        return
    from rich.console import Console  # half of the start-up time, and only needed here
    from rich.text import Text

    width = os.get_terminal_size(sys.stdout.fileno()).columns or _PLAIN_WIDTH
    console = Console(width=width, highlight=False)
    grid, chunks = lay_grid(timeline, width=width), Chunks(timeline.schedule)
    lines = [Text(line, style="dim") for line in grid.head]
    for rank, (name, row) in enumerate(zip(grid.names, grid.rows, strict=True)):
        line = Text(name)
        for cell in row:
            if cell.step is None:
                line.append(cell.text, style="bright_black")
                continue
            bar = cell.text.rstrip()
            line.append(bar, style=_style(cell.step, rank, chunks))
            line.append(cell.text[len(bar) :])
        lines.append(line)
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", crop=True)


def _style(step: Step, rank: int, chunks: Chunks) -> str:
    action = step if isinstance(step, Action) else step.backward
    colour = fill(action.kind, chunks.lightness(rank, action))
    return f"{ink(colour)} on {colour}"
