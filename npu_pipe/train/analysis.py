"""What a measured window was made of, next to what was predicted. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npu_pipe.lowering.lower import lower
from npu_pipe.planner.changes import Change, best_changes, unfused
from npu_pipe.simulator.program import simulate_program
from npu_pipe.timeline.compare import Comparison, Parts, compare
from npu_pipe.timeline.critical import Piece, critical_path, parts_of
from npu_pipe.timeline.picture import write_pair
from npu_pipe.timeline.summary import headline
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.usage import RankUse, usage
from npu_pipe.train.profile import profile
from npu_pipe.train.report import measured_costs
from npu_pipe.train.window import MeasuredWindow

__all__ = ["Analysis", "analyse", "write_comparison"]


@dataclass(frozen=True, slots=True)
class Analysis:
    """All that `npu-pipe trace` tells.

    predicted: what the simulator makes of the program that ran, with the costs of the window.
    uses, predicted_uses: per rank. path, predicted_path: the critical ones.
    path_difference: measured less predicted path; its total is that of the makespans.
    predicted_bytes: per rank, of what it holds; None if memory was not measured.
    changes: what would gain most, at most one of a kind.
    """

    window: MeasuredWindow
    predicted: Timeline
    comparison: Comparison
    uses: tuple[RankUse, ...]
    predicted_uses: tuple[RankUse, ...]
    path: tuple[Piece, ...]
    predicted_path: tuple[Piece, ...]
    path_difference: Parts
    predicted_bytes: tuple[float, ...] | None
    changes: tuple[Change, ...]


def analyse(window: MeasuredWindow) -> Analysis:
    """Simulate what was measured, and compare."""
    measured = window.timeline
    schedule = unfused(measured.schedule)
    program = lower(schedule, prefetch=window.prefetch)
    predicted = simulate_program(program, measured_costs(measured))
    path, predicted_path = (critical_path(each, program) for each in (measured, predicted))
    footprint = window.footprint
    return Analysis(
        window=window,
        predicted=predicted,
        comparison=compare(measured, predicted),
        uses=usage(measured),
        predicted_uses=usage(predicted),
        path=path,
        predicted_path=predicted_path,
        path_difference=parts_of(path).less(parts_of(predicted_path)),
        predicted_bytes=footprint.predicted_bytes(schedule) if footprint else None,
        changes=best_changes(
            measured.schedule, profile(measured), window.layers, prefetch=window.prefetch
        ),
    )


def write_comparison(analysis: Analysis, path: Path, *, folder: Path) -> None:
    """Draw predicted above measured as SVG. Raises ConfigError when it cannot be written."""
    window = analysis.window
    write_pair(
        analysis.predicted,
        window.timeline,
        path,
        critical=(analysis.predicted_path, analysis.path),
        title=f"{folder}, update {window.step}: {headline(window.timeline.schedule)}",
    )
