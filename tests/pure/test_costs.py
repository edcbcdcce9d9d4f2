"""Costs: what fits, and what is told when it does not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from npu_pipe import Costs, build_schedule, simulate
from npu_pipe.errors import CostsError

GOOD = {"forward": [1, 2], "input_grad": [1, 1], "weight_grad": [0, 1], "transfer": [0.5]}


def test_any_sequence_of_numbers_is_kept_as_a_tuple_of_floats():
    for form in (list, tuple, np.array, lambda values: iter(values)):
        costs = Costs(**{field: form(values) for field, values in GOOD.items()})
        assert costs.forward == (1.0, 2.0)
        assert costs.transfer == (0.5,)
        assert costs == Costs(**GOOD)
        assert hash(costs) == hash(Costs(**GOOD))


def test_uniform_costs():
    assert Costs.uniform(2, transfer=3) == Costs([1, 1], [1, 1], [1, 1], [3])
    assert Costs.uniform(1).transfer == ()
    assert Costs.uniform(4).stages == 4


@pytest.mark.parametrize("field", ["forward", "input_grad", "weight_grad", "transfer"])
@pytest.mark.parametrize("value", [-1, -1e-9, 1e31, math.nan, math.inf, -math.inf])
def test_negative_and_endless_times_are_refused_with_their_place(field, value):
    with pytest.raises(CostsError, match=rf"{field}\[0\] is "):
        Costs(**GOOD | {field: [value, *GOOD[field][1:]]})


@pytest.mark.parametrize("value", [None, 1, "ab", [None, 1], [[1], [2]], [1, "x"], [10**400, 1]])
def test_what_is_no_sequence_of_numbers_is_refused(value):
    with pytest.raises(CostsError, match="forward is"):
        Costs(**GOOD | {"forward": value})


@pytest.mark.parametrize("field", ["input_grad", "weight_grad", "transfer"])
def test_lengths_that_do_not_fit_are_refused(field):
    for values in ([], [*GOOD[field], 1]):
        with pytest.raises(CostsError, match=f"forward has 2, {field} has {len(values)}"):
            Costs(**GOOD | {field: values})


@pytest.mark.parametrize("stages", [0, -1])
def test_there_is_at_least_one_stage(stages):
    with pytest.raises(CostsError, match="at least one stage"):
        Costs.uniform(stages)


def test_costs_of_another_schedule_are_refused():
    schedule = build_schedule("1f1b", ranks=3, microbatches=4)
    with pytest.raises(CostsError, match="the schedule has 3 stages, the costs have 2"):
        simulate(schedule, Costs(**GOOD))
    scaled = Costs([1] * 3, [1] * 3, [1] * 3, [0] * 2, microbatch_scale=[1, 1])
    with pytest.raises(CostsError, match="4 microbatches and 2 factors"):
        simulate(schedule, scaled)
