"""Draw a timeline: as SVG by hand, as PNG by matplotlib, which paint one layout; or as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from npu_pipe.files import write_whole
from npu_pipe.timeline.critical import Piece
from npu_pipe.timeline.html import Panel, html
from npu_pipe.timeline.layout import lay_out
from npu_pipe.timeline.pair import lay_pair
from npu_pipe.timeline.png import png
from npu_pipe.timeline.svg import svg
from npu_pipe.timeline.timeline import Timeline

__all__ = ["draw_svg", "write_html", "write_pair", "write_png", "write_svg"]


def draw_svg(timeline: Timeline, *, title: str | None = None) -> str:
    """The picture as SVG text; bars and arrows say what they are when pointed at.

    title: None for the schedule's name and sizes.
    """
    return svg(lay_out(timeline, title=title))


def write_svg(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Write `draw_svg` to a file. Raises ConfigError when it cannot be written."""
    write_whole(draw_svg(timeline, title=title), path)


def write_png(timeline: Timeline, path: str | Path, *, title: str | None = None) -> None:
    """Write the picture as PNG.

    Raises ConfigError when matplotlib is missing or the file cannot be written.
    """
    write_whole(png(lay_out(timeline, title=title)), path)


def write_pair(
    predicted: Timeline,
    measured: Timeline,
    path: str | Path,
    *,
    critical: tuple[Sequence[Piece], Sequence[Piece]],
    title: str,
) -> None:
    """Write one above the other as SVG, with the critical path of each; see `lay_pair`.

    Raises ConfigError when the file cannot be written.
    """
    write_whole(svg(lay_pair(predicted, measured, critical, title=title)), path)


def write_html(panels: Sequence[Panel], path: str | Path) -> None:
    """Write a page with these timelines, one above the other; see `html`.

    Raises ConfigError when it cannot be written.
    """
    write_whole(html(panels), path)
