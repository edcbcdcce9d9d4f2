"""Every family on every size: it can run and be lowered, or is refused with sizes that work."""

from __future__ import annotations

import re

import pytest

from npu_pipe import FusedPair, Schedule, build_schedule, check, lower
from npu_pipe.errors import ScheduleError
from npu_pipe.schedules.registry import FAMILIES

RANKS, MICROBATCHES = range(1, 9), (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 24, 40)
LARGE = [(16, 1), (16, 19), (16, 48), (32, 32), (32, 64)]

COVERED = {  # which (p, m) a rule covers; all others take any
    "interleaved-1f1b": lambda p, m: m % max(1, m // p) == 0,
    "interleaved-zb": lambda p, m: m % max(1, m // p) == 0,
    "dualpipe": lambda p, m: p % 2 == 0 and m % 2 == 0 and m >= 2 * p,
    "dualpipe-v": lambda p, m: m >= 2 * p,
    "chimera": lambda p, m: p % 2 == 0 and m % p == 0,
}


def is_covered(name: str, p: int, m: int) -> bool:
    return name not in COVERED or COVERED[name](p, m)


def build(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    return build_schedule(name, ranks=p, microbatches=m, chunks=v)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("p", RANKS)
def test_it_runs_on_all_sizes_that_its_rule_covers(name, p):
    for v in (1, 2, 3) if FAMILIES[name].any_chunks else (None,):
        for m in filter(lambda m: is_covered(name, p, m), MICROBATCHES):
            lower(build(name, p, m, v), prefetch=2)  # which checks both


@pytest.mark.parametrize("name", FAMILIES)
def test_it_runs_on_many_ranks(name):
    sizes = [size for size in LARGE if is_covered(name, *size)]
    assert sizes
    for p, m in sizes:
        check(build(name, p, m))
    lower(build(name, 16, 48), prefetch=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_lowers_at_every_prefetch_or_needs_two_for_its_pairs(name):
    schedule = build(name, 4, 8)
    lower(schedule, prefetch=3)
    if any(isinstance(step, FusedPair) for order in schedule.orders for step in order):
        with pytest.raises(ScheduleError, match="fused pair takes two of one lane"):
            lower(schedule, prefetch=1)
    else:
        lower(schedule, prefetch=1)


@pytest.mark.parametrize("name", COVERED)
@pytest.mark.parametrize("p", [*RANKS, 24])
def test_it_refuses_other_sizes_and_names_the_nearest_that_work(name, p):
    for m in range(1, 60):
        if is_covered(name, p, m):
            continue
        with pytest.raises(ScheduleError) as error:
            build(name, p, m)
        numbers = list(map(int, re.findall(r"\d+", error.value.cure.partition(", or schedule")[0])))
        if "ranks" in error.value.cure:
            assert numbers == [q for q in (p - 1, p + 1) if q]
            assert any(is_covered(name, p + 1, n) for n in range(1, 99))
        else:
            works = [n for n in range(1, m + 2 * p + 1) if is_covered(name, p, n)]
            below, above = [n for n in works if n < m], [n for n in works if n > m]
            assert numbers == [*below[-1:], above[0]]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_schedule_that_a_refusal_offers_exists(name):
    for p, m in ((3, 7), (5, 7), (4, 9), (4, 2)):
        try:
            build(name, p, m)
        except ScheduleError as error:
            (offered,) = re.findall(r"or schedule '(.*)'", error.cure)
            assert offered in FAMILIES


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_schedules_of_two_chunks_take_no_other_number(name):
    assert build(name, 2, 4, 2) == build(name, 2, 4)
    with pytest.raises(ScheduleError, match="places 2 stages on each rank; 3 were asked") as error:
        build(name, 2, 4, 3)
    assert "interleaved-1f1b, looped-bfs, interleaved-zb" in error.value.cure
