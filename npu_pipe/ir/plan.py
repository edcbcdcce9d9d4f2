"""What one rank has to do around each of its actions: a program resolved for its executor.

Compute runs in the program's order; transfers run beside it, each lane in the program's order:

    a receive is posted  when the use of the input `prefetch` places before it in its lane begins
    a send is issued     when what it carries is there, and all sends before it in its lane are out
    a send has ended     for certain, when something arrives that its receiver made from it or
                         later: its buffer can go then, without asking the transport

None of these is later than the program's own order, which cannot hang: see `ir.deadlock`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.program import Lane, Program, peer_of, route
from npu_pipe.ir.schedule import Schedule

__all__ = ["Instruction", "RankPlan", "input_of", "rank_plan"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One action of compute and what goes with it.

    takes: the RECV_F or RECV_B that names its input or gradient; None at the model's ends
        (batch, loss) and for W.
    gives: the RECV that names its output or input gradient where it arrives; None likewise.
    is_far_take, is_far_give: whether these cross between ranks, or stay on this one.
    posts: receives to post when it begins.
    sends: sends to issue when it has ended.
    ended: sends that have ended once `takes` is there.
    releases: far receives whose buffers nobody needs once it has ended.
    """

    action: Action
    takes: Action | None
    is_far_take: bool
    gives: Action | None
    is_far_give: bool
    posts: tuple[Action, ...]
    sends: tuple[Action, ...]
    ended: tuple[Action, ...]
    releases: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """schedule: what is run. first_posts: the receives to post before anything runs."""

    schedule: Schedule
    rank: int
    first_posts: tuple[Action, ...]
    instructions: tuple[Instruction, ...]


def rank_plan(program: Program, rank: int) -> RankPlan:
    """The plan of one rank of a checked program."""
    schedule = program.schedule
    receives: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane}
    sends: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane}
    for step in program.orders[rank]:
        for action in flatten(step):
            if not action.kind.is_compute:
                queues = sends if action.kind.is_send else receives
                queues[route(schedule, action).lane].append(action)
    compute = [action for step in schedule.orders[rank] for action in flatten(step)]
    ended = _ended_sends(schedule, compute, [*sends[Lane.DOWN], *sends[Lane.UP]])

    first_posts = [
        queue.popleft()
        for queue in receives.values()
        for _ in range(min(program.prefetch, len(queue)))
    ]
    made: set[Action] = set()
    instructions = []
    for index, action in enumerate(compute):
        takes, gives = input_of(schedule, action), _gives(schedule, action)
        is_far_take = takes is not None and _is_far(schedule, takes)
        is_far_give = gives is not None and _is_far(schedule, gives)
        posts = []
        if takes is not None and is_far_take:
            lane = receives[route(schedule, takes).lane]
            posts = [lane.popleft()] if lane else []
        if gives is not None and is_far_give:
            made.add(peer_of(gives))
        instructions.append(
            Instruction(
                action=action,
                takes=takes,
                is_far_take=is_far_take,
                gives=gives,
                is_far_give=is_far_give,
                posts=tuple(posts),
                sends=tuple(_issuable(sends.values(), made)),
                ended=ended.get(index, ()),
                releases=tuple(_releases(schedule, action)),
            )
        )
    return RankPlan(schedule, rank, tuple(first_posts), tuple(instructions))


def _issuable(queues: Iterable[deque[Action]], made: set[Action]) -> list[Action]:
    issued = []
    for queue in queues:
        while queue and queue[0] in made:
            issued.append(queue.popleft())
    return issued


def input_of(schedule: Schedule, action: Action) -> Action | None:
    """The RECV that names its input or gradient; None at the model's ends and for W."""
    kind, stage, microbatch = action
    if kind is Kind.F and stage > 0:
        return Action(Kind.RECV_F, stage, microbatch)
    if kind in (Kind.B, Kind.I) and stage + 1 < schedule.stages:
        return Action(Kind.RECV_B, stage, microbatch)
    return None


def _gives(schedule: Schedule, action: Action) -> Action | None:
    kind, stage, microbatch = action
    if kind is Kind.F and stage + 1 < schedule.stages:
        return Action(Kind.RECV_F, stage + 1, microbatch)
    if kind in (Kind.B, Kind.I) and stage > 0:
        return Action(Kind.RECV_B, stage - 1, microbatch)
    return None


def _releases(schedule: Schedule, action: Action) -> list[Action]:
    """An activation is kept from F, and a gradient from I, until what W needs is used up."""
    kind, stage, microbatch = action
    if kind is Kind.I or (kind is Kind.F and schedule.training):
        return []
    users = [Action(Kind.F, stage, microbatch)]
    if kind is not Kind.F:
        users.append(Action(Kind.I, stage, microbatch))
    taken = [takes for user in users if (takes := input_of(schedule, user)) is not None]
    return [takes for takes in taken if _is_far(schedule, takes)]


def _is_far(schedule: Schedule, transfer: Action) -> bool:
    source, target, _ = route(schedule, transfer)
    return source != target


def _ended_sends(
    schedule: Schedule, compute: list[Action], sends: list[Action]
) -> dict[int, tuple[Action, ...]]:
    """Index of a compute action -> sends that have ended once its input is there.

    What a rank gives from its k-th action on shows that it has used all that its actions up to
    the k-th take.
    """
    if not sends:
        return {}
    made_at: dict[Action, int] = {}  # a transfer -> index of its maker, or its user, on their rank
    used_at: dict[Action, int] = {}
    for order in schedule.orders:
        for index, action in enumerate(action for step in order for action in flatten(step)):
            for found, named in ((made_at, _gives), (used_at, input_of)):
                transfer = named(schedule, action)
                if transfer is not None:
                    found[transfer] = index
    arrivals: dict[int, list[int]] = {}  # per sender, indices of the actions that take from it
    proof: dict[int, list[int]] = {}  # and, at each, up to where it has used what it was sent
    for index, action in enumerate(compute):
        takes = input_of(schedule, action)
        if takes is not None and _is_far(schedule, takes):
            source = route(schedule, takes).source
            arrivals.setdefault(source, []).append(index)
            proved = proof.setdefault(source, [])
            proved.append(max(made_at[takes], proved[-1] if proved else 0))
    ended: dict[int, list[Action]] = {}
    for send in sends:
        target = route(schedule, send).target
        at = bisect_left(proof.get(target, []), used_at[peer_of(send)])
        if at < len(proof.get(target, [])):
            ended.setdefault(arrivals[target][at], []).append(send)
    return {index: tuple(found) for index, found in ended.items()}
