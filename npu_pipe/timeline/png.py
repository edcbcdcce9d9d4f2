"""Paint a sheet as PNG, by matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from npu_pipe.errors import ConfigError
from npu_pipe.timeline.shapes import Anchor, Box, Label, Line, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["png"]

_HEAD = 5.0  # length of an arrow head
_MOST_DOTS = 30_000  # of one side; Agg refuses 65536
_POINTS = 0.72  # in a pixel
_ALIGN = {Anchor.START: "left", Anchor.MIDDLE: "center", Anchor.END: "right"}


def png(sheet: Sheet) -> bytes:
    """The file's content, two dots a pixel unless that is too wide; hints are not in it.

    Raises ConfigError when matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "PNG pictures are painted by matplotlib",
            f"it cannot be imported ({error})",
            "pip install 'npu-pipe[plot]', or write SVG",
        ) from error
    dots = min(2.0, _MOST_DOTS / max(sheet.width, sheet.height))
    figure = Figure(figsize=(sheet.width / 100, sheet.height / 100), dpi=100 * dots)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, sheet.width), ylim=(sheet.height, 0))
    axes.set_axis_off()
    below = [shape for shape in sheet.shapes if not isinstance(shape, Label)]
    for kind, shapes in groupby(below, key=type):
        if kind is Box:
            _boxes(axes, [shape for shape in shapes if isinstance(shape, Box)])
        else:
            _lines(axes, [shape for shape in shapes if isinstance(shape, Line)])
    for shape in sheet.shapes:
        if isinstance(shape, Label):
            _label(axes, shape)
    content = io.BytesIO()
    # Without the version of matplotlib in it the same timeline gives the same bytes.
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _boxes(axes: Axes, boxes: Sequence[Box]) -> None:
    from matplotlib.collections import PolyCollection

    corners = [
        [(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)]
        for b in boxes
    ]
    axes.add_collection(
        PolyCollection(corners, facecolors=[b.fill for b in boxes], linewidths=0, zorder=1)
    )


def _lines(axes: Axes, lines: Sequence[Line]) -> None:
    from matplotlib.collections import LineCollection, PolyCollection

    ends = [[(line.x, line.y), (line.to_x, line.to_y)] for line in lines]
    colours = [line.colour for line in lines]
    axes.add_collection(LineCollection(ends, colors=colours, linewidths=_POINTS, zorder=1))
    heads = [_head(line) for line in lines if line.arrow]
    fills = [line.colour for line in lines if line.arrow]
    axes.add_collection(PolyCollection(heads, facecolors=fills, linewidths=0, zorder=1))


def _head(line: Line) -> list[tuple[float, float]]:
    """The three corners of an arrow head whose tip is the end of the line."""
    length = math.hypot(line.to_x - line.x, line.to_y - line.y) or 1.0
    along = (line.to_x - line.x) / length * _HEAD
    across = (line.to_y - line.y) / length * _HEAD
    x, y = line.to_x - along, line.to_y - across
    left = (x - across / 2, y + along / 2)
    right = (x + across / 2, y - along / 2)
    return [(line.to_x, line.to_y), left, right]


def _label(axes: Axes, label: Label) -> None:
    axes.text(
        label.x,
        label.y,
        label.text,
        fontsize=label.size * _POINTS,
        color=label.colour,
        ha=_ALIGN[label.anchor],
        va="center_baseline",
        fontweight="bold" if label.bold else "normal",
        parse_math=False,
        zorder=2,
    )
