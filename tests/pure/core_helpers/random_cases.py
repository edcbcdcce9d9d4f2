"""Random valid schedules and costs, and random damage to them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from npu_pipe.ir.action import Action, FusedPair, Kind, Step, flatten
from npu_pipe.ir.placement import linear, loop, vee
from npu_pipe.ir.schedule import Schedule
from npu_pipe.simulator.costs import Costs

TIMES = (0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 1.5, 2.0, 3.0, 8.0)  # sums of these are exact


def random_placement(rng: Random, ranks: int) -> tuple[int, ...]:
    shape = rng.choice(("linear", "loop", "vee", "any", "any", "runs"))
    if shape == "linear":
        return linear(ranks)
    if shape == "loop":
        return loop(ranks, rng.randint(1, 3))
    if shape == "vee":
        return vee(ranks)
    stages = list(range(ranks)) + [rng.randrange(ranks) for _ in range(rng.randint(0, 5))]
    rng.shuffle(stages)
    # runs: neighbouring stages often lie on one rank
    return tuple(sorted(stages) if shape == "runs" else stages)


def random_schedule(rng: Random) -> Schedule:
    """A valid schedule by list scheduling: whatever can run next, any of it runs next."""
    ranks, microbatches = rng.randint(1, 5), rng.randint(1, 6)
    placement = random_placement(rng, ranks)
    training = rng.random() > 0.1
    mirrored = tuple(i for i in range(microbatches) if rng.random() < 0.5)
    schedule = Schedule(
        name="random",
        microbatches=microbatches,
        placement=placement,
        orders=((),) * ranks,
        mirrored=mirrored if rng.random() < 0.3 else (),
        training=training,
    )
    split, fuse = rng.choice((0, 0.5, 1)), rng.choice((0, 0.5))
    left: set[Action] = set()
    for stage in range(len(placement)):
        for i in range(microbatches):
            left.add(Action(Kind.F, stage, i))
            if training and rng.random() < split:
                left |= {Action(Kind.I, stage, i), Action(Kind.W, stage, i)}
            elif training:
                left.add(Action(Kind.B, stage, i))
    done: set[tuple[str, int, int]] = set()
    orders: list[list[Step]] = [[] for _ in range(ranks)]
    backward_first = rng.random()
    while left:
        ready = sorted(action for action in left if wants(action, len(placement)) <= done)
        backwards = [action for action in ready if action.kind is not Kind.F]
        if backwards and rng.random() < backward_first:
            ready = backwards
        first = rng.choice(ready)
        rank = schedule.rank_of(first)
        partners = [
            other
            for other in ready
            if (first.kind, other.kind) == (Kind.F, Kind.B)
            and schedule.rank_of(other) == rank
            and other.microbatch != first.microbatch
        ]
        fused = bool(partners) and rng.random() < fuse
        step = FusedPair(first, rng.choice(partners)) if fused else first
        orders[rank].append(step)
        for action in flatten(step):
            left.remove(action)
            done |= gives(action)
    return replace(schedule, orders=tuple(map(tuple, orders)))


def wants(action: Action, stages: int) -> set[tuple[str, int, int]]:
    """What has to be there first, by the words of the rule: a second writing of it."""
    kind, s, i = action
    if kind is Kind.F:
        return {("activation", s - 1, i)} if s > 0 else set()
    if kind is Kind.W:
        return {("input gradient", s, i)}
    after = {("input gradient", s + 1, i)} if s + 1 < stages else set()
    return {("activation", s, i)} | after


def gives(action: Action) -> set[tuple[str, int, int]]:
    kind, s, i = action
    return {
        Kind.F: {("activation", s, i)},
        Kind.I: {("input gradient", s, i)},
        Kind.W: {("weight gradient", s, i)},
        Kind.B: {("input gradient", s, i), ("weight gradient", s, i)},
    }[kind]


def random_costs(rng: Random, schedule: Schedule, *, transfers: bool = True) -> Costs:
    def times(count: int) -> list[float]:
        return [rng.choice(TIMES) for _ in range(count)]

    stages = schedule.stages
    scale = [rng.choice((0.0, 0.5, 1.0, 2.0)) for _ in range(schedule.microbatches)]
    return Costs(
        forward=times(stages),
        input_grad=times(stages),
        weight_grad=times(stages),
        transfer=times(stages - 1) if transfers else [0.0] * (stages - 1),
        microbatch_scale=scale if rng.random() < 0.3 else (),
    )


def damage(rng: Random, orders: tuple[tuple[Step, ...], ...]) -> tuple[tuple[Step, ...], ...]:
    """One to three random changes: swap, move, drop, double, re-aim, change of kind."""
    lists = [list(order) for order in orders]
    for _ in range(rng.randint(1, 3)):
        filled = [order for order in lists if order]
        if not filled:
            break
        order = rng.choice(filled)
        at, to = rng.randrange(len(order)), rng.randrange(len(order))
        what = rng.choice(("swap", "swap", "next", "move", "drop", "double", "re-aim", "kind"))
        if what == "swap":
            order[at], order[to] = order[to], order[at]
        elif what == "next":
            at = min(at, len(order) - 2) if len(order) > 1 else 0
            order[at : at + 2] = reversed(order[at : at + 2])
        elif what == "move":
            rng.choice(lists).append(order.pop(at))
        elif what == "drop":
            order.pop(at)
        elif what == "double":
            rng.choice(lists).insert(to, order[at])
        else:
            order[at] = _bend(rng, order[at], what)
    return tuple(map(tuple, lists))


def _bend(rng: Random, step: Step, what: str) -> Step:
    if isinstance(step, FusedPair):
        halves = list(step)
        which = rng.randrange(2)
        halves[which] = _bend(rng, halves[which], what)
        return FusedPair(*halves)
    if what == "kind":
        return step._replace(kind=rng.choice(tuple(Kind)))
    field = rng.choice(("stage", "microbatch"))
    return step._replace(**{field: getattr(step, field) + rng.choice((-100, -1, 1, 100))})


def prefetch_for(schedule: Schedule, prefetch: int) -> int:
    """A fused pair may take two inputs of one lane at once: then prefetch is at least 2."""
    pairs = any(isinstance(step, FusedPair) for order in schedule.orders for step in order)
    return max(prefetch, 2) if pairs else prefetch
