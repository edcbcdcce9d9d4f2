"""Which schedule to take, and why, in words made from the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from npu_pipe.api import simulate
from npu_pipe.planner.assess import Assessment
from npu_pipe.planner.limits import Limits, giga
from npu_pipe.planner.workload import Workload

__all__ = ["BASELINE", "Advice", "recommend"]

BASELINE = "1f1b"  # what others are compared with
_NEAR = 0.01  # makespans that differ less are as good as equal
_HEAVY = 2  # but not if one holds more than so many times what the other does
_FELT = 0.001  # less of a loss is no gain to speak of
_MANY = 10_000  # actions of a chunk above which nothing is played again for a sentence


@dataclass(frozen=True, slots=True)
class Advice:
    """chosen: None if no schedule keeps to the limits. reason: a sentence or two. notes: what
    else there is to know about the schedules."""

    chosen: Assessment | None
    reason: str
    notes: tuple[str, ...]


def recommend(rows: Sequence[Assessment], workload: Workload, limits: Limits) -> Advice:
    """Choose among ranked rows, of which there is at least one."""
    allowed = [row for row in rows if limits.broken_by(row) is None]
    if not allowed:
        return Advice(None, _nothing(rows, limits), ())
    fastest = allowed[0]
    near = [row for row in allowed if row.makespan <= fastest.makespan * (1 + _NEAR)]
    leanest = min(map(_weight, near))
    near = [row for row in near if _weight(row) <= leanest * _HEAVY]
    chosen = min(near, key=lambda row: tuple(_burdens(row).values()))
    baseline = next((row for row in rows if row.name == BASELINE), None)
    sentences = [_head(chosen, baseline), _needs(chosen)]
    if fastest is not chosen:
        sentences.append(_passed_over(fastest, chosen))
    notes = [
        *_out_of_reach(rows[0], chosen, limits),
        *_once(chosen, allowed),
        *_span_only(allowed),
        *_free_transfers(chosen, allowed, workload),
    ]
    if not workload.has_halves:
        notes.append(
            "The measured run had whole backwards; their I and W were taken as halves. Measure "
            "with a schedule that splits them before you rely on one that does."
        )
    return Advice(chosen, " ".join(filter(None, sentences)), tuple(notes))


def _burdens(row: Assessment) -> dict[str, float]:
    """What makes a schedule costlier to have than a near tie: the first that differs decides."""
    return {
        "holds the parameters twice": row.copies,
        "is nobody's rule but searched": row.name == "searched",
        "fuses pairs": row.has_pairs,
        "splits the backward": row.is_split,
        "cuts the model into more stages": row.chunks,
        "holds more": _weight(row),
        "transfers more": row.crossings,
        "is slower": row.makespan,
    }


def _head(chosen: Assessment, baseline: Assessment | None) -> str:
    text = f"Take {chosen.name}: makespan {chosen.scale.text(chosen.makespan)}"
    if baseline is None or baseline is chosen:
        return f"{text}, at most {_held(chosen)} a rank."
    saved = 1 - chosen.makespan / baseline.makespan
    times = chosen.crossings / baseline.crossings if baseline.crossings else 1.0
    parts = [
        f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'} than {BASELINE}'s "
        f"{chosen.scale.number(baseline.makespan)}",
        f"at most {_held(chosen)} a rank ({BASELINE}: {_held(baseline)})",
        "as many transfers" if times == 1 else f"{times:.3g} times the transfers",
    ]
    if chosen.copies > 1:
        parts.append("the parameters twice (to reduce their gradients is not counted)")
    return f"{text}, {', '.join(parts)}."


def _needs(chosen: Assessment) -> str:
    needs = []
    if chosen.is_split:
        needs.append("backwards split into I and W")
    if chosen.has_pairs:
        needs.append("forwards and backwards run as fused pairs")
    if chosen.chunks > 1:
        needs.append(f"a model cut into {chosen.schedule.stages} stages, {chosen.chunks} a rank")
    return f"It needs {' and '.join(needs)}." if needs else ""


def _passed_over(fastest: Assessment, chosen: Assessment) -> str:
    burdens, lighter = _burdens(fastest), _burdens(chosen)
    reason = next(word for word, burden in burdens.items() if burden != lighter[word])
    if _weight(fastest) > _weight(chosen) * _HEAVY:
        reason = "holds more"
    gain = 1 - fastest.makespan / chosen.makespan
    lead = f"takes {gain:.1%} less" if gain >= 0.0005 else "is as fast"
    return f"{fastest.name} {lead}, but {reason}."


def _out_of_reach(fastest: Assessment, chosen: Assessment, limits: Limits) -> list[str]:
    over, gain = limits.broken_by(fastest), 1 - fastest.makespan / chosen.makespan
    if over is None or gain < _NEAR:
        return []
    return [f"Without the limits {fastest.name} would take {gain:.1%} less; it {over}."]


def _once(chosen: Assessment, allowed: Sequence[Assessment]) -> list[str]:
    """The best without a second replica, whose reduction of gradients nobody has counted."""
    single = next((row for row in allowed if row.copies == 1), None)
    if chosen.copies == 1 or single is None:
        return []
    return [
        f"With the parameters once, {single.name} takes {single.scale.text(single.makespan)}, "
        f"{single.makespan / chosen.makespan - 1:.1%} more, and nothing has to be reduced."
    ]


def _span_only(allowed: Sequence[Assessment]) -> list[str]:
    """Schedules that buy with memory a shorter span, but not a shorter makespan."""
    notes = []
    for row in allowed:
        equals = [
            other
            for other in allowed
            if (other.chunks, other.copies, other.is_split) == (row.chunks, row.copies, True)
            and abs(other.makespan / row.makespan - 1) < _NEAR / 10
            and other.held < row.held
            and row.span < other.span * (1 - _NEAR)
        ]
        if equals:
            other = min(equals, key=lambda equal: equal.held)
            calmer = (
                f", and under jitter ({_percent(row.losses.jitter)} lost against "
                f"{_percent(other.losses.jitter)})"
            ) * (row.losses.jitter < other.losses.jitter - _FELT)
            notes.append(
                f"{row.name} has the shorter span, {row.scale.text(row.span)} against "
                f"{other.scale.number(other.span)}, but only the makespan of {other.name}, for "
                f"{row.held / other.held:.3g} times its activations: it gains when windows follow "
                f"each other without a flush{calmer}."
            )
    return notes


def _free_transfers(
    chosen: Assessment, allowed: Sequence[Assessment], workload: Workload
) -> list[str]:
    """If no transfer times were given: up to which ones the chunks still pay."""
    plain = [row for row in allowed if row.chunks == 1 and row.copies <= chosen.copies]
    if any(workload.transfer) or chosen.chunks == 1 or not plain:
        return []
    rival, schedule = plain[0], chosen.schedule
    text = "Transfers were taken as free, which favours many chunks"
    if schedule.ranks * schedule.microbatches > _MANY:
        return [f"{text}."]

    def is_ahead(transfer: float) -> bool:
        times = (transfer,) * (workload.layers - 1)
        slowed = replace(workload, transfer=times)
        ours, theirs = (
            simulate(row.schedule, slowed.stage_costs(row.schedule.stages)).makespan
            for row in (chosen, rival)
        )
        return ours < theirs

    low, high = 0.0, sum(workload.forward) / schedule.ranks
    if is_ahead(high):
        return []
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if is_ahead(middle) else (low, middle)
    share = low / (sum(workload.forward) / schedule.ranks)
    return [
        f"{text}: it stays ahead of {rival.name} while a transfer takes less than "
        f"{share:.0%} of a rank's forward ({chosen.scale.text(low)})."
    ]


def _nothing(rows: Sequence[Assessment], limits: Limits) -> str:
    text = "No schedule keeps to the limits"
    if limits.memory_bytes is not None:
        leanest = min(rows, key=lambda row: row.held_bytes or 0.0)
        peaks = leanest.peaks or ()
        fullest = max(peaks, key=lambda peak: peak.total_bytes)
        return (
            f"{text}: the leanest, {leanest.name}, {limits.broken_by(leanest)}, "
            f"{giga(fullest.parameter_bytes)} of it parameters (rank {fullest.rank}). Use more "
            "ranks, smaller microbatches or recompute."
        )
    leanest = min(rows, key=lambda row: row.held)
    return f"{text}: the leanest, {leanest.name}, {limits.broken_by(leanest)}. Raise the limit."


def _percent(share: float) -> str:
    return f"{round(share, 3) + 0.0:.1%}"  # and no -0.0%


def _weight(row: Assessment) -> float:
    return row.held_bytes or row.held


def _held(row: Assessment) -> str:
    activations = f"{row.held:.3g} activation{'s' * (row.held != 1)}"
    return activations if row.held_bytes is None else f"{activations}, {giga(row.held_bytes)}"
