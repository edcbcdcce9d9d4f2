"""What makes large schedules quick: tuples made in bulk, and proofs that are kept."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import fields, replace
from itertools import count
from random import Random

import numpy as np
import pytest
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import Action, Kind, build_schedule, check, lower, simulate
from npu_pipe.errors import ScheduleError
from npu_pipe.ir.bulk import make_all
from npu_pipe.ir.check import prove_schedule
from npu_pipe.ir.deadlock import prove_program
from npu_pipe.ir.order import clock_order


@pytest.mark.parametrize("enabled", [True, False])
def test_tuples_in_bulk_are_those_made_one_by_one_and_the_collector_stays_as_it_was(enabled):
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        made = make_all(Action, (Kind.F, Kind.B), (0, 1), count())
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert made == [Action(Kind.F, 0, 0), Action(Kind.B, 1, 1)]
    assert set(map(type, made)) == {Action}


def test_a_proof_is_kept_with_its_value_and_does_not_count_in_it():
    fresh, proved = (build_schedule("1f1b", ranks=2, microbatches=2) for _ in range(2))
    program = lower(proved)
    assert prove_schedule(proved) is prove_schedule(proved)
    assert prove_program(program) is prove_program(program)
    assert fresh == proved
    assert hash(fresh) == hash(proved)
    assert repr(fresh) == repr(proved)
    assert copy.deepcopy(program) == pickle.loads(pickle.dumps(program)) == program


def test_a_changed_copy_is_proved_anew():
    program = lower(build_schedule("1f1b", ranks=2, microbatches=2))
    with pytest.raises(ScheduleError, match="0F2 is missing"):
        check(replace(program.schedule, microbatches=3))
    with pytest.raises(ScheduleError, match="0SEND_F0 is missing"):
        check(replace(program, orders=program.schedule.orders))
    late = replace(program, prefetch=program.prefetch)
    assert prove_program(late) is not prove_program(program)


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=150)
def test_what_lower_knows_of_its_program_is_what_a_proof_without_it_finds(seed):
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    program = lower(schedule, costs, prefetch=prefetch_for(schedule, rng.randint(1, 4)))
    fresh = replace(program)
    known, found = prove_program(program), prove_program(fresh)
    for column in fields(known.table):
        ours, theirs = (getattr(proof.table, column.name) for proof in (known, found))
        assert np.array_equal(ours, theirs), column.name
    assert np.array_equal(known.needed, found.needed)
    assert np.array_equal(known.peer, found.peer)
    assert sorted(known.order) == sorted(found.order)
    assert simulate(program, costs) == simulate(fresh, costs)


def test_a_clock_that_is_wrong_is_not_believed():
    proof = prove_program(lower(build_schedule("1f1b", ranks=2, microbatches=2)))
    table, peer, stands = proof.table, proof.peer, np.arange(len(proof.table))
    assert clock_order(table, peer, stands) is None, "ends of a transfer at two times"
    assert clock_order(table, peer, np.zeros_like(stands)) is None, "a rank that stands still"
