"""Team: the ranks of one pipeline, which meet, run and fail together."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from npu_pipe.comm.board import Board, State
from npu_pipe.comm.circle import Circle, open_circle
from npu_pipe.comm.control import Control
from npu_pipe.comm.explain import explained
from npu_pipe.comm.groups import Groups
from npu_pipe.comm.handshake import agree
from npu_pipe.comm.mesh import open_mesh
from npu_pipe.comm.verdict import Cause
from npu_pipe.comm.watch import Watch
from npu_pipe.comm.words import words_of
from npu_pipe.errors import PeerError, RunError

__all__ = ["Team"]

_AMONG = "among ranks"
_PATIENCE_S = 3.0  # for the watch to learn why a connection has closed


class Team:
    """One rank's place among the ranks of a pipeline.

    address: of the host where the ranks met. timeout_s: a rank without progress for that long
    has failed. connect_s: how long ranks may take to come. members: see Groups. beside: the ranks
    of the job that share layers with this one, if any do. board: what this rank is at.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        address: str,
        open_store: Callable[[], dist.Store],
        timeout_s: float,
        connect_s: float,
        members: Sequence[int] | None = None,
        beside: Sequence[int] = (),
    ) -> None:
        """Connect all ranks; raises PeerError when one does not come."""
        self.rank = rank
        self.size = size
        self.board = Board()
        self.groups = Groups(rank, size, members=members)
        self.control = Control(self.groups)
        self._members = members
        self._beside = beside
        self._circle = self._alone()
        self._address = address
        self._open_store = open_store
        self._timeout_s = timeout_s
        self.connect_s = connect_s
        self._watch: Watch | None = None
        self._calls: Counter[str] = Counter()
        self._gather: Callable[[Any], list[Any]] = self.control.gather
        self._forget: list[Callable[[], None]] = [self.control.forget]
        self._interrupts: list[Callable[[], None]] = [
            self.groups.interrupt,
            lambda: self._circle.interrupt(),
        ]
        self._looks: list[Callable[[], None]] = []
        self._connect()

    @property
    def is_open(self) -> bool:
        return self.groups.is_open

    @property
    def numbers(self) -> Sequence[int]:
        """What its ranks are called in words of a failure, which go to all of its circle."""
        return self._circle.pipeline

    @property
    def shared(self) -> Sequence[Sequence[int]]:
        """Of its circle, the numbers of those that share layers with each other."""
        return self._circle.shared

    def on_break(self, forget: Callable[[], None]) -> None:
        """Have this called when the team breaks off: what is under way will not end."""
        self._forget.append(forget)

    def gather_through(self, gather: Callable[[Any], list[Any]]) -> None:
        """Use a faster way than the control group's, until the team breaks off."""
        self._gather = gather

    def on_interrupt(self, interrupt: Callable[[], None]) -> None:
        """Have this called, from another thread, to wake the main thread where it waits."""
        self._interrupts.append(interrupt)

    def on_look(self, look: Callable[[], None]) -> None:
        """Have this called, from another thread, before the board is looked at."""
        self._looks.append(look)

    def meet(self, call: str, prepare: Callable[[], Any]) -> list[Any]:
        """What `prepare` gives on each rank, on all; see `agree`."""
        return self.own(self.meet_all(call, prepare))

    def meet_all(self, call: str, prepare: Callable[[], Any]) -> list[Any]:
        """The same of all ranks of its circle; it is with them that each call is agreed on."""
        if not self.is_open:
            raise RunError(
                "a pipeline is not used after it failed or was closed",
                f"{call} was called",
                "make a new one, or reset it on every rank",
            )
        at = self.board.place
        if at.state != State.OUTSIDE:
            raise RunError(
                "a pipeline runs one call at a time",
                f"{call} was called in the middle of {at.call}, by a stage or another thread",
                "call it when that one has returned",
            )
        self._calls[call] += 1
        self.board.begin(self._calls.total(), f"{call} {self._calls[call]}")
        try:
            return agree(call, prepare, gather=self._gather_all)
        finally:
            self.board.end()

    def own(self, values: Sequence[Any]) -> list[Any]:
        """Of one value for each rank of its circle, those of its own ranks."""
        return [values[number] for number in self._circle.pipeline]

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, on every rank."""
        with self._together(State.MEETING):
            return self._gather(value)

    @contextmanager
    def unbroken(self) -> Iterator[None]:
        """What all ranks do to the end together: an error inside, of this rank or of another,
        makes this one leave, and all of them learn the cause."""
        with self._together(State.RUNNING):
            yield

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """As `unbroken`, for what may take a rank `connect_s`; all ranks leave it together."""
        with self._together(State.RUNNING), self.patience(self.connect_s):
            yield
            self._gather(None)

    def patience(self, timeout_s: float) -> AbstractContextManager[None]:
        """In the block, a rank has failed only without progress for that long."""
        return nullcontext() if self._watch is None else self._watch.patience(timeout_s)

    def tell(self, error: BaseException, where: str) -> None:
        """Leave word of this rank's error for the ranks that will miss it."""
        self._tell(_own_failure(self._circle.rank, error, where))

    def follow(self, other: Team) -> None:
        """From now on a failure of `other`, another team of this rank, is one of this team too:
        its ranks leave, also out of what they are in the middle of."""
        other.on_interrupt(lambda: self._fail_with(other))

    def reset(self) -> None:
        """Connect all ranks anew, after a failure that all of them have caught."""
        self._break_off()
        self._connect()
        counts = self._gather_all(self._calls)
        self._calls = Counter({call: max(c.get(call, 0) for c in counts) for call in self._calls})

    def close(self) -> None:
        """Leave, without waiting for other ranks."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self.board.withdraw()
        self._circle.close()
        self.groups.close()

    def _connect(self) -> None:
        try:
            self.groups.open(self._open_store, connect_s=self.connect_s)
            if self._beside:
                self._circle = open_circle(self.control, self._beside, connect_s=self.connect_s)
            circle = self._circle
            if circle.size > 1:
                boards = self._map_boards()
                mesh = open_mesh(
                    circle.rank,
                    address=self._address,
                    gather=circle.gather,
                    patience_s=self.connect_s,
                )
                self._watch = Watch(
                    circle.rank,
                    circle.size,
                    mesh=mesh,
                    board=self.board,
                    boards=boards,
                    timeout_s=self._timeout_s,
                    interrupt=self._interrupt,
                    look=self._look,
                )
                self.groups.wait_for_ever()
                circle.wait_for_ever()
        except BaseException:
            self.close()
            raise

    def _map_boards(self) -> dict[int, mmap.mmap]:
        """The boards of the other ranks of its circle on this host."""
        path = self.board.share()
        try:
            paths = self._circle.gather(str(path))
            boards = {}
            for rank, other in enumerate(paths):
                if rank != self._circle.rank:
                    with suppress(FileNotFoundError), Path(other).open("rb") as file:
                        boards[rank] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._circle.gather(None)  # all have looked
        finally:
            path.unlink()
        return boards

    @contextmanager
    def _together(self, state: State) -> Iterator[None]:
        with self.board.during(state):
            try:
                yield
            except BaseException as raised:
                failure = explained(raised, str(self.board.place))
                if failure is None:
                    self.tell(raised, str(self.board.place))
                    self._break_off()
                    raise
                cause = self._watch.cause(_PATIENCE_S) if self._watch is not None else None
                known = cause is not None
                if cause is None:  # all ranks live, and none has left
                    what = "lost a connection" if isinstance(raised, PeerError) else "failed"
                    where = f"rank {self._circle.rank} {what} {self.board.place}"
                    cause = Cause(failure.rule, f"{where}: {failure.facts}", failure.cure)
                self._tell(cause)
                self._break_off()
                # What broke here is only how this rank noticed, where the cause is known.
                facts = self._of_the_job(cause.facts)
                raise PeerError(cause.rule, facts, cause.cure) from None if known else raised

    def _interrupt(self) -> None:
        for interrupt in self._interrupts:
            interrupt()

    def _fail_with(self, other: Team) -> None:
        cause = other._watch.cause(0) if other._watch is not None else None
        if cause is not None and self.is_open:
            self._tell(Cause(cause.rule, other._of_the_job(cause.facts), cause.cure))
            self._interrupt()

    def _of_the_job(self, facts: str) -> str:
        """With the numbers of these ranks in the job, where they are a part of it only."""
        members = self._circle.members
        if members is None or facts.startswith(_AMONG):
            return facts
        ranks = ", ".join(map(str, members))
        return f"{_AMONG} {ranks} of the job, counted from 0: {facts}"

    def _gather_all(self, value: Any) -> list[Any]:
        if not self._circle.is_wider:
            return self.gather(value)
        with self._together(State.MEETING):
            return self._circle.gather(value)

    def _alone(self) -> Circle:
        return Circle(self.control, pipeline=range(self.size), members=self._members)

    def _look(self) -> None:
        for look in list(self._looks):
            look()

    def _tell(self, cause: Cause) -> None:
        if self._watch is not None:
            self._watch.tell(cause)

    def _break_off(self) -> None:
        self._gather = self.control.gather
        self._looks.clear()
        for forget in self._forget:
            forget()
        self.close()


def _own_failure(rank: int, error: BaseException, where: str) -> Cause:
    return Cause(
        "every rank runs its part of a call to the end",
        f"rank {rank} failed {where}: {words_of(error)}",
        "mend the cause on that rank; the others only followed",
    )
