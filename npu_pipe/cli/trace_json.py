"""An analysis for programs. Keys stay as long as the version does.

{"format": "npu_pipe.trace", "version": 1, "step": 150, "makespan_us": {"measured": ...

Times are microseconds, memory is in bytes, shares are from 0 to 1; differences are measured less
predicted. What was not measured is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_pipe.timeline.compare import Parts
from npu_pipe.timeline.critical import Piece
from npu_pipe.timeline.usage import RankUse
from npu_pipe.train.analysis import Analysis

__all__ = ["to_json_value"]

VERSION = 1


def to_json_value(analysis: Analysis) -> dict[str, Any]:
    """Dicts, lists, numbers, strings, None."""
    window, predicted, comparison = analysis.window, analysis.predicted, analysis.comparison
    measured = window.timeline
    return {
        "format": "npu_pipe.trace",
        "version": VERSION,
        "step": window.step,
        "schedule": measured.schedule.name,
        "microbatches": measured.schedule.microbatches,
        "makespan_us": {"measured": measured.makespan, "predicted": predicted.makespan},
        "step_us": measured.step_us,
        "bubble_ratio": {"measured": measured.bubble_ratio, "predicted": predicted.bubble_ratio},
        "difference_us": {
            "makespan": comparison.makespan_us,
            "critical_path": _parts(analysis.path_difference),
        },
        "ranks": [_rank(analysis, rank) for rank in range(measured.schedule.ranks)],
        "critical_path": {
            "measured": _path(analysis.path),
            "predicted": _path(analysis.predicted_path),
        },
        "actions": [
            {
                "rank": each.rank,
                "action": str(each.action),
                "difference_us": _parts(each.own),
                "end_us": each.end_us,
            }
            for each in comparison.differences
        ],
        "changes": [
            {
                "kind": change.kind.name.lower(),
                "what": change.what,
                "price": change.price,
                "makespan_us": change.makespan_us,
                "gain": change.gain,
            }
            for change in analysis.changes
        ],
    }


def _rank(analysis: Analysis, rank: int) -> dict[str, Any]:
    footprint, predicted_bytes = analysis.window.footprint, analysis.predicted_bytes
    return {
        "rank": rank,
        "stages": list(analysis.window.timeline.schedule.stages_of(rank)),
        "measured": _use(analysis.uses[rank]),
        "predicted": _use(analysis.predicted_uses[rank]),
        "difference_us": _parts(analysis.comparison.ranks[rank]),
        "peak_activations": {
            "measured": analysis.window.timeline.peak_activations[rank],
            "predicted": analysis.predicted.peak_activations[rank],
        },
        "held_bytes": {
            "measured": footprint.held_bytes[rank],
            "predicted": predicted_bytes[rank],
            "highest": footprint.highest_bytes[rank],
        }
        if footprint is not None and predicted_bytes is not None
        else None,
    }


def _use(use: RankUse) -> dict[str, Any]:
    return {
        "busy_us": use.busy_us,
        "waiting_us": use.waiting_us,
        "idle_us": use.idle_us,
        "hidden_transfer_us": use.hidden_us,
        "exposed_transfer_us": use.exposed_us,
        "waited_for": [
            {
                "rank": each.source,
                "waiting_us": each.waiting_us,
                "transfer_us": each.flight_us,
                "longest": str(each.longest),
                "longest_us": each.longest_us,
            }
            for each in use.waited_for
        ],
        "phases_us": {phase.value: time for phase, time in use.phases},
    }


def _path(path: Sequence[Piece]) -> list[dict[str, Any]]:
    return [{**piece._asdict(), "kind": piece.kind.value} for piece in path]


def _parts(parts: Parts) -> dict[str, float]:
    return {"compute": parts.compute_us, "transfer": parts.transfer_us, "waiting": parts.waiting_us}
