"""The critical path: what the makespan was made of, from the last end back to time 0.

rank 0  |0F0|>                              |0B3|     0F0, its transfer, 1F0 .. 1B3, the transfer
rank 1       |1F0|1B0|1F1| ... |1B3|>                 back, 0B3: were one of these shorter, the
                                                      window would be, too

Each step back goes to what ended last of all that was waited for: the step before on the rank,
or the transfer of an input; from a transfer to the step that issued it, the transfer before it
between the two ranks, or the step whose beginning made room to receive it. Which those are, the
program says. Where none of them was running the piece is waiting: the runtime's own time.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from npu_pipe.ir.program import Program
from npu_pipe.timeline.compare import Parts
from npu_pipe.timeline.flight import Flight
from npu_pipe.timeline.timeline import Span, Timeline
from npu_pipe.timeline.web import Web

__all__ = ["Leg", "Piece", "PieceKind", "critical_path", "legs", "parts_of"]


class PieceKind(enum.StrEnum):
    """What ran during a piece."""

    COMPUTE = "compute"
    TRANSFER = "transfer"
    WAITING = "waiting"


class Piece(NamedTuple):
    """A stretch of the path. Pieces lie end to end, from 0 to the makespan.

    rank: where it ran; of a transfer, where it came from. target: where a transfer went, else
        the same.
    name: the step, or the RECV of the transfer; of waiting, what it was waited with.
    """

    kind: PieceKind
    rank: int
    target: int
    name: str
    start_us: float
    end_us: float


class Leg(NamedTuple):
    """Pieces of the path in a row on one rank, or one transfer.

    first, last: names of steps, or the RECV. steps: how many there are.
    """

    rank: int
    target: int
    first: str
    last: str
    steps: int
    start_us: float
    end_us: float
    parts: Parts


def critical_path(timeline: Timeline, program: Program) -> tuple[Piece, ...]:
    """The pieces in the order of time.

    program: what ran, or was simulated; it says what a transfer could wait for.
    """
    if not timeline.compute:
        return ()
    web = Web(timeline, program)
    node: Span | Flight = max(timeline.compute, key=lambda span: span.end_us)
    time = timeline.makespan
    pieces: list[Piece] = []
    left = 4 * (len(timeline.compute) + len(timeline.transfers)) + 4  # clocks that differ
    while time > 0 and left:
        left -= 1
        start = min(max(node.start_us, 0.0), time)
        if start < time:
            pieces.append(_piece(node, start, time))
        before = web.before(node)
        end = max(min(before.end_us, start), 0.0) if before else 0.0
        if end < start:
            pieces.append(_gap(node, end, start))
        if before is None:
            break
        node, time = before, end
    return tuple(reversed(pieces))


def legs(path: tuple[Piece, ...]) -> tuple[Leg, ...]:
    """The path as a short list: what runs on one rank without a break is one entry."""
    found: list[Leg] = []
    for piece in path:
        parts = Parts(**{f"{piece.kind}_us": piece.end_us - piece.start_us})
        steps = int(piece.kind is not PieceKind.WAITING)
        leg = Leg(*piece[1:4], piece.name, steps, piece.start_us, piece.end_us, parts)
        last = found[-1] if found else None
        goes_on = last is not None and last[:2] == leg[:2] and piece.kind is not PieceKind.TRANSFER
        if last is None or not goes_on:
            found.append(leg)
        else:
            found[-1] = last._replace(
                last=leg.last if steps else last.last,
                steps=last.steps + steps,
                end_us=leg.end_us,
                parts=Parts.sum((last.parts, parts)),
            )
    return tuple(found)


def parts_of(path: tuple[Piece, ...]) -> Parts:
    """What the path is made of: the makespan in three parts."""
    return Parts.sum(leg.parts for leg in legs(path))


def _piece(node: Span | Flight, start: float, end: float) -> Piece:
    if isinstance(node, Flight):
        name = str(node.receive)
        return Piece(PieceKind.TRANSFER, node.source, node.target, name, start, end)
    return Piece(PieceKind.COMPUTE, node.rank, node.rank, str(node.action), start, end)


def _gap(node: Span | Flight, start: float, end: float) -> Piece:
    rank = node.source if isinstance(node, Flight) else node.rank
    name = str(node.receive if isinstance(node, Flight) else node.action)
    return Piece(PieceKind.WAITING, rank, rank, name, start, end)
