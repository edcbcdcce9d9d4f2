"""The numbers behind `npu-pipe plan`: workloads, networks, peaks, disturbances, ranking."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from core_helpers.random_cases import random_costs, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import Costs, build_schedule, simulate
from npu_pipe.errors import CostsError, PartitionError, ScheduleError
from npu_pipe.planner.assess import Assessment, assess
from npu_pipe.planner.candidates import candidates
from npu_pipe.planner.network import make_network
from npu_pipe.planner.robustness import JITTER, SLOW_LINK, SLOW_RANK, losses, samples_for
from npu_pipe.planner.workload import Workload
from npu_pipe.schedules.registry import FAMILIES
from npu_pipe.simulator.memory import Memory, peak_memory
from npu_pipe.simulator.peaks import activation_peaks, schedule_peaks

# name: (v, makespan at p4 m8, span, makespan at p8 m32, span), in times of a chunk
VALUES = {
    "gpipe": (1, 33, 33, 117, 117),
    "1f1b": (1, 33, 33, 117, 117),
    "interleaved-1f1b v=2": (2, 57, 57, 213, 213),
    "zb-h1": (1, 27, 27, 103, 103),
    "zb-h2": (1, 27, 24, 103, 96),
    "interleaved-zb v=2": (2, 51, 51, 199, 199),
    "zb-v": (2, 51, 48, 199, 192),
    "v-half": (2, 53, 53, 209, 209),
    "v-min": (2, 59, 59, 219, 219),
    "dualpipe": (1, 26, 26, 102, 102),
    "dualpipe-v": (2, 54, 54, 206, 206),
}
PEAKS = {  # at p4 m8, p8 m32, in chunks
    "gpipe": (8, 32),
    "1f1b": (4, 8),
    "interleaved-1f1b v=2": (11, 23),
    "zb-h1": (4, 8),
    "zb-h2": (7, 15),
    "interleaved-zb v=2": (8, 16),
    "zb-v": (8, 16),
    "v-half": (6, 10),
    "v-min": (4, 8),
    "dualpipe": (5, 9),
    "dualpipe-v": (9, 17),
}

seeds = st.integers(0, 2**48)


def ranked(p: int, m: int, **flags: float) -> dict[str, Assessment]:
    found = candidates(Workload.even(p, **flags), ranks=p, microbatches=m, samples=4, seed=0)
    return {row.name: row for row in found.ranked}


@pytest.mark.parametrize(("p", "m", "column"), [(4, 8, 0), (8, 32, 1)])
def test_the_table_of_values_comes_out(p: int, m: int, column: int) -> None:
    rows = ranked(p, m)
    for name, (chunks, *values) in VALUES.items():
        row = rows[name]
        makespan, span = values[2 * column : 2 * column + 2]
        assert row.chunks == chunks
        assert row.makespan == pytest.approx(makespan / chunks)
        assert row.span == pytest.approx(span / chunks)
        assert max(row.peak_activations) == PEAKS[name][column]
        assert row.held == PEAKS[name][column] / chunks


def test_makespans_rise_and_every_family_is_there_or_refused() -> None:
    for p, m in ((4, 8), (3, 7), (2, 1)):
        found = candidates(Workload.even(p), ranks=p, microbatches=m, samples=1, seed=0)
        times = [row.makespan for row in found.ranked]
        assert times == pytest.approx(sorted(times))
        there = {row.schedule.name for row in found.ranked}
        refused = {refusal.name for refusal in found.refused}
        assert there | refused == set(FAMILIES)
        assert not there & refused


def test_of_equal_makespans_the_leaner_stands_first() -> None:
    names = list(ranked(4, 8))
    assert names.index("zb-h1") < names.index("zb-h2")
    assert names.index("1f1b") < names.index("gpipe")


def test_sizes_that_do_not_fit_are_refused_with_the_nearest() -> None:
    found = candidates(Workload.even(3), ranks=3, microbatches=7, samples=1, seed=0)
    refused = {refusal.name: refusal.error for refusal in found.refused}
    assert set(refused) == {"interleaved-1f1b", "interleaved-zb", "dualpipe", "chimera"}
    assert isinstance(refused["dualpipe"], ScheduleError)
    assert refused["dualpipe"].cure.startswith("use 2 or 4 ranks")
    assert refused["interleaved-zb"].cure.startswith("use 6 or 8 microbatches")


def test_too_few_layers_leave_fewer_chunks_or_none() -> None:
    workload = Workload([1] * 9, [1] * 9, [1] * 9, [0] * 8)
    found = candidates(workload, ranks=4, microbatches=8, samples=1, seed=0)
    chunks = {row.chunks for row in found.ranked}
    assert chunks == {1, 2}
    workload = Workload([1] * 5, [1] * 5, [1] * 5, [0] * 4)
    found = candidates(workload, ranks=4, microbatches=8, samples=1, seed=0)
    assert {row.chunks for row in found.ranked} == {1}
    errors = {refusal.name: refusal.error for refusal in found.refused}
    assert isinstance(errors["zb-v"], PartitionError)


def test_transfers_are_counted_per_pair_of_ranks() -> None:
    rows = ranked(4, 8)
    assert rows["1f1b"].transfers == {(0, 1): 16, (1, 2): 16, (2, 3): 16}
    assert rows["interleaved-1f1b v=2"].transfers == {
        (0, 1): 32,
        (0, 3): 16,
        (1, 2): 32,
        (2, 3): 32,
    }
    assert rows["zb-v"].transfers == {(0, 1): 32, (1, 2): 32, (2, 3): 32}
    assert (rows["zb-v"].crossings, rows["dualpipe"].copies, rows["1f1b"].copies) == (96, 2, 1)
    assert rows["dualpipe"].has_pairs
    assert rows["zb-h1"].is_split
    assert not rows["1f1b"].is_split


@given(seeds)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_a_network_plays_what_the_simulator_predicts(seed: int) -> None:
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = replace(random_costs(rng, schedule), overlapped=rng.random() < 0.7)
    row = assess("it", schedule, costs, memory=None, samples=1, seed=0)
    timeline = simulate(schedule, costs)
    assert row.makespan == timeline.makespan
    assert row.span == pytest.approx(timeline.span)
    assert row.bubble_ratio == pytest.approx(timeline.bubble_ratio)
    assert row.busy == pytest.approx(timeline.busy_us)
    assert row.peak_activations == timeline.peak_activations


@given(seeds)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_peaks_by_column_are_the_peaks_action_by_action(seed: int) -> None:
    rng = Random(seed)
    schedule = random_schedule(rng)

    def some(number: int) -> list[int]:
        return [rng.randrange(10) for _ in range(number)]

    stages = schedule.stages
    memory = Memory(some(stages), some(stages), some(stages), some(stages - 1))
    assert schedule_peaks(schedule, memory) == peak_memory(schedule, memory)


@pytest.mark.parametrize("name", FAMILIES)
def test_peaks_by_column_of_the_families(name: str) -> None:
    schedule = build_schedule(name, ranks=4, microbatches=8)
    stages = schedule.stages
    scale = [1, 2, 1, 3, 1, 1, 0.5, 1]
    memory = Memory([4] * stages, [2] * stages, [8] * stages, [1] * (stages - 1), scale)
    assert schedule_peaks(schedule, memory) == peak_memory(schedule, memory)
    timeline = simulate(schedule, Costs.uniform(stages))
    assert activation_peaks(schedule) == timeline.peak_activations


def test_a_slow_rank_and_a_slow_link_are_the_mean_over_all_of_them() -> None:
    """By hand: with costs of another rank or boundary raised, one after another."""
    p, m = 4, 8
    schedule = build_schedule("1f1b", ranks=p, microbatches=m)
    costs = Costs.uniform(p, transfer=0.5)
    lost = losses(make_network(schedule, costs), costs, ranks=p, samples=8, seed=1)
    calm = simulate(schedule, costs).makespan

    def raised(values: tuple[float, ...], index: int, more: float) -> list[float]:
        return [value + more * (i == index) for i, value in enumerate(values)]

    links = [
        simulate(schedule, replace(costs, transfer=raised(costs.transfer, s, SLOW_LINK))).makespan
        for s in range(p - 1)
    ]
    ranks = []
    for s in range(p):
        times = raised((1.0,) * p, s, SLOW_RANK)
        slow = replace(costs, forward=times, input_grad=times, weight_grad=times)
        ranks.append(simulate(schedule, slow).makespan)
    assert lost.slow_link == pytest.approx(np.mean(links) / calm - 1)
    assert lost.slow_rank == pytest.approx(np.mean(ranks) / calm - 1)
    assert 0 < lost.jitter < 2 * JITTER


def test_slow_links_of_transfers_that_occupy_the_ranks() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=2)
    costs = replace(Costs.uniform(2, transfer=1), overlapped=False)
    lost = losses(make_network(schedule, costs), costs, ranks=2, samples=2, seed=0)
    slower = replace(costs, transfer=[1 + SLOW_LINK])
    calm, slow = (simulate(schedule, each).makespan for each in (costs, slower))
    assert lost.slow_link == pytest.approx(slow / calm - 1)


def test_one_seed_gives_one_answer() -> None:
    first, second = ranked(4, 8, transfer=0.1), ranked(4, 8, transfer=0.1)
    assert {n: row.losses for n, row in first.items()} == {
        n: row.losses for n, row in second.items()
    }
    schedule, costs = build_schedule("zb-h1", ranks=4, microbatches=8), Costs.uniform(4)
    network = make_network(schedule, costs)
    one, other = (losses(network, costs, ranks=4, samples=8, seed=seed) for seed in (0, 1))
    assert one.jitter != other.jitter
    assert one[1:] == other[1:], "every link and rank had its turn"


def test_one_rank_has_no_link_to_be_slow() -> None:
    lost = ranked(1, 4)["1f1b"].losses
    assert lost.slow_link == 0
    assert lost.slow_rank == pytest.approx(SLOW_RANK)


def test_fewer_samples_for_larger_sizes() -> None:
    assert samples_for(4, 8) == samples_for(8, 32) == 32
    assert samples_for(64, 512) == samples_for(1024, 4096) == 4


def test_a_workload_is_cut_by_forward_and_backward_time() -> None:
    workload = Workload(
        forward=[1, 1, 1, 1],
        input_grad=[1, 1, 1, 9],
        weight_grad=[0, 0, 1, 1],
        transfer=[1, 2, 3],
        activation_bytes=[10, 20, 30, 40],
        parameter_bytes=[1, 2, 3, 4],
        boundary_bytes=[5, 6, 7],
        recompute=[0, 0, 0, 1],
    )
    costs, memory = workload.stage_costs(2), workload.stage_memory(2)
    assert costs == Costs([3, 1], [3, 9], [1, 1], [3], recompute=[0, 1])
    assert memory == Memory([60, 40], [60, 40], [6, 4], [7]), "W keeps as much as F if not told"
    assert workload.stage_memory(4) == Memory(
        [10, 20, 30, 40], [10, 20, 30, 40], [1, 2, 3, 4], [5, 6, 7]
    )
    with pytest.raises(PartitionError, match="4 layers were given for 5 stages"):
        workload.stage_costs(5)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_an_even_workload_is_divided_evenly(chunks: int) -> None:
    workload = Workload.even(4, forward=1, input_grad=2, weight_grad=0.5, transfer=0.1)
    expected = Costs.uniform(
        4 * chunks,
        forward=1 / chunks,
        input_grad=2 / chunks,
        weight_grad=0.5 / chunks,
        transfer=0.1,
    )
    found = workload.stage_costs(4 * chunks)
    for field in ("forward", "input_grad", "weight_grad", "transfer"):
        assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-15)
    assert workload.stage_memory(4) is None


def test_workloads_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(CostsError, match="input_grad has 1; give 2 values for input_grad"):
        Workload([1, 1], [1], [1, 1], [0])
    with pytest.raises(CostsError, match="one value a boundary between layers"):
        Workload([1, 1], [1, 1], [1, 1], [0, 0])
    with pytest.raises(CostsError, match="no activation_bytes"):
        Workload([1], [1], [1], [], parameter_bytes=[1])
    with pytest.raises(CostsError, match="not negative"):
        Workload([1], [-1], [1], [])
    with pytest.raises(CostsError, match="a layer or more"):
        Workload([], [], [], [])
    with pytest.raises(CostsError, match="8 microbatches and 3 factors"):
        candidates(
            replace(Workload.even(2), microbatch_scale=(1, 2, 3)),
            ranks=2,
            microbatches=8,
            samples=1,
            seed=0,
        )
