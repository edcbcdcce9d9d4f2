"""Damage at random: what is let through really runs, what is refused says where."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from core_helpers.executors import run_strictly, run_with_lanes
from core_helpers.random_cases import damage, prefetch_for, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import Schedule, build_schedule, check, lower
from npu_pipe.errors import DeadlockError, ScheduleError
from npu_pipe.ir.action import Action, FusedPair, Kind, flatten

seeds = st.integers(0, 2**48)
JUNK = ("0F0", None, (), ("F", 0, 0), 0.5, True, b"0F0", Action("F", 0, 0), FusedPair(1, 2))


def many(examples: int):
    return settings(derandomize=True, deadline=None, max_examples=examples)


def says_where(error: ScheduleError) -> None:
    assert str(error).count("; ") >= 2
    if error.rank is not None:
        assert f"rank {error.rank}" in str(error)
    if error.action is not None:
        assert error.action in str(error)
    if isinstance(error, DeadlockError):
        assert error.cycle
        for rank, action in error.cycle:
            assert f"rank {rank} at position" in str(error)
            assert f"waits in {action} for" in str(error)


def assert_complete(schedule: Schedule, computed) -> None:
    """Each stage and microbatch went forward once and backward once."""
    for stage in range(schedule.stages):
        for i in range(schedule.microbatches):
            count = {kind: computed[Action(kind, stage, i)] for kind in Kind}
            assert count[Kind.F] == 1
            backward = int(schedule.training)
            assert count[Kind.B] + count[Kind.I] == backward
            assert count[Kind.B] + count[Kind.W] == backward
    assert all(action.kind.is_compute for action in computed)


def small(seed: int) -> Schedule:
    """A schedule to damage: half of them so small that damage often leaves them whole."""
    rng = Random(seed)
    if rng.random() < 0.5:
        return random_schedule(rng)
    name = rng.choice(("gpipe", "1f1b", "interleaved-1f1b"))
    return build_schedule(name, ranks=rng.randint(1, 3), microbatches=rng.randint(1, 3))


@given(seeds)
@many(400)
def test_a_damaged_schedule_runs_or_is_refused(seed):
    schedule = small(seed)
    damaged = replace(schedule, orders=damage(Random(seed), schedule.orders))
    try:
        check(damaged)
    except ScheduleError as error:
        says_where(error)
        return
    assert_complete(damaged, run_strictly(lower(damaged)))


@given(seeds)
@many(400)
def test_a_damaged_program_runs_or_is_refused(seed):
    program = lower(small(seed))
    damaged = replace(program, orders=damage(Random(seed), program.orders))
    try:
        check(damaged)
    except ScheduleError as error:
        says_where(error)
        return
    assert_complete(damaged.schedule, run_strictly(damaged))
    assert_complete(damaged.schedule, run_with_lanes(damaged))


@given(seeds, st.integers(1, 3))
@many(400)
def test_transfers_that_changed_places_run_or_are_refused(seed, prefetch):
    """Gentle damage only: neighbours of which one is a transfer are swapped, which often leaves a
    program that can run."""
    rng = Random(seed)
    schedule = small(seed)
    program = lower(schedule, prefetch=prefetch_for(schedule, prefetch))
    orders = [list(order) for order in program.orders]
    for _ in range(rng.randint(1, 6)):
        order = rng.choice(orders)
        at = rng.randrange(len(order) - 1) if len(order) > 1 else 0
        pair = order[at : at + 2]
        if any(not flatten(step)[0].kind.is_compute for step in pair):
            order[at : at + 2] = reversed(pair)
    damaged = replace(program, orders=tuple(map(tuple, orders)))
    try:
        check(damaged)
    except ScheduleError as error:
        says_where(error)
        return
    assert_complete(schedule, run_strictly(damaged))
    assert_complete(schedule, run_with_lanes(damaged))


def test_gentle_damage_is_sometimes_let_through_and_sometimes_refused():
    """Otherwise the test above would prove nothing."""
    outcomes = set()
    program = lower(build_schedule("1f1b", ranks=2, microbatches=3))
    for rank in range(2):
        for at in range(len(program.orders[rank]) - 1):
            order = list(program.orders[rank])
            order[at : at + 2] = reversed(order[at : at + 2])
            orders = list(program.orders)
            orders[rank] = tuple(order)
            try:
                check(replace(program, orders=tuple(orders)))
                outcomes.add("runs")
            except ScheduleError as error:
                outcomes.add(type(error).__name__)
    assert outcomes == {"runs", "ScheduleError", "DeadlockError"}


@given(seeds)
@many(200)
def test_junk_among_the_steps_is_refused(seed):
    rng = Random(seed)
    schedule = small(seed)
    program = lower(schedule)
    for subject in (schedule, program):
        orders = [list(order) for order in subject.orders]
        order = rng.choice(orders)
        order.insert(rng.randint(0, len(order)), rng.choice(JUNK))
        with pytest.raises(ScheduleError) as error:
            check(replace(subject, orders=tuple(map(tuple, orders))))
        says_where(error.value)
        assert error.value.rank is not None


@given(seeds)
@many(200)
def test_a_damaged_placement_runs_or_is_refused(seed):
    rng = Random(seed)
    schedule = small(seed)
    placement = list(schedule.placement)
    junk = rng.choice((-1, schedule.ranks, 10**30, None, "0", 0.0, True, (0,), *range(3)))
    placement[rng.randrange(len(placement))] = junk
    damaged = replace(
        schedule,
        placement=tuple(placement[: rng.choice((None, -1, 1))]),
        microbatches=schedule.microbatches + rng.choice((0, 0, 1, -1)),
        mirrored=rng.choice((schedule.mirrored, (0,), (0, 0), (1, 0), (None,), ("0",))),
    )
    try:
        check(damaged)
    except ScheduleError as error:
        says_where(error)
        return
    assert_complete(damaged, run_strictly(lower(damaged)))
