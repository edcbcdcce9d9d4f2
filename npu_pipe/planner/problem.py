"""The search problem: tasks in first-in first-out chains, one chain per stage and kind.

    stage 0   F chain   F0 F1 F2 ...        task = chain * m + turn
              I chain   I0 I1 I2 ...        chain = kind * stages + stage, kind 0 F, 1 I or B, 2 W
              W chain   W0 W1 W2 ...

When all microbatches cost the same, taking them in one order on every stage loses nothing: let
the k-th F, I and W of a stage be those of the k-th microbatch; each still has what it needs, as
the k-th of a stage had k before it, and as many activations are held as before. What is left to
decide is how each rank merges its chains. With microbatches of different lengths `turns` says
which one is k-th; one order on all stages is then a restriction.

A rank's order is a list of tasks. What a task needs of its own rank stands before it there, and
the rank never holds more than its cap: `fits` tells. Of another stage it needs `source` at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs

__all__ = ["Orders", "Problem", "fits", "make_problem", "orders_of", "to_schedule", "with_turns"]

Orders = list[list[int]]
"""Per rank, its tasks in the order they run."""


@dataclass(frozen=True, eq=False)
class Problem:
    """caps: per rank, the most stage activations held. turns[k]: the microbatch that is k-th.

    Per task: duration; rank; source, the task of another stage that it waits for, and delay, how
    long what that gives travels; user, the task that has this one as its source; -1 for none.
    offset: per rank, what is taken off its end in the objective: nothing for the makespan; for
    the span, when its first task can start.
    """

    placement: tuple[int, ...]
    caps: tuple[int, ...]
    turns: tuple[int, ...]
    is_split: bool
    is_span: bool
    duration: list[float]
    rank: list[int]
    source: list[int]
    delay: list[float]
    user: list[int]
    offset: tuple[float, ...]

    @property
    def ranks(self) -> int:
        return len(self.caps)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def microbatches(self) -> int:
        return len(self.turns)

    @property
    def kinds(self) -> int:
        return 3 if self.is_split else 2

    def __len__(self) -> int:
        return len(self.duration)

    def chains_of(self, rank: int) -> list[int]:
        """The chains of a rank: all F in forward order, then all I or B, then all W."""
        held = [s for s, home in enumerate(self.placement) if home == rank]
        return [kind * self.stages + s for kind in range(self.kinds) for s in held]

    def kind_of(self, task: int) -> int:
        return task // (self.stages * self.microbatches)

    def own_need(self, task: int) -> int:
        """F for an I or B, I for a W: of the same stage and microbatch; -1 for an F."""
        return max(task - self.stages * self.microbatches, -1)


def make_problem(
    costs: Costs,
    *,
    placement: tuple[int, ...],
    caps: tuple[int, ...],
    turns: tuple[int, ...],
    is_split: bool,
    is_span: bool,
) -> Problem:
    """is_span: each rank's time counts from its first start.

    Transfers that occupy the ranks become part of the tasks at both ends, which then overlap by
    the transfer: a delay below zero. As a receive could run well before its task, this is a
    model to search in, not one to bound with.
    """
    stages, m = costs.stages, len(turns)
    scale = [costs.microbatch_scale[i] if costs.microbatch_scale else 1.0 for i in turns]
    again = costs.recompute or [0.0] * stages
    input_grad = [i + f for i, f in zip(costs.input_grad, again, strict=True)]
    times = [costs.forward, input_grad, costs.weight_grad]
    if not is_split:
        times = [costs.forward, list(map(add, input_grad, costs.weight_grad))]
    source: list[int] = []
    delay: list[float] = []
    for kind in range(len(times)):
        for s in range(stages):
            before = (s - 1, s + 1, -1)[kind]
            inside = 0 <= before < stages
            far = inside and placement[before] != placement[s]
            boundary = costs.transfer[min(s, before)] if far else 0.0
            for k in range(m):
                source.append((kind * stages + before) * m + k if inside else -1)
                delay.append(boundary * scale[k] * (1 if costs.overlapped else -1))
    user = [-1] * len(source)
    for task, needed in enumerate(source):
        if needed >= 0:
            user[needed] = task
    duration = [time * factor for row in times for time in row for factor in scale]
    if not costs.overlapped:
        for task, needed in enumerate(source):
            if needed >= 0:
                duration[task] -= delay[task]
                duration[needed] -= delay[task]
    problem = Problem(
        placement=placement,
        caps=caps,
        turns=turns,
        is_split=is_split,
        is_span=is_span,
        duration=duration,
        rank=[placement[s] for _ in times for s in range(stages) for _ in range(m)],
        source=source,
        delay=delay,
        user=user,
        offset=(0.0,) * len(caps),
    )
    return replace(problem, offset=_offsets(problem))


def with_turns(problem: Problem, turns: tuple[int, ...]) -> Problem:
    """The same problem with its microbatches in another order."""
    m = problem.microbatches
    place = {microbatch: turn for turn, microbatch in enumerate(problem.turns)}
    old = [place[microbatch] for microbatch in turns]
    tasks = [chain + turn for chain in range(0, len(problem), m) for turn in old]
    changed = replace(
        problem,
        turns=turns,
        duration=[problem.duration[task] for task in tasks],
        delay=[problem.delay[task] for task in tasks],
    )
    return replace(changed, offset=_offsets(changed)) if problem.is_span else changed


def _offsets(problem: Problem) -> tuple[float, ...]:
    if not problem.is_span:
        return (0.0,) * problem.ranks
    m, arrival = problem.microbatches, [0.0]
    for s in range(1, problem.stages):
        arrival.append(arrival[-1] + problem.duration[(s - 1) * m] + problem.delay[s * m])
    return tuple(arrival[problem.placement.index(rank)] for rank in range(problem.ranks))


def fits(problem: Problem, order: Sequence[int], rank: int) -> bool:
    """Whether a rank's order keeps its chains, its own needs and its cap."""
    m = problem.microbatches
    turn = dict.fromkeys(problem.chains_of(rank), 0)
    done = set()
    held, last = 0, problem.kinds - 1
    for task in order:
        own, source = problem.own_need(task), problem.source[task]
        is_near = source >= 0 and problem.rank[source] == rank
        if (own >= 0 and own not in done) or (is_near and source not in done):
            return False
        if task % m != turn[task // m]:
            return False
        turn[task // m] += 1
        done.add(task)
        kind = problem.kind_of(task)
        held += kind == 0
        if held > problem.caps[rank]:
            return False
        held -= kind == last
    return True


def to_schedule(problem: Problem, orders: Orders, name: str) -> Schedule:
    """The schedule, in the caller's numbers of microbatches."""
    kinds = (Kind.F, Kind.I, Kind.W) if problem.is_split else (Kind.F, Kind.B)
    m, stages = problem.microbatches, problem.stages

    def action(task: int) -> Action:
        chain, turn = divmod(task, m)
        return Action(kinds[chain // stages], chain % stages, problem.turns[turn])

    return Schedule(
        name=name,
        microbatches=m,
        placement=problem.placement,
        orders=tuple(tuple(map(action, order)) for order in orders),
    )


def orders_of(problem: Problem, schedule: Schedule) -> Orders | None:
    """The orders of a schedule, its microbatches renumbered first in first out.

    A B is taken apart where the problem splits backwards. None where the schedule does not
    belong to the problem.
    """
    if (schedule.placement, schedule.microbatches) != (problem.placement, problem.microbatches):
        return None
    codes = {Kind.F: (0,), Kind.I: (1,), Kind.W: (2,), Kind.B: (1, 2)}
    if not problem.is_split:
        codes = {Kind.F: (0,), Kind.B: (1,)}
    m, stages = problem.microbatches, problem.stages
    orders: Orders = []
    for rank, steps in enumerate(schedule.orders):
        turn = dict.fromkeys(problem.chains_of(rank), 0)
        order: list[int] = []
        for step in steps:
            if not isinstance(step, Action) or step.kind not in codes:
                return None
            for kind in codes[step.kind]:
                chain = kind * stages + step.stage
                if turn.get(chain, m) >= m:
                    return None
                order.append(chain * m + turn[chain])
                turn[chain] += 1
        if len(order) != len(turn) * m or not fits(problem, order, rank):
            return None
        orders.append(order)
    return orders
