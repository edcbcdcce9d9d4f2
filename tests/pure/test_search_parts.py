"""The parts of the search, each held to what it says of itself."""

from __future__ import annotations

from itertools import permutations
from random import Random

import pytest
from core_helpers.random_cases import random_placement

import npu_pipe
from npu_pipe import Costs
from npu_pipe.ir.placement import linear, vee
from npu_pipe.planner.bound import bound
from npu_pipe.planner.clock import Clock
from npu_pipe.planner.heuristic import list_schedule, random_rule, rules
from npu_pipe.planner.local_search import improve
from npu_pipe.planner.play import play, tails
from npu_pipe.planner.problem import (
    Orders,
    Problem,
    fits,
    make_problem,
    orders_of,
    to_schedule,
    with_turns,
)
from npu_pipe.planner.search import search

TIMES = (0.0, 0.5, 1.0, 1.5, 2.0)


def random_problem(rng: Random, *, most: int = 5) -> tuple[Problem, Costs]:
    placement = random_placement(rng, rng.randint(1, 4))
    ranks, m = max(placement) + 1, rng.randint(1, most)
    costs = Costs(
        forward=[rng.choice(TIMES) for _ in placement],
        input_grad=[rng.choice(TIMES) for _ in placement],
        weight_grad=[rng.choice(TIMES) for _ in placement],
        transfer=[rng.choice(TIMES) for _ in placement[1:]],
        microbatch_scale=[rng.choice(TIMES) for _ in range(m)] if rng.random() < 0.3 else (),
        recompute=[rng.choice(TIMES) for _ in placement] if rng.random() < 0.3 else (),
    )
    problem = make_problem(
        costs,
        placement=placement,
        caps=tuple(placement.count(rank) + rng.randint(0, 3) for rank in range(ranks)),
        turns=tuple(rng.sample(range(m), m)),
        is_split=rng.random() < 0.7,
        is_span=rng.random() < 0.3,
    )
    return problem, costs


def all_fit(problem: Problem, orders: Orders) -> bool:
    return all(fits(problem, order, rank) for rank, order in enumerate(orders))


@pytest.mark.parametrize("seed", range(60))
def test_list_schedules_fit_run_and_play_as_the_simulator_says(seed: int) -> None:
    rng = Random(seed)
    problem, costs = random_problem(rng)
    for rule in [*rng.sample(list(rules(problem)), 4), random_rule(problem, rng)]:
        orders = list_schedule(problem, rule)
        assert all_fit(problem, orders)
        played = play(problem, orders)
        assert played is not None
        timeline = npu_pipe.simulate(to_schedule(problem, orders, "listed"), costs)
        ends = [order[-1] for order in orders]
        assert max(played.end[task] for task in ends) == timeline.makespan
        assert played.value >= bound(problem) - 1e-9
        tail = tails(problem, played)
        through = [
            played.end[task] + tail[task] for order in orders for task in order
        ]  # what lies on a critical path has the whole value
        assert max(through) == pytest.approx(played.value)


@pytest.mark.parametrize("seed", range(30))
def test_tabu_search_only_ever_improves_and_keeps_fitting(seed: int) -> None:
    rng = Random(seed)
    problem, _ = random_problem(rng)
    orders = list_schedule(problem, next(rules(problem)))
    before = play(problem, orders)
    assert before is not None
    value, better = improve(problem, orders, rng=rng, moves=60, goal=0.0, clock=Clock.start(60))
    after = play(problem, better)
    assert after is not None
    assert after.value == value <= before.value
    assert value >= bound(problem) - 1e-9
    assert all_fit(problem, better)


def every_order(problem: Problem, rank: int) -> list[list[int]]:
    """All orders of a rank that fit."""
    m = problem.microbatches
    words = set(permutations([c for c in problem.chains_of(rank) for _ in range(m)]))
    orders = []
    for word in sorted(words):
        turn = dict.fromkeys(word, 0)
        order = []
        for chain in word:
            order.append(chain * m + turn[chain])
            turn[chain] += 1
        if fits(problem, order, rank):
            orders.append(order)
    return orders


@pytest.mark.parametrize("seed", range(8))
def test_on_two_ranks_nothing_beats_the_bound_and_search_finds_the_best(seed: int) -> None:
    rng = Random(seed)
    costs = Costs(
        *([rng.choice(TIMES[1:]) for _ in range(2)] for _ in range(3)),
        transfer=[rng.choice(TIMES)],
    )
    problem = make_problem(
        costs,
        placement=linear(2),
        caps=(rng.randint(1, 2), rng.randint(1, 2)),
        turns=(0, 1),
        is_split=True,
        is_span=False,
    )
    values = []
    for first in every_order(problem, 0):
        for second in every_order(problem, 1):
            played = play(problem, [first, second])
            if played is not None:
                values.append(played.value)
    assert bound(problem) <= min(values)
    found = search(costs, ranks=2, microbatches=2, max_activations=problem.caps, time_limit_s=10)
    assert found.makespan == min(values)
    assert found.lower_bound <= min(values)


def test_equal_microbatches_may_be_renumbered_first_in_first_out() -> None:
    gpipe = npu_pipe.build_schedule("gpipe", ranks=3, microbatches=4)  # backwards reversed
    costs = Costs.uniform(3, transfer=0.5)
    problem = make_problem(
        costs, placement=linear(3), caps=(4, 4, 4), turns=(0, 1, 2, 3), is_split=False,
        is_span=False,
    )  # fmt: skip
    orders = orders_of(problem, gpipe)
    assert orders is not None
    renumbered = npu_pipe.simulate(to_schedule(problem, orders, "gpipe"), costs)
    assert renumbered.makespan == npu_pipe.simulate(gpipe, costs).makespan


def test_a_schedule_of_another_placement_memory_or_kind_is_no_start() -> None:
    costs = Costs.uniform(4)
    problem = make_problem(
        costs, placement=linear(4), caps=(2,) * 4, turns=tuple(range(8)), is_split=False,
        is_span=False,
    )  # fmt: skip
    for name in ("1f1b", "zb-h1"):  # holds 4; has W
        assert orders_of(problem, npu_pipe.build_schedule(name, ranks=4, microbatches=8)) is None
    assert orders_of(problem, npu_pipe.build_schedule("zb-v", ranks=4, microbatches=8)) is None


def test_other_turns_make_the_problem_that_the_costs_would() -> None:
    costs = Costs.uniform(4, transfer=0.5)
    costs = Costs(
        costs.forward, costs.input_grad, costs.weight_grad, costs.transfer, (1.0, 2.0, 3.0)
    )

    def problem(turns: tuple[int, ...]) -> Problem:
        return make_problem(
            costs, placement=vee(2), caps=(4, 4), turns=turns, is_split=True, is_span=True
        )

    made, changed = problem((2, 0, 1)), with_turns(problem((1, 2, 0)), (2, 0, 1))
    assert made.duration == changed.duration
    assert made.delay == changed.delay
    assert made.offset == changed.offset


def test_orders_that_wait_in_a_circle_do_not_play() -> None:
    problem = make_problem(
        Costs.uniform(2), placement=linear(2), caps=(2, 2), turns=(0, 1), is_split=False,
        is_span=False,
    )  # fmt: skip
    # Rank 0 wants B0 before F1, rank 1 wants F1 before B0.
    assert play(problem, [[0, 4, 1, 5], [2, 3, 6, 7]]) is None
