"""A timeline laid out as shapes: what every picture of it shows, and where.

1f1b: 4 ranks, 8 microbatches
makespan 33, bubble 27.3 %, peak activations 4
rank 0  |F0|F1|F2|F3|      | B0 |F4| B1 |      idle 27.3 %, peak 4
           \\  \\  \\          /         /          arrows: transfers, in the gap
rank 1      |F0|F1|F2|   | B0 |F3| B1 |        idle 27.3 %, peak 3
        0        5        10        15
legend
"""

from __future__ import annotations

from collections.abc import Iterator

from npu_pipe.ir.action import Kind, flatten
from npu_pipe.ir.program import Lane
from npu_pipe.timeline.marks import Frame, arrows, bars, stacks
from npu_pipe.timeline.palette import GREY, IDLE, INK, KIND_NAMES, LANE_COLOURS, Chunks, fill
from npu_pipe.timeline.shapes import Anchor, Box, Label, Line, Shape, Sheet, text_width
from npu_pipe.timeline.summary import headline, summary
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.times import TimeScale, nice_step, time_scale

__all__ = ["MARGIN", "NOTES", "axis", "frame_for", "lay_out", "legend", "plot", "rows"]

MARGIN, _TOP = 20.0, 78.0
NOTES = 132.0  # what stands to the right of the plot
_NARROWEST, _WIDE, _WIDEST, _STACKED = 820.0, 1600.0, 4200.0, 1200.0  # plots
_LEAST_BAR = 2.5  # pixels; below it bars become stacks


def lay_out(timeline: Timeline, *, title: str | None = None) -> Sheet:
    """The picture of a timeline. title: None for the schedule's name and sizes.

    The plot is as wide as it takes for a usual bar to hold the number of its microbatch, and
    its kind too where that is not very wide. Where bars would be too narrow to see, columns
    show each kind's share of the time instead.
    """
    scale = time_scale(timeline)
    title = title or headline(timeline.schedule)
    width, stacked = plot(timeline)
    frame = frame_for(timeline, width / (timeline.makespan or 1.0), width=width, top=_TOP)
    bottom = frame.y(timeline.schedule.ranks - 1) + frame.bar
    transfers = [] if stacked or frame.bar < 20 else list(arrows(timeline, frame, scale))
    shapes: list[Shape] = [
        Label(MARGIN, 28, title, 16, INK, bold=True),
        Label(MARGIN, 51, summary(timeline), 12, GREY),
        *rows(timeline, frame),
        *axis(timeline.makespan, frame, scale, bottom),
        *transfers,
        *(stacks if stacked else bars)(timeline, frame, scale),
    ]
    below = list(legend(timeline, bottom + 62, stacked=stacked, lanes=bool(transfers)))
    end = max(shape.x + shape.width for shape in (*below, *shapes[:2]) if isinstance(shape, Label))
    sheet_width = max(frame.left + frame.width + NOTES, end) + MARGIN
    return Sheet(sheet_width, bottom + 84, title, summary(timeline), (*shapes, *below))


def plot(timeline: Timeline) -> tuple[float, bool]:
    """The width of the plot, and whether its bars are too narrow to draw."""
    lengths = sorted(s.end_us - s.start_us for s in timeline.compute if s.end_us > s.start_us)
    if not lengths:
        return _NARROWEST, False
    short = lengths[len(lengths) // 10] / timeline.makespan
    number = str(timeline.schedule.microbatches - 1)
    width = max((text_width(f"F{number}", 11) + 4) / short, _NARROWEST)
    if width > _WIDE:
        width = min(max((text_width(number, 11) + 4) / short, _WIDE), _WIDEST)
    return (_STACKED, True) if short * width < _LEAST_BAR else (width, False)


def frame_for(timeline: Timeline, per_time: float, *, width: float, top: float) -> Frame:
    """The frame of a plot; per_time: pixels in one unit of time."""
    ranks, stages = timeline.schedule.ranks, Chunks(timeline.schedule).stages(0)
    bar, gap = (26.0, 18.0 if timeline.transfers else 10.0) if ranks <= 24 else (14.0, 4.0)
    names = max(text_width(f"rank {ranks - 1}", 12), text_width(_held(stages), 9))
    return Frame(MARGIN + names + 10, width, per_time, top, bar, bar + gap)


def rows(timeline: Timeline, frame: Frame) -> Iterator[Shape]:
    """Per rank its name, its band, which shows where it is idle, and its numbers."""
    chunks = Chunks(timeline.schedule)
    with_stages = chunks.most > 1 and frame.bar > 20
    makespan = timeline.makespan or 1.0
    numbers = zip(timeline.busy_us, timeline.peak_activations, strict=True)
    for rank, (busy, peak) in enumerate(numbers):
        middle, left = frame.y(rank) + frame.bar / 2, frame.left - 10
        yield Box(frame.left, frame.y(rank), frame.width, frame.bar, IDLE)
        yield Label(left, middle - 6 * with_stages, f"rank {rank}", 12, INK, Anchor.END)
        if with_stages:
            yield Label(left, middle + 8, _held(chunks.stages(rank)), 9, GREY, Anchor.END)
        idle = 1 - busy / makespan
        notes = f"idle {idle:.1%}, peak {peak}"
        yield Label(frame.left + frame.width + 12, middle, notes, 11, GREY)


def _held(stages: tuple[int, ...]) -> str:
    """ "stages 0 4"; of many only the first ones."""
    return f"stages {' '.join(map(str, stages[:4]))}{' ..' * (len(stages) > 4)}"


def axis(makespan: float, frame: Frame, scale: TimeScale, bottom: float) -> Iterator[Shape]:
    """Lines at round times, from above the first rank to below the last, and their labels."""
    makespan = makespan or 1.0
    step = nice_step(makespan / scale.size, int(frame.width / 70)) * scale.size
    for tick in range(int(makespan / step * (1 + 1e-9)) + 1):
        x = frame.x(tick * step)
        yield Line(x, frame.top - 6, x, bottom + 6, "#d3d8df")
        yield Label(x, bottom + 16, scale.number(tick * step), 10, GREY, Anchor.MIDDLE)
    yield Label(frame.left + frame.width / 2, bottom + 35, scale.axis, 11, GREY, Anchor.MIDDLE)


def legend(timeline: Timeline, y: float, *, stacked: bool, lanes: bool) -> Iterator[Shape]:
    """What the colours mean."""
    used = {action.kind for span in timeline.compute for action in flatten(span.action)}
    swatches = [(fill(kind), f"{kind} {name}") for kind, name in KIND_NAMES.items() if kind in used]
    if not stacked and Chunks(timeline.schedule).most > 1:
        swatches.append((fill(Kind.F, 1.0), "lighter: later stage of the rank"))
    swatches.append((IDLE, "idle"))
    x = MARGIN
    for colour, text in swatches:
        yield Box(x, y - 6, 18, 12, colour)
        yield (label := Label(x + 24, y, text, 11, INK))
        x = label.x + label.width + 18
    for lane in Lane if lanes else ():
        yield Line(x, y, x + 22, y, LANE_COLOURS[lane], arrow=True)
        yield (label := Label(x + 28, y, f"transfer {lane}", 11, INK))
        x = label.x + label.width + 18
