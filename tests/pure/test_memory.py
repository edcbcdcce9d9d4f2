"""Bytes per rank, by hand and against the count of activations."""

from __future__ import annotations

import pytest

from npu_pipe import Action, Kind, Program, Schedule, build_schedule, lower, simulate
from npu_pipe.errors import CostsError
from npu_pipe.ir.text import parse_orders
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.memory import Memory, peak_memory


def memory(stages: int, **fields: float) -> Memory:
    each = {"activation": 0.0, "weight_inputs": 0.0, "parameters": 0.0} | fields
    boundary = each.pop("boundary", 0.0)
    return Memory(
        **{k: (v,) * stages for k, v in each.items()}, boundary=(boundary,) * (stages - 1)
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
def test_with_activations_of_one_byte_it_is_the_peak_of_activations(name: str) -> None:
    for ranks, microbatches in ((1, 3), (2, 4), (4, 8)):
        schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
        timeline = simulate(schedule, Costs.uniform(schedule.stages))
        peaks = peak_memory(schedule, memory(schedule.stages, activation=1))
        assert tuple(peak.total_bytes for peak in peaks) == timeline.peak_activations


def test_the_third_seed_by_hand() -> None:
    """2 GB kept a microbatch: 8 GB on the first of three GPipe stages with four microbatches."""
    gpipe = build_schedule("gpipe", ranks=3, microbatches=4)
    one = build_schedule("1f1b", ranks=3, microbatches=4)
    kept = memory(3, activation=2e9)
    assert peak_memory(gpipe, kept)[0].total_bytes == 8e9
    assert peak_memory(one, kept)[0].total_bytes == 6e9


def test_the_action_of_the_peak_is_the_first_that_reaches_it() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    first, last = peak_memory(schedule, memory(2, activation=10, parameters=100))
    assert (first.total_bytes, first.parameter_bytes) == (120, 100)
    assert first.action == Action(Kind.F, 0, 1)
    assert (last.total_bytes, last.action) == (110, Action(Kind.F, 1, 0))


def test_a_split_backward_keeps_what_its_weight_half_needs() -> None:
    orders = parse_orders("rank 0: 0F0 0F1 0I0 0I1 0W0 0W1")
    schedule = Schedule("by hand", 2, (0,), orders)
    (peak,) = peak_memory(schedule, memory(1, activation=10, weight_inputs=4))
    assert peak.total_bytes == 24, "at 0I0: two activations and what 0W0 will need"
    assert peak.action == Action(Kind.I, 0, 0)
    (peak,) = peak_memory(schedule, memory(1, activation=10, weight_inputs=40))
    assert peak.total_bytes == 90, "at 0I1: one activation left, and both inputs of W"
    assert peak.action == Action(Kind.I, 0, 1)


def test_a_program_adds_its_transfer_buffers() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    bare = memory(2, activation=10)
    with_buffers = memory(2, activation=10, boundary=1)
    deep, shallow = lower(schedule, prefetch=3), lower(schedule, prefetch=1)
    assert peak_memory(schedule, with_buffers) == peak_memory(schedule, bare)
    for rank in (0, 1):
        without = peak_memory(deep, bare)[rank].total_bytes
        few = peak_memory(shallow, with_buffers)[rank].total_bytes
        many = peak_memory(deep, with_buffers)[rank].total_bytes
        assert without < few < many


def test_longer_microbatches_take_more() -> None:
    schedule = build_schedule("gpipe", ranks=1, microbatches=3)
    kept = Memory((10,), (0,), (5,), (), microbatch_scale=(1, 2, 0.5))
    assert peak_memory(schedule, kept)[0].total_bytes == 5 + 35


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CostsError, match="give 1 values for boundary"):
        Memory((1, 1), (1, 1), (1, 1), ())
    with pytest.raises(CostsError, match="not negative"):
        Memory((-1,), (1,), (1,), ())
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    with pytest.raises(CostsError, match="the schedule has 2 stages"):
        peak_memory(schedule, memory(3))
    with pytest.raises(CostsError, match="microbatch_scale"):
        peak_memory(schedule, Memory((1, 1), (1, 1), (1, 1), (0,), microbatch_scale=(1,)))


def test_recompute_and_fusion_change_times() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    plain = Costs((1, 1), (1, 1), (1, 1), (0,))
    again = Costs((1, 1), (1, 1), (1, 1), (0,), recompute=(1, 1))
    assert simulate(schedule, plain).makespan == 15
    assert simulate(schedule, again).makespan == 20
    pair = Schedule("by hand", 2, (0,), parse_orders("rank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1"))
    fused = Costs((1,), (1,), (1,), (), fused_ratio=0.5)
    assert simulate(pair, Costs.uniform(1)).makespan == 6
    assert simulate(pair, fused).makespan == 1 + 1.5 + 2
    assert isinstance(lower(pair), Program)
