"""Laws 3 and 4 with tiles: no hang though each part waits in its lane until it is asked for.

Ranks are played as the executor runs them: receives are posted ahead, parts are issued in the
middle of an action, and an action waits in its middle for the parts that it takes. A lane has no
buffer: a part holds it until the receive of this very part is the next that was posted there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule

from npu_pipe import Schedule, ScheduleError, build_schedule, lower
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.plan import RankPlan, rank_plan
from npu_pipe.ir.program import Program, peer_of, route
from npu_pipe.schedules.registry import FAMILIES

Message = tuple[Action, int]  # a RECV and a part of it


class Lanes:
    """What was asked for and what has come, for each two ranks and lane, in order."""

    def __init__(self, schedule: Schedule, tiles: dict[int, int]) -> None:
        self.schedule = schedule
        self.tiles = tiles
        self.posted: dict[object, deque[Message]] = {}
        self.issued: dict[object, deque[Message]] = {}
        self.here: set[Message] = set()

    def parts(self, receive: Action) -> list[Message]:
        boundary = receive.stage - (receive.kind is Kind.RECV_F)
        return [(receive, part) for part in range(self.tiles[boundary])]

    def post(self, receive: Action) -> None:
        self._note(self.posted, self.parts(receive))

    def issue(self, message: Message) -> None:
        self._note(self.issued, [message])

    def _note(self, queues: dict[object, deque[Message]], messages: list[Message]) -> None:
        way = route(self.schedule, messages[0][0])
        queues.setdefault(way, deque()).extend(messages)
        posted, issued = self.posted.get(way), self.issued.get(way)
        while posted and issued and posted[0] == issued[0]:
            self.here.add(posted.popleft())
            issued.popleft()


def rank_runs(plan: RankPlan, lanes: Lanes, works_in_tiles: bool) -> Iterator[None]:
    """Yields while it is held up."""
    for receive in plan.first_posts:
        lanes.post(receive)
    for each in plan.instructions:
        taken = lanes.parts(each.takes) if each.takes and each.is_far_take else []
        given = lanes.parts(each.gives) if each.gives and each.is_far_give else []
        sends = [peer_of(send) for send in each.sends]
        early = given if works_in_tiles and sends and sends[0] == each.gives else []
        yield from until_here(taken[:1] if works_in_tiles else taken, lanes)
        for receive in each.posts:
            lanes.post(receive)
        for step in range(max(len(taken), len(early))):
            share = -(-len(taken) * (step + 1) // max(len(early), 1)) if early else step + 1
            yield from until_here(taken[:share], lanes)
            if step < len(early):
                lanes.issue(early[step])
        yield from until_here(taken, lanes)
        for receive in sends:
            for message in lanes.parts(receive):
                if message not in early:
                    lanes.issue(message)


def until_here(messages: list[Message], lanes: Lanes) -> Iterator[None]:
    while not lanes.here.issuperset(messages):
        yield


def play(program: Program, tiles: dict[int, int], works: list[bool]) -> list[int]:
    """The ranks that are held up for ever."""
    schedule = program.schedule
    lanes = Lanes(schedule, tiles)
    running = {
        rank: rank_runs(rank_plan(program, rank), lanes, works[rank])
        for rank in range(schedule.ranks)
    }
    while running:
        before = progress(lanes, running)
        for rank, run in list(running.items()):
            if next(run, run) is run:
                del running[rank]
        if before == progress(lanes, running):
            return list(running)
    return []


def progress(lanes: Lanes, running: dict[int, Iterator[None]]) -> tuple[int, ...]:
    queues = (*lanes.posted.values(), *lanes.issued.values())
    return len(lanes.here), sum(map(len, queues)), len(running)


def tiles_of(schedule: Schedule, rng: Random) -> dict[int, int]:
    return {boundary: rng.choice((1, 2, 3, 5)) for boundary in range(schedule.stages)}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_schedule_hangs(name: str, ranks: int) -> None:
    rng, played = Random(name), 0
    for microbatches in (1, ranks, 2 * ranks, 4 * ranks):
        with suppress(ScheduleError):
            schedule = build_schedule(name, ranks=ranks, microbatches=microbatches)
            for prefetch in (1, 2):
                with suppress(ScheduleError):  # some need two
                    program = lower(schedule, prefetch=prefetch)
                    works = [rng.random() < 0.8 for _ in range(ranks)]
                    assert play(program, tiles_of(schedule, rng), works) == []
                    played += 1
    assert played


def test_no_random_schedule_hangs() -> None:
    for seed in range(150):
        rng = Random(seed)
        schedule = random_schedule(rng)
        costs, prefetch = random_costs(rng, schedule), prefetch_for(schedule, rng.randint(1, 3))
        program = lower(schedule, costs, prefetch=prefetch)
        works = [rng.random() < 0.8 for _ in range(schedule.ranks)]
        assert play(program, tiles_of(schedule, rng), works) == [], seed


def test_a_rank_with_another_order_is_found() -> None:
    """The play itself can fail."""
    schedule = build_schedule("gpipe", ranks=2, microbatches=2)
    program = lower(schedule)
    plan = rank_plan(program, 0)
    first, second, *others = plan.instructions
    turned = RankPlan(schedule, 0, plan.first_posts, (second, first, *others))
    lanes = Lanes(schedule, {0: 2})
    runs = rank_runs(turned, lanes, True), rank_runs(rank_plan(program, 1), lanes, True)
    for _ in range(100):
        for run in runs:
            next(run, None)
    assert not lanes.here
