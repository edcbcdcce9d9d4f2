"""Predicted above measured, on one scale of time, with the critical paths marked.

1f1b: 2 ranks, 4 microbatches: update 150
predicted: makespan 12 ms, bubble 20.0 %, peak activations 2
rank 0  |F0|F1|  | B0 |F2| B1 |
         ==                ====                the path: a line under bars, and along transfers
rank 1     |F0| B0 |F1| B1 |
measured: makespan 13 ms, bubble 24.1 %, peak activations 2
rank 0  ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from npu_pipe.timeline.critical import Piece, PieceKind
from npu_pipe.timeline.layout import MARGIN, NOTES, axis, frame_for, legend, plot, rows
from npu_pipe.timeline.marks import Frame, bars, stacks
from npu_pipe.timeline.palette import GREY, INK, PATH
from npu_pipe.timeline.shapes import Box, Label, Line, Shape, Sheet
from npu_pipe.timeline.summary import summary
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.times import TimeScale, time_scale

__all__ = ["lay_pair"]

_BLOCK = 78.0  # from the end of one plot to the first rank of the next


def lay_pair(
    predicted: Timeline,
    measured: Timeline,
    paths: tuple[Sequence[Piece], Sequence[Piece]],
    *,
    title: str,
) -> Sheet:
    """The picture. paths: the critical ones, of each in turn."""
    scale = time_scale(measured)
    longest = max(predicted.makespan, measured.makespan)
    width, stacked = plot(measured)
    shapes: list[Shape] = [Label(MARGIN, 28, title, 16, INK, bold=True)]
    end, top = 0.0, 78.0
    for name, timeline, path in zip(
        ("predicted", "measured"), (predicted, measured), paths, strict=True
    ):
        frame = frame_for(timeline, width / (longest or 1.0), width=width, top=top)
        bottom = frame.y(timeline.schedule.ranks - 1) + frame.bar
        heading = Label(MARGIN, top - 27, f"{name}: {summary(timeline)}", 12, GREY)
        shapes += [
            heading,
            *rows(timeline, frame),
            *axis(longest, frame, scale, bottom),
            *(stacks if stacked else bars)(timeline, frame, scale),
            *_marked(path, frame, scale),
        ]
        end = max(end, frame.left + frame.width + NOTES, heading.x + heading.width)
        top = bottom + _BLOCK
    y = top - _BLOCK + 62
    below = list(legend(measured, y, stacked=stacked, lanes=False))
    x = max(shape.x + shape.width for shape in below if isinstance(shape, Label)) + 18
    below += [Box(x, y - 1.5, 22, 3, PATH), Label(x + 28, y, "critical path", 11, INK)]
    end = max(end, *(s.x + s.width for s in (shapes[0], below[-1]) if isinstance(s, Label)))
    return Sheet(end + MARGIN, y + 22, title, summary(measured), (*shapes, *below))


def _marked(path: Sequence[Piece], frame: Frame, scale: TimeScale) -> Iterator[Box | Line]:
    """A line under what was computed, thin where nothing ran, and one along each transfer."""
    for piece in path:
        x, to_x = frame.x(piece.start_us), frame.x(piece.end_us)
        hint = f"critical: {piece.name}, {scale.text(piece.end_us - piece.start_us)}"
        y = frame.y(piece.rank) + frame.bar
        if piece.kind is PieceKind.TRANSFER:
            down = piece.target > piece.rank
            to_y = frame.y(piece.target) + (0.0 if down else frame.bar + 1.5)
            yield Line(x, y + 1.5 if down else frame.y(piece.rank), to_x, to_y, PATH, hint=hint)
        else:
            height = 3.0 if piece.kind is PieceKind.COMPUTE else 1.0
            yield Box(x, y + 1.5 - height / 2, to_x - x, height, PATH, hint)
