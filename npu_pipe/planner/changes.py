"""What would make a measured run faster: a layer moved, more microbatches, another schedule.

Each is simulated with the measured costs, as it would be run. A gain is the share of the time of
a microbatch that would be saved; what the simulator does not see (the optimizer, the clipping)
stays as it is. Nothing is said of what would not gain.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from npu_pipe.api import simulate
from npu_pipe.ir.action import Kind, flatten
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.lower import lower
from npu_pipe.planner.workload import Workload
from npu_pipe.schedules.registry import FAMILIES, build_if_covered
from npu_pipe.simulator.costs import Costs
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Change", "ChangeKind", "best_changes", "predict_run", "unfused"]

Layers = Sequence[Sequence[float]]

_LEAST_GAIN = 5e-4  # what would be shown as 0.0 %
_CHUNKS = (1, 2, 3, 4)
_PLAYED = 3  # schedules that are lowered and simulated with their transfers, the rest only ranked


class ChangeKind(enum.StrEnum):
    """What is changed."""

    MOVE_LAYER = "move a layer"
    MICROBATCHES = "more microbatches"
    SCHEDULE = "another schedule"


@dataclass(frozen=True, slots=True)
class Change:
    """gain: share of the predicted time of a microbatch that is saved, from 0 to 1.

    makespan_us: predicted, of the changed window.
    what: in words. price: what it costs besides, in words; may be empty.
    """

    kind: ChangeKind
    what: str
    price: str
    makespan_us: float
    gain: float


def best_changes(
    schedule: Schedule, workload: Workload, layers: Layers, *, prefetch: int
) -> tuple[Change, ...]:
    """The best change of each kind, those that gain most first.

    workload: what the stages took. layers: per stage, the shares of its layers, in any unit.
    """
    schedule = unfused(schedule)
    costs = Costs(workload.forward, workload.input_grad, workload.weight_grad, workload.transfer)
    before = predict_run(schedule, costs, prefetch=prefetch).makespan / schedule.microbatches
    if not before:
        return ()
    found = (
        _moved(schedule, costs, layers, prefetch),
        _more(schedule, costs, prefetch),
        _others(schedule, costs, layers, prefetch, has_halves=workload.has_halves),
    )
    best = []
    for kind, changes in zip(ChangeKind, found, strict=True):
        rated = (
            Change(kind, what, price, makespan, 1 - makespan / microbatches / before)
            for what, price, makespan, microbatches in changes
        )
        change = max(rated, key=lambda each: each.gain, default=None)
        if change is not None and change.gain > _LEAST_GAIN:
            best.append(change)
    return tuple(sorted(best, key=lambda each: -each.gain))


def predict_run(schedule: Schedule, costs: Costs, *, prefetch: int) -> Timeline:
    """What the simulator makes of a schedule as `Pipeline` lowers it: without its costs."""
    return simulate(lower(schedule, prefetch=prefetch), costs)


def unfused(schedule: Schedule) -> Schedule:
    """With the halves of fused pairs one after the other, as they are run today."""
    orders = tuple(tuple(chain.from_iterable(map(flatten, order))) for order in schedule.orders)
    return schedule if orders == schedule.orders else replace(schedule, orders=orders)


_Tried = Iterator[tuple[str, str, float, int]]  # what, price, makespan, microbatches


def _moved(schedule: Schedule, costs: Costs, layers: Layers, prefetch: int) -> _Tried:
    program = lower(schedule, prefetch=prefetch)
    for stage, (ours, theirs) in enumerate(pairwise(layers)):
        for source, target, held, layer in (
            (stage, stage + 1, ours, ours[-1]),
            (stage + 1, stage, theirs, theirs[0]),
        ):
            if len(held) > 1 and sum(held) > 0:
                moved = _shift(costs, source, target, layer / sum(held))
                end = "last" if source < target else "first"
                what = f"move the {end} layer of stage {source} to stage {target}"
                yield what, "", simulate(program, moved).makespan, schedule.microbatches


def _shift(costs: Costs, source: int, target: int, share: float) -> Costs:
    def moved(times: Sequence[float]) -> list[float]:
        result = list(times)
        result[source] -= times[source] * share
        result[target] += times[source] * share
        return result

    return replace(
        costs,
        forward=moved(costs.forward),
        input_grad=moved(costs.input_grad),
        weight_grad=moved(costs.weight_grad),
    )


def _more(schedule: Schedule, costs: Costs, prefetch: int) -> _Tried:
    if schedule.name not in FAMILIES:
        return
    microbatches, chunks = 2 * schedule.microbatches, schedule.stages // schedule.ranks
    more = _built(schedule.name, schedule.ranks, microbatches, chunks)
    if more is not None:
        timeline = predict_run(more, costs, prefetch=prefetch)
        what = f"{microbatches} microbatches of the same size instead of {schedule.microbatches}"
        peak = max(timeline.peak_activations)
        yield (
            what,
            f"a batch twice as large; {_held(peak, chunks)}",
            timeline.makespan,
            microbatches,
        )


def _others(
    schedule: Schedule, costs: Costs, layers: Layers, prefetch: int, *, has_halves: bool
) -> _Tried:
    """Schedules that hold the parameters once: what two replicas would exchange is not known."""
    tried = []
    for name, family in FAMILIES.items():
        for chunks in _CHUNKS if family.any_chunks else (family.chunks,):
            other = _built(name, schedule.ranks, schedule.microbatches, chunks)
            if other is None or other.mirrored or other.orders == schedule.orders:
                continue
            recut = _recut(costs, layers, other.stages)
            if recut is not None:
                tried.append((simulate(other, recut).makespan, name, chunks, other, recut))
    for _, name, chunks, other, recut in sorted(tried, key=lambda each: each[0])[:_PLAYED]:
        timeline = predict_run(other, recut, prefetch=max(prefetch, 2))
        prices = [_held(max(timeline.peak_activations), chunks)]
        is_split = any(a.kind is Kind.I for s in other.orders[0] for a in flatten(s))
        if is_split and not has_halves:
            prices.append("I and W taken as halves of the measured B")
        what = f"schedule {name}" + (f" with {chunks} stages a rank" if chunks > 1 else "")
        yield what, "; ".join(prices), timeline.makespan, schedule.microbatches


def _built(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule | None:
    built = build_if_covered(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return None if built is None else unfused(built)


def _recut(costs: Costs, layers: Layers, stages: int) -> Costs | None:
    """The costs of as many stages; None where there are fewer layers. A boundary that was none
    is taken to cost what the most expensive one does."""
    if stages == costs.stages:
        return costs
    sums = [sum(held) or 1.0 for held in layers]

    def spread(times: Sequence[float]) -> list[float]:
        return [
            times[stage] * layer / sums[stage]
            for stage, held in enumerate(layers)
            for layer in held
        ]

    everything = spread(costs.forward), spread(costs.input_grad), spread(costs.weight_grad)
    if stages > len(everything[0]):
        return None
    transfer = [max(costs.transfer, default=0.0)] * (len(everything[0]) - 1)
    return Workload(*everything, transfer).stage_costs(stages)


def _held(peak: int, chunks: int) -> str:
    held = peak / chunks
    return f"at most {held:.3g} activation{'s' * (held != 1)} of a rank's share"
