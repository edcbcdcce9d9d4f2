"""Two executors of programs with real threads and sends that wait for their receive.

Both check at every step that what it needs is really there on this rank, and return how often
each action was computed. A hang ends in a TimeoutError.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from core_helpers.random_cases import gives, wants
from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe.ir.program import Program, peer_of, route

TIMEOUT_S = 20.0
Fact = tuple[str, int, int]


class Link:
    """From one rank to another, without a buffer: send and receive meet, or wait."""

    def __init__(self) -> None:
        self._meeting = threading.Barrier(2)
        self._slot: Action | None = None

    def send(self, transfer: Action) -> None:
        self._slot = transfer
        self._meet()
        self._meet()

    def receive(self) -> Action | None:
        self._meet()
        got = self._slot
        self._meet()
        return got

    def _meet(self) -> None:
        try:
            self._meeting.wait(TIMEOUT_S)
        except threading.BrokenBarrierError as error:
            raise TimeoutError("nobody came to the other end") from error


class Rank:
    """What one rank has at hand."""

    def __init__(self, program: Program, rank: int, links: dict[tuple[int, int], Link]) -> None:
        self.schedule, self.rank, self._links = program.schedule, rank, links
        self.has: set[Fact] = set()
        self.computed: Counter[Action] = Counter()

    def compute(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            missing = wants(action, self.schedule.stages) - self.has
            assert not missing, f"{action} on rank {self.rank} ran without {missing}"
        for action in actions:
            self.computed[action] += 1
            self.has |= gives(action)

    def send(self, transfer: Action) -> None:
        assert carried_by(transfer) in self.has, f"{transfer} ran before what it carries"
        self._link(transfer).send(transfer)

    def receive(self, transfer: Action) -> None:
        came = self._link(transfer).receive()
        assert came == peer_of(transfer), f"{transfer} got {came}"
        self.has.add(carried_by(came))

    def _link(self, transfer: Action) -> Link:
        source, target, _ = route(self.schedule, transfer)
        return self._links[source, target]


def carried_by(send: Action) -> Fact:
    what = "activation" if send.kind is Kind.SEND_F else "input gradient"
    return (what, send.stage, send.microbatch)


def run_strictly(program: Program) -> Counter[Action]:
    """One thread a rank, one thing at a time, in the order as it stands."""
    ranks = _ranks(program)

    def walk(rank: Rank) -> None:
        for step in program.orders[rank.rank]:
            first = flatten(step)[0]
            if first.kind.is_compute:
                rank.compute(flatten(step))
            elif first.kind.is_send:
                rank.send(first)
            else:
                rank.receive(first)

    return _together(ranks, [lambda rank=rank: walk(rank) for rank in ranks])


def run_with_lanes(program: Program) -> Counter[Action]:
    """The runtime's rule: beside the thread that computes in order, a rank has one thread a lane
    for its sends and one for its receives. The n-th receive of a lane is posted when inputs of
    that lane were taken into use n - prefetch + 1 times."""
    ranks = _ranks(program)
    jobs: list[Callable[[], None]] = []
    for rank in ranks:
        jobs += _lane_jobs(program, rank)
    return _together(ranks, jobs)


def _lane_jobs(program: Program, rank: Rank) -> list[Callable[[], None]]:
    news = threading.Condition()
    order = program.orders[rank.rank]
    lanes: dict[tuple[str, bool], list[Action]] = {}
    brings: dict[Action, tuple[str, bool]] = {}
    for step in order:
        first = flatten(step)[0]
        if not first.kind.is_compute:
            lane = (route(program.schedule, first).lane, first.kind.is_send)
            lanes.setdefault(lane, []).append(first)
            brings[first] = lane
    uses: Counter[tuple[str, bool]] = Counter()

    def wait_for(condition: Callable[[], bool]) -> None:
        with news:
            if not news.wait_for(condition, TIMEOUT_S):
                raise TimeoutError(f"rank {rank.rank} waited in vain")

    def tell(change: Callable[[], object]) -> None:
        with news:
            change()
            news.notify_all()

    def compute() -> None:
        for step in order:
            actions = flatten(step)
            if not actions[0].kind.is_compute:
                continue
            needed = set().union(*(wants(action, rank.schedule.stages) for action in actions))
            wait_for(lambda needed=needed: needed <= rank.has)
            taken = [brings[get] for action in actions for get in _receives(action) & brings.keys()]
            tell(lambda taken=taken: uses.update(taken))
            tell(lambda actions=actions: rank.compute(actions))

    def send(transfers: list[Action]) -> None:
        for transfer in transfers:
            wait_for(lambda transfer=transfer: carried_by(transfer) in rank.has)
            rank.send(transfer)

    def receive(transfers: list[Action], lane: tuple[str, bool]) -> None:
        for index, transfer in enumerate(transfers):
            wait_for(lambda index=index: uses[lane] > index - program.prefetch)
            rank.receive(transfer)
            tell(lambda: None)

    jobs: list[Callable[[], None]] = [compute]
    for lane, transfers in lanes.items():
        if lane[1]:
            jobs.append(lambda transfers=transfers: send(transfers))
        else:
            jobs.append(lambda transfers=transfers, lane=lane: receive(transfers, lane))
    return jobs


def _receives(action: Action) -> set[Action]:
    kind, s, i = action
    if kind is Kind.W:
        return set()
    return {Action(Kind.RECV_F if kind is Kind.F else Kind.RECV_B, s, i)}


def _ranks(program: Program) -> list[Rank]:
    count = program.schedule.ranks
    links = {(a, b): Link() for a in range(count) for b in range(count) if a != b}
    return [Rank(program, rank, links) for rank in range(count)]


def _together(ranks: list[Rank], jobs: list[Callable[[], None]]) -> Counter[Action]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        for running in [pool.submit(job) for job in jobs]:
            running.result()
    return sum((rank.computed for rank in ranks), Counter())
