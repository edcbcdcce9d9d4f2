"""What a timeline looks like inside its frame: bars, arrows and stacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from npu_pipe.ir.action import Action, flatten
from npu_pipe.ir.program import peer_of, route
from npu_pipe.timeline.palette import LANE_COLOURS, Chunks, fill, ink
from npu_pipe.timeline.shapes import Anchor, Box, Label, Line, text_width
from npu_pipe.timeline.shares import shares
from npu_pipe.timeline.timeline import Span, Timeline
from npu_pipe.timeline.times import TimeScale

__all__ = ["Frame", "arrows", "bars", "stacks"]

_SIZE = 11.0
_COLUMNS = 240
_MOST_ARROWS = 4000  # more are only noise


@dataclass(frozen=True, slots=True)
class Frame:
    """Where times and ranks lie, in pixels.

    left, width: the plot's; per_time: pixels in one unit of the timeline's time.
    top: of the bar of rank 0; bar: its height; pitch: from one rank to the next.
    """

    left: float
    width: float
    per_time: float
    top: float
    bar: float
    pitch: float

    def x(self, time: float) -> float:
        return self.left + time * self.per_time

    def y(self, rank: int) -> float:
        return self.top + rank * self.pitch


def bars(timeline: Timeline, frame: Frame, scale: TimeScale) -> Iterator[Box | Label]:
    """A bar a step, with its name where that fits; a fused pair is split across."""
    chunks = Chunks(timeline.schedule)
    spans = [span for span in timeline.compute if span.end_us > span.start_us]
    usual = _usual_form(spans, frame, chunks)
    for span in spans:
        parts = flatten(span.action)
        x = frame.x(span.start_us) + 0.5
        width = max((span.end_us - span.start_us) * frame.per_time - 1, 0.5)
        height = frame.bar / len(parts)
        size = min(_SIZE, height * 0.75)
        hint = f"{span.action} on rank {span.rank}: {_period(span, scale)}"
        for part, action in enumerate(parts):
            y = frame.y(span.rank) + part * height
            colour = fill(action.kind, chunks.lightness(span.rank, action))
            yield Box(x, y, width, height, colour, hint)
            forms = _forms(action, chunks)[usual:]
            name = next((form for form in forms if text_width(form, size) + 2 <= width), "")
            if name:
                middle = x + width / 2
                yield Label(middle, y + height / 2, name, size, ink(colour), Anchor.MIDDLE)


def arrows(timeline: Timeline, frame: Frame, scale: TimeScale) -> Iterator[Line]:
    """From the start of each send, at its rank, to the end of its receive.

    Only in the gaps between rows: an arrow passes behind the ranks that it is not for.
    """
    if len(timeline.transfers) > 2 * _MOST_ARROWS:
        return
    ends = {span.action: span for span in timeline.transfers}
    for span in timeline.transfers:
        assert isinstance(span.action, Action)
        receive = ends.get(peer_of(span.action)) if span.action.kind.is_send else None
        if receive is None:
            continue
        colour = LANE_COLOURS[route(timeline.schedule, span.action).lane]
        took = scale.text(receive.end_us - span.start_us)
        hint = f"{span.action} to {receive.action}: took {took}"
        x, to_x = frame.x(span.start_us), frame.x(receive.end_us)
        step = 1 if receive.rank > span.rank else -1
        leave, arrive = (frame.bar, 0.0) if step > 0 else (0.0, frame.bar)
        y, to_y = frame.y(span.rank) + leave, frame.y(receive.rank) + arrive
        slope = (to_x - x) / (to_y - y)
        for rank in range(span.rank, receive.rank, step):
            y0, y1 = frame.y(rank) + leave, frame.y(rank + step) + arrive
            x0, x1 = x + (y0 - y) * slope, x + (y1 - y) * slope
            yield Line(x0, y0, x1, y1, colour, arrow=rank + step == receive.rank, hint=hint)


def stacks(timeline: Timeline, frame: Frame, scale: TimeScale) -> Iterator[Box]:
    """Per rank and column of time, the share of each kind, from the bottom up."""
    step = timeline.makespan / _COLUMNS
    width = step * frame.per_time
    for rank, track in enumerate(shares(timeline, _COLUMNS)):
        for column, parts in enumerate(track):
            start, end = scale.number(column * step), scale.text((column + 1) * step)
            told = ", ".join(f"{kind} {share:.0%}" for kind, share in parts.items())
            floor = frame.y(rank) + frame.bar
            for kind, share in parts.items():
                floor -= frame.bar * share
                x, height = frame.x(column * step), frame.bar * share
                hint = f"rank {rank}, {start} to {end}: {told}"
                yield Box(x, floor, width, height, fill(kind), hint)


def _forms(action: Action, chunks: Chunks) -> tuple[str, str, str]:
    """Its names, longest first: 4F0, F0, 0."""
    return chunks.label(action), f"{action.kind}{action.microbatch}", str(action.microbatch)


def _usual_form(spans: list[Span], frame: Frame, chunks: Chunks) -> int:
    """The longest form that nearly all bars hold: bars shall look alike."""
    for form in range(2):
        narrow = sum(
            text_width(_forms(action, chunks)[form], _SIZE) + 3
            > (span.end_us - span.start_us) * frame.per_time
            for span in spans
            for action in flatten(span.action)
        )
        if narrow <= len(spans) // 10:
            return form
    return 2


def _period(span: Span, scale: TimeScale) -> str:
    start, end = scale.number(span.start_us), scale.text(span.end_us)
    return f"{start} to {end}, lasts {scale.text(span.end_us - span.start_us)}"
