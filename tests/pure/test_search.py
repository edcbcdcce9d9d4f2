"""What a search finds is a schedule that keeps its promises, and the bound under it holds."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import permutations
from random import Random

import pytest
from core_helpers.random_cases import random_placement

import npu_pipe
from npu_pipe import Costs
from npu_pipe.errors import CostsError, ScheduleError
from npu_pipe.ir.action import Kind
from npu_pipe.ir.placement import linear, loop, vee
from npu_pipe.planner.cpsat import solve
from npu_pipe.planner.heuristic import list_schedule, rules
from npu_pipe.planner.problem import make_problem
from npu_pipe.planner.search import Found, Objective, search

UNEVEN = Costs(
    forward=[1.1, 1.1, 0.8, 1.0],
    input_grad=[1.2, 1.1, 1.1, 1.0],
    weight_grad=[1.1, 1.0, 1.2, 0.9],
    transfer=[0.9, 0.3, 0.6],
)
HAS_SOLVER = importlib.util.find_spec("ortools") is not None
needs_solver = pytest.mark.skipif(not HAS_SOLVER, reason="needs OR-Tools")


@pytest.fixture
def no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ortools" else find(name)
    )
    # Whoever imports it all the same gets an ImportError.
    monkeypatch.setitem(sys.modules, "ortools", None)


def assert_kept(found: Found, costs: Costs, caps: list[int]) -> None:
    npu_pipe.check(found.schedule)
    npu_pipe.check(npu_pipe.lower(found.schedule, costs))
    timeline = npu_pipe.simulate(found.schedule, costs)
    assert (found.makespan, found.span) == (timeline.makespan, timeline.span)
    assert all(peak <= cap for peak, cap in zip(timeline.peak_activations, caps, strict=True))
    value = found.span if found.objective is Objective.SPAN else found.makespan
    assert 0 <= found.lower_bound <= value
    assert found.gap == pytest.approx((value - found.lower_bound) / value if value else 0)
    assert found.proved or found.gap > 0
    assert sorted(found.permutation) == list(range(found.schedule.microbatches))


@pytest.mark.parametrize("seed", range(12))
def test_random_requests_are_answered_with_schedules_that_keep_them(seed: int) -> None:
    rng = Random(seed)
    placement = random_placement(rng, rng.randint(1, 4))
    ranks, m = max(placement) + 1, rng.randint(1, 6)
    caps = [placement.count(rank) + rng.randint(0, 4) for rank in range(ranks)]
    times = [[rng.choice((0.0, 0.5, 1.0, 1.7)) for _ in placement] for _ in range(4)]
    costs = Costs(
        *times[:3],
        transfer=times[3][1:],
        microbatch_scale=[rng.choice((0.0, 0.5, 1.0)) for _ in range(m)] if seed % 3 == 0 else (),
        overlapped=seed % 4 > 0,
    )
    found = search(
        costs,
        ranks=ranks,
        microbatches=m,
        max_activations=caps,
        split_backward=rng.random() < 0.7,
        time_limit_s=0.5,
        objective=rng.choice(list(Objective)),
        placement=placement,
        seed=seed,
    )
    assert_kept(found, costs, caps)
    assert found.seconds < 5


@needs_solver
@pytest.mark.parametrize(
    ("placement", "m", "cap", "makespan", "span"),
    [
        (linear(4), 8, 4, 27, 27),  # zb-h1's closed form: nothing is better in its memory
        (linear(4), 8, 7, 27, 24),  # zb-h2's
        (vee(4), 8, 8, 51, 48),  # zb-v's
        (vee(4), 8, 6, 53, 53),  # v-half's
        (loop(4, 2), 8, 8, 51, 51),  # interleaved-zb's
    ],
)
def test_closed_forms_at_equal_costs_are_found(
    placement: tuple[int, ...], m: int, cap: int, makespan: float, span: float
) -> None:
    costs = Costs.uniform(len(placement))
    sizes = {"ranks": 4, "microbatches": m, "max_activations": cap, "placement": placement}
    found = search(costs, **sizes, time_limit_s=20)
    assert (found.makespan, found.proved) == (makespan, True)
    found = search(costs, **sizes, time_limit_s=2, objective=Objective.SPAN)
    assert found.span == span


def test_a_v_with_few_microbatches_takes_55_where_the_closed_form_takes_62() -> None:
    found = search(
        Costs.uniform(16),
        ranks=8,
        microbatches=8,
        max_activations=16,
        placement=vee(8),
        time_limit_s=20,
    )
    assert (found.makespan, found.lower_bound, found.proved) == (55, 55, True)


def test_whole_backwards_stay_whole() -> None:
    found = search(
        UNEVEN, ranks=4, microbatches=6, max_activations=4, split_backward=False, time_limit_s=5
    )
    kinds = {step.kind for order in found.schedule.orders for step in order}
    assert kinds == {Kind.F, Kind.B}
    one_f_one_b = npu_pipe.build_schedule("1f1b", ranks=4, microbatches=6)
    assert found.makespan <= npu_pipe.simulate(one_f_one_b, UNEVEN).makespan


@needs_solver
def test_uneven_stages_are_solved_to_the_optimum() -> None:
    caps = [4, 4, 4, 4]
    found = search(UNEVEN, ranks=4, microbatches=8, max_activations=caps, time_limit_s=20)
    assert_kept(found, UNEVEN, caps)
    assert found.proved
    assert found.gap == pytest.approx(0, abs=1e-6)
    zb_h1 = npu_pipe.build_schedule("zb-h1", ranks=4, microbatches=8)
    assert found.makespan < npu_pipe.simulate(zb_h1, UNEVEN).makespan


@pytest.mark.usefixtures("no_solver")
def test_without_a_solver_it_still_searches_and_bounds() -> None:
    caps = [4, 4, 4, 4]
    found = search(UNEVEN, ranks=4, microbatches=8, max_activations=caps, time_limit_s=2)
    assert_kept(found, UNEVEN, caps)
    assert 0 < found.gap < 0.2
    assert not found.proved


@pytest.mark.usefixtures("no_solver")
def test_one_seed_gives_one_schedule() -> None:
    for scale in ((), (1.0, 0.5)):
        costs = Costs([1, 1.5], [1, 1.2], [0.7, 0.6], [0.9], microbatch_scale=scale)
        first, second = (
            search(costs, ranks=2, microbatches=2, max_activations=2, time_limit_s=60, seed=3)
            for _ in range(2)
        )
        assert first.schedule == second.schedule
        assert first.permutation == second.permutation


@needs_solver
def test_the_best_order_of_microbatches_is_proved() -> None:
    costs = Costs([1, 1.5], [1, 1.2], [0.7, 0.6], [0.9], microbatch_scale=[0.4, 1.0, 1.6])
    sizes = {"ranks": 2, "microbatches": 3, "max_activations": 2}
    found = search(costs, **sizes, time_limit_s=30)
    assert_kept(found, costs, [2, 2])
    assert found.proved
    # Of each order alone, the best is no better.
    for turns in permutations(range(3)):
        fixed = make_problem(
            costs,
            placement=linear(2),
            caps=(2, 2),
            turns=turns,
            is_split=True,
            is_span=False,
        )
        orders = list_schedule(fixed, next(rules(fixed)))
        solved = solve(fixed, orders, time_limit_s=10, seed=0)
        assert solved.is_done
        assert solved.value >= found.makespan - 1e-9


def test_no_time_still_gives_a_schedule_and_claims_nothing() -> None:
    found = search(UNEVEN, ranks=4, microbatches=8, max_activations=4, time_limit_s=0)
    assert_kept(found, UNEVEN, [4] * 4)
    assert not found.proved


def test_microbatches_of_different_lengths_are_put_in_a_good_order() -> None:
    scale = [0.4, 0.6, 0.8, 1.0, 1.2, 1.4]  # sorted: the worst order
    costs = replace(UNEVEN, microbatch_scale=scale)
    found = search(costs, ranks=4, microbatches=6, max_activations=4, time_limit_s=3)
    assert_kept(found, costs, [4] * 4)
    assert found.permutation != tuple(range(6))
    for order in found.schedule.orders:
        forwards = tuple(step.microbatch for step in order if step.kind is Kind.F)
        assert forwards == found.permutation
    zb_h1 = npu_pipe.build_schedule("zb-h1", ranks=4, microbatches=6)
    assert found.makespan < npu_pipe.simulate(zb_h1, costs).makespan * 0.97


def test_transfers_that_occupy_the_ranks_are_judged_as_they_run() -> None:
    costs = replace(UNEVEN, overlapped=False)
    found = search(costs, ranks=4, microbatches=6, max_activations=4, time_limit_s=2)
    assert_kept(found, costs, [4] * 4)
    for name in ("1f1b", "zb-h1"):
        published = npu_pipe.build_schedule(name, ranks=4, microbatches=6)
        assert found.makespan <= npu_pipe.simulate(published, costs).makespan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_activations": 0}, "rank 0 has 1 stage and may hold 0; give it max_activations"),
        ({"max_activations": [4, 4, 0, 4]}, "rank 2 has 1 stage and may hold 0"),
        ({"max_activations": [4, 4]}, "give one number, or 4 of them"),
        ({"max_activations": 1.5}, "one a rank"),
        ({"max_activations": [1, 1, 1, None]}, "one a rank"),
        ({"ranks": 3}, "the costs have 4 stages, for 3 ranks"),
        ({"ranks": 0}, "ranks >= 1"),
        ({"microbatches": 0}, "microbatches >= 1"),
        ({"microbatches": True}, "microbatches >= 1"),
        ({"microbatches": 10**9}, "at most 16777216"),
        ({"objective": "time"}, "objective is one of makespan, span"),
        ({"time_limit_s": -1}, "time_limit_s >= 0"),
        ({"time_limit_s": float("nan")}, "time_limit_s >= 0"),
        ({"placement": (0, 1, 2, 2)}, "at least one on each of them"),
        ({"placement": (0, 1, 2, 7)}, "ranks 0..3"),
        ({"ranks": 2, "placement": vee(2), "max_activations": 1}, "2 stages and may hold 1"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        search(UNEVEN, **{"ranks": 4, "microbatches": 8} | changes)  # type: ignore[arg-type]


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CostsError, match="the placement has 8 stages, the costs have 4"):
        search(UNEVEN, ranks=4, microbatches=8, placement=vee(4))
    with pytest.raises(CostsError, match="8 microbatches and 2 factors"):
        search(replace(UNEVEN, microbatch_scale=[1, 2]), ranks=4, microbatches=8)
