"""What `trace` proposes gains, and by as much as it says; what would not is not proposed."""

from __future__ import annotations

import pytest

from npu_pipe import Costs, build_schedule, lower, simulate
from npu_pipe.planner.changes import ChangeKind, best_changes, predict_run, unfused
from npu_pipe.planner.workload import Workload

UNEVEN = Workload([100, 100, 160], [100, 100, 160], [100, 100, 160], [5, 5], has_halves=False)


def test_each_kind_once_and_the_greatest_gain_first() -> None:
    schedule = build_schedule("1f1b", ranks=3, microbatches=6)
    changes = best_changes(schedule, UNEVEN, [[1, 1], [1, 1], [1, 1, 1]], prefetch=2)
    assert sorted(change.kind for change in changes) == sorted(ChangeKind)
    gains = [change.gain for change in changes]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] > 0


def test_a_moved_layer_gains_what_the_simulator_says() -> None:
    schedule = build_schedule("1f1b", ranks=3, microbatches=6)
    changes = best_changes(schedule, UNEVEN, [[1, 1], [1, 1], [1, 1, 2]], prefetch=2)
    (move,) = [change for change in changes if change.kind is ChangeKind.MOVE_LAYER]
    assert move.what == "move the first layer of stage 2 to stage 1"
    before, after = (
        simulate(lower(schedule), Costs(times, times, times, [5, 5])).makespan
        for times in ([100, 100, 160], [100, 140, 120])
    )
    assert move.makespan_us == pytest.approx(after)
    assert move.gain == pytest.approx(1 - after / before)


def test_more_microbatches_gain_for_each_of_them() -> None:
    schedule = build_schedule("gpipe", ranks=4, microbatches=4)
    workload = Workload([1] * 4, [1] * 4, [1] * 4, [0] * 3)
    changes = best_changes(schedule, workload, [[1]] * 4, prefetch=2)
    (more,) = [change for change in changes if change.kind is ChangeKind.MICROBATCHES]
    assert more.gain == pytest.approx(1 - (3 * 11 / 8) / (3 * 7 / 4))
    assert "a batch twice as large; at most 8 activations" in more.price


def test_another_schedule_is_told_with_what_it_holds() -> None:
    schedule = build_schedule("1f1b", ranks=4, microbatches=8)
    workload = Workload([2] * 4, [2] * 4, [2] * 4, [0] * 3, has_halves=False)
    whole, cut = ([[1]] * 4, [[1, 1]] * 4)
    found = {}
    for layers in (whole, cut):
        changes = best_changes(schedule, workload, layers, prefetch=2)
        (found[len(layers[0])],) = [c for c in changes if c.kind is ChangeKind.SCHEDULE]
    assert found[1].what == "schedule zb-h1", "without layers there is nothing to cut finer"
    assert found[2].what == "schedule interleaved-zb with 2 stages a rank"
    assert found[1].gain == pytest.approx(1 - 27 / 33)
    assert found[2].gain == pytest.approx(1 - 25.5 / 33)
    assert "halves of the measured B" in found[1].price
    assert "at most 4 activations" in found[1].price


def test_nothing_helps_one_rank_with_one_layer() -> None:
    schedule = build_schedule("gpipe", ranks=1, microbatches=4)
    assert best_changes(schedule, Workload([1], [1], [1], []), [[1]], prefetch=2) == ()


def test_a_schedule_of_ones_own_is_not_built_larger() -> None:
    from dataclasses import replace

    schedule = replace(build_schedule("gpipe", ranks=2, microbatches=4), name="mine")
    workload = Workload([1] * 2, [1] * 2, [1] * 2, [0])
    changes = best_changes(schedule, workload, [[1], [1]], prefetch=2)
    assert ChangeKind.MICROBATCHES not in [change.kind for change in changes]


def test_fused_pairs_are_taken_apart() -> None:
    schedule = build_schedule("dualpipe-v", ranks=2, microbatches=4)
    apart = unfused(schedule)
    assert apart.orders != schedule.orders
    assert unfused(apart) is apart
    costs = Costs.uniform(4)
    both = [predict_run(each, costs, prefetch=2).makespan for each in (schedule, apart)]
    assert both[1] <= both[0]
    changes = best_changes(
        schedule, Workload([1] * 4, [1] * 4, [1] * 4, [0] * 3), [[1]] * 4, prefetch=2
    )
    assert all(change.gain > 0 for change in changes)
