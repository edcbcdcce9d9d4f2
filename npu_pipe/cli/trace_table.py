"""An analysis as tables and sentences, for people: one screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table

from npu_pipe.cli.table import make_table, open_console
from npu_pipe.timeline.compare import Parts
from npu_pipe.timeline.critical import Leg, Piece, legs, parts_of
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.summary import headline
from npu_pipe.timeline.times import TimeScale
from npu_pipe.timeline.usage import RankUse
from npu_pipe.train.analysis import Analysis

__all__ = ["print_analysis"]

_MOST_STAYS, _FARTHEST = 10, 3


def print_analysis(analysis: Analysis, *, name: str) -> None:
    """On stdout, as wide as the terminal."""
    console = open_console()
    scale = _scale(analysis.window.timeline.makespan)
    for line in _head(analysis, scale, name):
        console.print(escape(line))
    console.print("\nMeasured (predicted); hidden and exposed: transfers that the rank receives")
    console.print(_times(analysis, scale))
    if analysis.window.footprint is not None:
        console.print("\nMeasured (predicted), without optimizer state")
        console.print(_memory(analysis))
    console.print(f"\nCritical path: {_parts(parts_of(analysis.path), scale)}")
    console.print(_path(analysis, scale))
    for title, lines in (
        ("Farthest from the prediction", _farthest(analysis, scale)),
        ("What would gain most, simulated with these costs", _changes(analysis)),
    ):
        console.print(f"\n{title}")
        for line in lines:
            console.print(escape(line), no_wrap=True, overflow="ellipsis")


def _head(analysis: Analysis, scale: TimeScale, name: str) -> Iterator[str]:
    measured, window = analysis.window.timeline, analysis.window
    yield f"{name}, update {window.step}: {headline(measured.schedule)}"
    predicted, difference = analysis.predicted.makespan, analysis.comparison.makespan_us
    share = f" ({difference / predicted:+.1%})" if predicted else ""
    yield (
        f"the window took {scale.text(measured.makespan)}, predicted {scale.text(predicted)}: "
        f"{_signed(difference, scale)}{share}"
    )
    yield f"that is on the critical path {_parts(analysis.path_difference, scale, signed=True)}"
    spent = [
        f"{phase} {_text(longest, scale)}"
        for phase in Phase
        if (longest := max(dict(use.phases).get(phase, 0.0) for use in analysis.uses)) > 0
    ]
    if spent:
        yield f"phases, on the slowest rank: {', '.join(spent)} (the loss in F)"


def _times(analysis: Analysis, scale: TimeScale) -> Table:
    unit = scale.symbol
    names = ["rank", "busy\n%", "waiting\n%", "idle\n%", f"mostly for\n{unit}"]
    names += [f"longest\n{unit}", f"hidden\n{unit}", f"exposed\n{unit}"]
    table = make_table(numbers=names)
    makespans = (analysis.window.timeline.makespan, analysis.predicted.makespan)

    def cell(field: str, uses: tuple[RankUse, RankUse]) -> str:
        measured, predicted = (
            abs(getattr(use, field)) / (makespan or 1.0) * 100
            for use, makespan in zip(uses, makespans, strict=True)
        )
        return f"{measured:.1f} ({predicted:.1f})"

    for uses in zip(analysis.uses, analysis.predicted_uses, strict=True):
        waited = uses[0].waited_for[0] if uses[0].waited_for else None
        table.add_row(
            str(uses[0].rank),
            *(cell(field, uses) for field in ("busy_us", "waiting_us", "idle_us")),
            f"rank {waited.source}: {_number(waited.waiting_us, scale)}" if waited else "",
            f"{waited.longest} {_number(waited.longest_us, scale)}" if waited else "",
            _number(uses[0].hidden_us, scale),
            _number(uses[0].exposed_us, scale),
        )
    return table


def _memory(analysis: Analysis) -> Table:
    """In MB of 1e6 bytes."""
    footprint, predicted = analysis.window.footprint, analysis.predicted_bytes
    assert footprint is not None
    assert predicted is not None
    names = ("rank", "peak activations", "held\nMB", "highest while running\nMB")
    table = make_table(numbers=names)
    peaks = analysis.window.timeline.peak_activations, analysis.predicted.peak_activations
    columns = (*peaks, footprint.held_bytes, predicted, footprint.highest_bytes)
    for rank, row in enumerate(zip(*columns, strict=True)):
        peak, wanted, held, expected, highest = row
        table.add_row(
            str(rank),
            f"{peak} ({wanted})",
            f"{held / 1e6:.3g} ({expected / 1e6:.3g})",
            f"{highest / 1e6:.3g}",
        )
    return table


def _path(analysis: Analysis, scale: TimeScale) -> Table:
    """The legs in the order of time, each with the transfer before it; of many, the longest."""
    unit = scale.symbol
    names = [f"from\n{unit}", f"to\n{unit}", "rank", "actions", f"compute\n{unit}"]
    names += [f"waiting\n{unit}", "after transfer", f"of\n{unit}"]
    table = make_table(numbers=names)
    stays = _stays(analysis.path)
    longest = sorted(stays, key=lambda stay: -stay.parts.total_us)[:_MOST_STAYS]
    left_out: list[_Stay] = []
    for stay in (*stays, None):
        if stay is not None and stay not in longest:
            left_out.append(stay)
            continue
        if left_out:
            parts = Parts.sum(each.parts for each in left_out)
            words = "1 shorter one" if len(left_out) == 1 else f"{len(left_out)} shorter ones"
            table.add_row("", "..", "", words, *_cells(parts, scale))
            left_out = []
        if stay is not None:
            table.add_row(
                scale.number(stay.leg.end_us - stay.leg.parts.total_us),
                scale.number(stay.leg.end_us),
                str(stay.leg.rank),
                _actions(stay.leg),
                *_cells(stay.parts, scale, transfer=stay.transfer),
            )
    return table


class _Stay(NamedTuple):
    """The path on one rank, and the transfers that brought it there. parts: of both."""

    leg: Leg
    transfer: str
    parts: Parts


def _stays(path: tuple[Piece, ...]) -> list[_Stay]:
    stays: list[_Stay] = []
    brought: list[Leg] = []
    for leg in legs(path):
        if leg.target != leg.rank:
            brought.append(leg)
            continue
        parts = Parts.sum(each.parts for each in (*brought, leg))
        stays.append(_Stay(leg, brought[-1].first if brought else "", parts))
        brought = []
    return stays


def _actions(leg: Leg) -> str:
    return leg.first if leg.steps <= 1 else f"{leg.first} .. {leg.last}, {leg.steps} actions"


def _cells(parts: Parts, scale: TimeScale, *, transfer: str = "") -> list[str]:
    compute, moved, waiting = (_number(time, scale) if time > 0 else "" for time in parts)
    return [compute, waiting, transfer, moved]


def _farthest(analysis: Analysis, scale: TimeScale) -> Iterator[str]:
    largest = analysis.comparison.largest[:_FARTHEST]
    if not largest:
        yield "  nothing differs"
    for each in largest:
        yield (
            f"  {each.action} on rank {each.rank}: {_signed(each.own.total_us, scale)}: "
            f"{_parts(each.own, scale, signed=True)}"
        )


def _changes(analysis: Analysis) -> Iterator[str]:
    for change in analysis.changes:
        yield f"  {change.gain:>6.1%} less time a microbatch: {change.what}"
        if change.price:
            yield f"          {change.price}"
    if not analysis.changes:
        yield "  nothing of these helps: moving a layer, more microbatches, another schedule"


def _parts(parts: Parts, scale: TimeScale, *, signed: bool = False) -> str:
    """Its parts that are not zero."""
    shown = [
        f"{name} {_signed(time, scale) if signed else _text(time, scale)}"
        for name, time in zip(("compute", "transfer", "waiting"), parts, strict=True)
        if abs(time) >= 1e-3
    ]
    return ", ".join(shown) or "nothing"


def _signed(time: float, scale: TimeScale) -> str:
    return f"{'-' if time < 0 else '+'}{_text(abs(time), scale)}"


def _scale(makespan: float) -> TimeScale:
    """Milliseconds suit the makespan and its parts, unless it is very short or long."""
    if makespan < 1e3:
        return TimeScale("us", 1.0)
    return TimeScale("ms", 1e3) if makespan < 1e8 else TimeScale("s", 1e6)


def _number(time: float, scale: TimeScale) -> str:
    """To three digits, in the unit of the scale."""
    value = float(f"{time / scale.size:.3g}")
    return f"{value:g}" if value >= 1e-3 else "0"


def _text(time: float, scale: TimeScale) -> str:
    return f"{_number(time, scale)} {scale.symbol}".rstrip()
