"""The same numbers by other means than the package's own."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

from npu_pipe.ir.action import Action, Kind, Step, flatten
from npu_pipe.ir.program import Lane, Program, peer_of, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs


def ends_by_longest_path(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Per rank and position, when that step ends: the longest path that leads to it, found
    backwards from each step, where the package goes forwards."""
    place = {
        action: (rank, position)
        for rank, order in enumerate(schedule.orders)
        for position, step in enumerate(order)
        for action in flatten(step)
    }
    last = schedule.stages - 1

    def giver(stage: int, microbatch: int) -> Action:
        half = Action(Kind.I, stage, microbatch)
        return half if half in place else Action(Kind.B, stage, microbatch)

    def arrival(action: Action) -> float:
        kind, s, i = action
        if kind is Kind.W or (kind is Kind.F and s == 0) or (kind is not Kind.F and s == last):
            return 0.0
        source = Action(Kind.F, s - 1, i) if kind is Kind.F else giver(s + 1, i)
        there = end(*place[source])
        if place[source][0] == place[action][0]:
            return there
        scale = costs.microbatch_scale[i] if costs.microbatch_scale else 1.0
        return there + costs.transfer[min(s, source.stage)] * scale

    @cache
    def end(rank: int, position: int) -> float:
        actions = flatten(schedule.orders[rank][position])
        before = end(rank, position - 1) if position else 0.0
        return max(before, *map(arrival, actions)) + sum(
            _length(action, costs) for action in actions
        )

    return [[end(rank, i) for i in range(len(order))] for rank, order in enumerate(schedule.orders)]


def peak_by_events(schedule: Schedule, rank: int) -> int:
    """Activations held at once on a rank: counted over the set of all open ones."""
    held: set[tuple[int, int]] = set()
    peak = 0
    for step in schedule.orders[rank]:
        opens = {a[1:] for a in flatten(step) if a.kind is Kind.F}
        closes = {a[1:] for a in flatten(step) if a.kind in (Kind.B, Kind.W)}
        held |= opens
        peak = max(peak, len(held))
        held -= closes if schedule.training else opens
    return peak


def interleaved_by_rule(
    ranks: int, microbatches: int, chunks: int
) -> list[list[tuple[str, int, int]]]:
    """Interleaved 1F1B from the words of its rule: the k-th virtual forward is chunk
    (k mod g*v) // g, microbatch (k // (g*v)) * g + k mod g; backwards take chunks in reverse."""
    size = microbatches // max(1, microbatches // ranks)
    total = microbatches * chunks

    def virtual(k: int) -> tuple[int, int]:
        return (k % (size * chunks)) // size, (k // (size * chunks)) * size + k % size

    orders = []
    for rank in range(ranks):
        warmup = min(2 * (ranks - rank - 1) + (chunks - 1) * size, total)
        order = []
        forwards = backwards = 0
        while backwards < total:
            if forwards < total and forwards - backwards <= warmup:
                chunk, i = virtual(forwards)
                order.append(("F", chunk * ranks + rank, i))
                forwards += 1
            else:
                chunk, i = virtual(backwards)
                order.append(("B", (chunks - 1 - chunk) * ranks + rank, i))
                backwards += 1
        orders.append(order)
    return orders


def starts_of_program(program: Program, costs: Costs) -> dict[tuple[int, Step], float]:
    """(rank, step) -> start in a program whose transfers run beside compute: all times start at 0
    and are raised, sweep after sweep, until every rule of the simulator's docstring holds."""
    schedule = program.schedule
    place: dict[Action, tuple[int, Step]] = {}
    rules: dict[tuple[int, Step], list[tuple[bool, tuple[int, Step]]]] = {}
    for rank, order in enumerate(program.orders):
        for step in order:
            rules[rank, step] = []
            place |= dict.fromkeys(flatten(step), (rank, step))

    def after(later: tuple[int, Step], earlier: tuple[int, Step], *, end: bool = True) -> None:
        rules[later].append((end, earlier))

    for rank, order in enumerate(program.orders):
        computes = [step for step in order if flatten(step)[0].kind.is_compute]
        for before, step in pairwise(computes):
            after((rank, step), (rank, before))
        for lane in Lane:
            mine = [s for s in order if s not in computes and route(schedule, s).lane is lane]
            sends = [s for s in mine if s.kind.is_send]
            receives = [s for s in mine if s.kind.is_receive]
            for index, send in enumerate(sends):  # issued after the producers of all before it
                for earlier in sends[: index + 1]:
                    after((rank, send), place[_maker(earlier, place)])
            uses = []
            for step in computes:
                taken = [_taken(action) for action in flatten(step)]
                for receive in (receive for receive in taken if receive in receives):
                    after((rank, step), (rank, receive))
                    uses.append(step)
            for receive, use in zip(receives[program.prefetch :], uses, strict=False):
                after((rank, receive), (rank, use), end=False)
            links: dict[object, Action] = {}  # the transfer before it between the two ranks
            for send in sends:
                link = route(schedule, send)
                if link in links:
                    after((rank, send), (rank, links[link]))
                links[link] = send
    start = dict.fromkeys(rules, 0.0)
    length = {key: sum(_length(a, costs) for a in flatten(key[1])) for key in rules}
    moved = True
    while moved:
        moved = False
        for key, waits in rules.items():
            at = max([start[key], *(start[k] + length[k] * end for end, k in waits)])
            step = key[1]
            both = [key] if flatten(step)[0].kind.is_compute else [key, place[peer_of(step)]]
            for one in both:
                moved |= at > start[one]
                start[one] = max(start[one], at)
    return start


def _maker(send: Action, place: dict[Action, tuple[int, Step]]) -> Action:
    kinds = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.I, Kind.B)
    return next(a for a in (send._replace(kind=kind) for kind in kinds) if a in place)


def _taken(action: Action) -> Action:
    kinds = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}
    return action._replace(kind=kinds.get(action.kind, Kind.W))


def _length(action: Action, costs: Costs) -> float:
    kind, s, i = action
    scale = costs.microbatch_scale[i] if costs.microbatch_scale else 1.0
    f, b, w = costs.forward[s], costs.input_grad[s], costs.weight_grad[s]
    if kind.is_compute:
        return {Kind.F: f, Kind.I: b, Kind.W: w, Kind.B: b + w}[kind] * scale
    return costs.transfer[min(s, peer_of(action).stage)] * scale
