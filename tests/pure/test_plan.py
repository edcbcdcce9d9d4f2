"""The plan of each rank, played with transfers that take as long as they possibly can."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule

from npu_pipe import Action, Program, build_schedule, lower
from npu_pipe.ir.action import flatten
from npu_pipe.ir.plan import Instruction, RankPlan, rank_plan
from npu_pipe.ir.program import peer_of, route


class LazyTransfers:
    """A transfer ends only when every rank is stuck: then the first that can, ends."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.issued: list[Action] = []
        self.posted: list[Action] = []
        self.ended: set[Action] = set()

    def end_one(self) -> bool:
        blocked = set()
        for send in self.issued:
            pair = route(self.program.schedule, send)
            if send in self.ended or pair in blocked:
                continue
            blocked.add(pair)  # those behind it in this lane have to wait
            if peer_of(send) in self.posted:
                self.ended.add(send)
                return True
        return False


def play(program: Program) -> tuple[Counter[Action], LazyTransfers]:
    """Run all plans; fails when they get stuck, or when a plan says something untrue."""
    transfers = LazyTransfers(program)
    plans = [rank_plan(program, rank) for rank in range(program.schedule.ranks)]
    for plan in plans:
        transfers.posted += plan.first_posts
    at = [0] * len(plans)
    made: set[Action] = set()  # by the receive that names it, local ones too
    released: Counter[Action] = Counter()
    while any(at[plan.rank] < len(plan.instructions) for plan in plans):
        moved = False
        for plan in plans:
            while at[plan.rank] < len(plan.instructions):
                todo = plan.instructions[at[plan.rank]]
                if not is_there(todo, transfers, made):
                    break
                run(todo, transfers, made, released)
                at[plan.rank] += 1
                moved = True
        if not moved:
            assert transfers.end_one(), f"stuck at {[where(p, at[p.rank]) for p in plans]}"
    while transfers.end_one():
        pass
    return released, transfers


def where(plan: RankPlan, at: int) -> str:
    return str(plan.instructions[at].action) if at < len(plan.instructions) else "end"


def is_there(todo: Instruction, transfers: LazyTransfers, made: set[Action]) -> bool:
    if todo.takes is None:
        return True
    return peer_of(todo.takes) in transfers.ended if todo.is_far_take else todo.takes in made


def run(
    todo: Instruction, transfers: LazyTransfers, made: set[Action], released: Counter[Action]
) -> None:
    for send in todo.ended:
        assert send in transfers.ended, f"{todo.action} says that {send} has ended"
    transfers.posted += todo.posts
    if todo.gives is not None:
        made.add(todo.gives)
    for send in todo.sends:
        assert peer_of(send) in made, f"{send} is issued before it is made"
        transfers.issued.append(send)
    for receive in todo.releases:
        assert peer_of(receive) in transfers.ended
        released[receive] += 1


def prove(program: Program) -> None:
    schedule = program.schedule
    released, transfers = play(program)
    wanted = [
        action
        for order in program.orders
        for step in order
        for action in flatten(step)
        if not action.kind.is_compute
    ]
    assert Counter(transfers.issued) == Counter(a for a in wanted if a.kind.is_send)
    assert Counter(transfers.posted) == Counter(a for a in wanted if a.kind.is_receive)
    assert released == Counter(a for a in wanted if a.kind.is_receive), "each buffer comes back"
    assert transfers.ended == set(transfers.issued)
    for rank in range(schedule.ranks):
        plan = rank_plan(program, rank)
        assert [todo.action for todo in plan.instructions] == [
            action for step in schedule.orders[rank] for action in flatten(step)
        ]


@pytest.mark.parametrize("seed", range(120))
def test_plans_of_random_programs_end_and_say_what_is_true(seed: int) -> None:
    rng = Random(seed)
    schedule = random_schedule(rng)
    costs = random_costs(rng, schedule)
    prefetch = prefetch_for(schedule, rng.randint(1, 4))
    prove(lower(schedule, costs, prefetch=prefetch))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved-1f1b"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_plans_of_the_library(name: str, ranks: int) -> None:
    for microbatches in (1, ranks, 4 * ranks):
        for prefetch in (1, 3):
            schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
            prove(lower(schedule, prefetch=prefetch))


def test_a_send_is_known_to_have_ended_when_its_gradient_comes_back() -> None:
    program = lower(build_schedule("1f1b", ranks=2, microbatches=2))
    first = rank_plan(program, 0)
    assert [(str(todo.action), [*map(str, todo.ended)]) for todo in first.instructions] == [
        ("0F0", []),
        ("0F1", []),
        ("0B0", ["0SEND_F0"]),
        ("0B1", ["0SEND_F1"]),
    ]
