"""A comparison for programs. Keys stay as long as the version does.

{"format": "npu_pipe.plan", "version": 1, "ranks": 4, "microbatches": 8, "schedules": [{"name": ...

Times are in the unit of the costs, memory in bytes, shares from 0 to 1. What is not known or was
not asked for is null.
"""

from __future__ import annotations

from typing import Any

from npu_pipe.planner.assess import Assessment
from npu_pipe.planner.comparison import Comparison
from npu_pipe.planner.robustness import JITTER, SLOW_LINK, SLOW_RANK
from npu_pipe.planner.searched import Searched
from npu_pipe.planner.worth import GOOD_BUBBLE
from npu_pipe.simulator.memory import Peak

__all__ = ["to_json_value"]

VERSION = 1


def to_json_value(comparison: Comparison) -> dict[str, Any]:
    """Dicts, lists, numbers, strings, None."""
    limits, advice, worth = comparison.limits, comparison.advice, comparison.worth
    return {
        "format": "npu_pipe.plan",
        "version": VERSION,
        "ranks": comparison.ranks,
        "microbatches": comparison.microbatches,
        "seed": comparison.seed,
        "samples": comparison.samples,
        "disturbances": {"jitter": JITTER, "slow_link": SLOW_LINK, "slow_rank": SLOW_RANK},
        "limits": {"activations": limits.activations, "memory_bytes": limits.memory_bytes},
        "schedules": [_row(comparison, row) for row in comparison.rows],
        "refused": [
            {
                "name": refusal.name,
                "rule": refusal.error.rule,
                "facts": refusal.error.facts,
                "cure": refusal.error.cure,
            }
            for refusal in comparison.refused
        ],
        "search": _search(comparison.searched) if comparison.searched else None,
        "not_searched": comparison.unsearched,
        "recommended": advice.chosen.name if advice.chosen else None,
        "reason": advice.reason,
        "notes": list(advice.notes),
        "worth": {
            "speedup": worth.speedup,
            "data_parallel_time": worth.copies_time,
            "one_device_bytes": worth.one_device_bytes,
            "fits_one_device": worth.fits_one_device,
            "target_bubble_ratio": GOOD_BUBBLE,
            "microbatches_for_target": worth.microbatches,
            "sentences": list(worth.sentences),
        },
    }


def _row(comparison: Comparison, row: Assessment) -> dict[str, Any]:
    over = comparison.limits.broken_by(row)
    return {
        "name": row.name,
        "schedule": row.schedule.name,
        "chunks": row.chunks,
        "stages": row.schedule.stages,
        "makespan": row.makespan,
        "span": row.span,
        "bubble_ratio": row.bubble_ratio,
        "busy": list(row.busy),
        "peak_activations": list(row.peak_activations),
        "peak_shares": row.held,
        "peak_bytes": [_peak(peak) for peak in row.peaks] if row.peaks else None,
        "transfers": [
            {"ranks": list(ranks), "count": count} for ranks, count in row.transfers.items()
        ],
        "parameter_copies": row.copies,
        "split_backward": row.is_split,
        "fused_pairs": row.has_pairs,
        "loss": row.losses._asdict(),
        "within_limits": over is None,
        "over_limits": over,
    }


def _peak(peak: Peak) -> dict[str, Any]:
    return {
        "total": peak.total_bytes,
        "parameters": peak.parameter_bytes,
        "action": str(peak.action) if peak.action else None,
    }


def _search(searched: Searched) -> dict[str, Any]:
    found = searched.found
    return {
        "makespan": found.makespan,
        "span": found.span,
        "lower_bound": found.lower_bound,
        "gap": found.gap,
        "proved": found.proved,
        "seconds": found.seconds,
        "max_activations": list(searched.caps),
        "permutation": list(found.permutation),
    }
