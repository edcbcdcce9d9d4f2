"""List scheduling: whichever rank can start a task first starts the one it likes best.

    rank 1   .. F0 F1 F2 I0 | now: F3 here at once, W0 too, I1 arrives in a moment

A rank compares when each of its next tasks could start, with a handicap per kind; the smallest
wins, and the rank waits for it if it has to. A handicap on W lets an I or F that arrives soon go
first, so that W's fill bubbles instead of making them. A rank whose cap forbids its next F
forgets that handicap, as only a W frees an activation.

A rank with several chunks lets an F in only if it can still finish the microbatches it holds,
oldest first (the banker's rule), so nothing ever gets stuck.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from npu_pipe.planner.bound import round_trips
from npu_pipe.planner.problem import Orders, Problem

__all__ = ["Rule", "list_schedule", "random_rule", "rules"]


@dataclass(frozen=True, slots=True)
class Rule:
    """Handicaps in mean task times of the rank; caps, at most those of the problem.

    forward, weight: of F and W against I. depth: taken off per chunk that lies deeper.
    """

    forward: float
    weight: float
    depth: float
    caps: tuple[int, ...]


def rules(problem: Problem) -> Iterator[Rule]:
    """The grid of rules that are always tried."""
    chunks = problem.stages > problem.ranks
    levels = dict.fromkeys(_caps(problem, extra) for extra in (0, 1, 2, 4, len(problem)))
    for caps, forward, weight, depth in product(
        levels, (0.0, 0.6, -0.6), (0.0, 0.5, 1.0), (0.0, 1.0) if chunks else (0.0,)
    ):
        yield Rule(forward, weight, depth, caps)


def random_rule(problem: Problem, rng: Random) -> Rule:
    """A rule off the grid, its caps rank by rank."""
    full = problem.caps
    tight = _caps(problem, rng.randint(0, 3))
    caps = [rng.randint(low, high) for low, high in zip(tight, full, strict=True)]
    return Rule(rng.uniform(-1, 1), rng.uniform(0, 1.5), rng.uniform(-0.5, 1.5), tuple(caps))


def _caps(problem: Problem, extra: int) -> tuple[int, ...]:
    """What fills the way to the loss and back at the pace of the busiest rank, and some more."""
    m = problem.microbatches
    load = [0.0] * problem.ranks
    held = [0.0] * problem.ranks
    for task, rank in enumerate(problem.rank):
        load[rank] += problem.duration[task]
    for stage, hold in enumerate(round_trips(problem)):
        held[problem.placement[stage]] += hold * m
    pace = max(load) or 1.0
    chunks = [problem.placement.count(rank) for rank in range(problem.ranks)]
    return tuple(
        min(cap, max(least, math.ceil(hold / pace - 1e-9)) + extra)
        for cap, hold, least in zip(problem.caps, held, chunks, strict=True)
    )


def list_schedule(problem: Problem, rule: Rule) -> Orders:
    """Orders that fit the problem and never get stuck."""
    return _Dispatch(problem, rule).run()


class _Dispatch:
    """The state of one run."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem = problem
        self.caps = rule.caps
        self.end = [-1.0] * len(problem)
        self.clock = [0.0] * problem.ranks
        self.turn = [0] * (problem.kinds * problem.stages)
        self.orders: Orders = [[] for _ in range(problem.ranks)]
        self.held = [0] * problem.ranks
        self.forwards: list[list[int]] = []  # chains of F, for each rank
        self.looks: list[list[tuple[int, int, float]]] = []  # (chain, kind, handicap): I, F, W
        for rank in range(problem.ranks):
            chains = problem.chains_of(rank)
            chunks = len(chains) // problem.kinds
            tasks = [chain * problem.microbatches for chain in chains]
            unit = sum(problem.duration[task] for task in tasks) / len(tasks)
            ranked = []
            for index, chain in enumerate(chains):
                kind, chunk = divmod(index, chunks)
                base = (rule.forward - rule.depth * chunk, 0.0, rule.weight)[kind]
                ranked.append(((1, 0, 2)[kind], -chunk, chain, kind, base * unit))
            self.forwards.append(chains[:chunks])
            self.looks.append([look[2:] for look in sorted(ranked)])

    def run(self) -> Orders:
        problem = self.problem
        choices = [self.choose(rank) for rank in range(problem.ranks)]
        for _ in range(len(problem)):
            begin, task = choice = min(choices)
            rank = choices.index(choice)
            self.commit(rank, begin, task)
            choices[rank] = self.choose(rank)
            after = problem.user[task]
            if after >= 0 and problem.rank[after] != rank:
                choices[problem.rank[after]] = self.choose(problem.rank[after])
        return self.orders

    def choose(self, rank: int) -> tuple[float, int]:
        """(start, task) of what the rank likes best now; (inf, -1) while it knows of nothing."""
        problem, end, clock = self.problem, self.end, self.clock[rank]
        m = problem.microbatches
        best, start, found = math.inf, math.inf, -1
        is_full = False
        for chain, kind, handicap in self.looks[rank]:
            turn = self.turn[chain]
            if turn == m:
                continue
            task = chain * m + turn
            begin, source = clock, problem.source[task]
            if source >= 0:
                if end[source] < 0:
                    continue
                begin = max(begin, end[source] + problem.delay[task])
            if kind == 0:
                if not self.may_hold(rank, chain):
                    is_full = True
                    continue
            elif end[problem.own_need(task)] < 0:
                continue
            score = begin if kind == 2 and is_full else begin + handicap
            if score < best:
                best, start, found = score, begin, task
        return start, found

    def may_hold(self, rank: int, chain: int) -> bool:
        free = self.caps[rank] - self.held[rank] - 1
        chains = self.forwards[rank]
        if free < 0 or len(chains) == 1:
            return free >= 0
        stages, last = self.problem.stages, self.problem.kinds - 1
        oldest = min(self.turn[other + last * stages] for other in chains)
        newest = max(self.turn[other] for other in chains)
        for turn in range(oldest, max(newest, self.turn[chain] + 1)):
            let_in = sum(self.turn[other] + (other == chain) > turn for other in chains)
            if len(chains) - let_in > free:
                return False
            free += let_in - sum(self.turn[other + last * stages] > turn for other in chains)
        return True

    def commit(self, rank: int, begin: float, task: int) -> None:
        problem = self.problem
        self.clock[rank] = self.end[task] = begin + problem.duration[task]
        self.turn[task // problem.microbatches] += 1
        self.orders[rank].append(task)
        kind = problem.kind_of(task)
        self.held[rank] += (kind == 0) - (kind == problem.kinds - 1)
