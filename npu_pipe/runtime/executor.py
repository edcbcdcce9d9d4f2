"""Run one rank's plan: compute in order, transfers beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor

from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.mark import to_int
from npu_pipe.ir.plan import Instruction, RankPlan
from npu_pipe.ir.program import peer_of, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.boundary import Meta, flatten_value
from npu_pipe.runtime.loss import WithLoss
from npu_pipe.runtime.record import now_us
from npu_pipe.runtime.stage import Stage

__all__ = ["Clock", "Ending", "Executor", "Link", "Parcel"]

Parcel: TypeAlias = tuple[Meta, list[Tensor]]
"""A value taken apart: its form and its tensors."""


class Ending(NamedTuple):
    """What becomes of what the model gives.

    output: (microbatch, output of the last stage) -> the loss that the backward starts from and
        the gradient it starts with; None if there is no backward.
    auxiliary: (microbatch, auxiliary loss of a stage) -> the gradient its backward starts with.
    """

    output: Callable[[int, Any], tuple[Tensor, Tensor] | None]
    auxiliary: Callable[[int, Any], Tensor]


_NONE: Mapping[str, Any] = {}
_GRADIENTS = Meta("", ())  # both ends know the form of gradients from the activation


class Link(Protocol):
    """What the executor needs of the transfers between ranks. Transfers are named by actions.

    copies: whether `send` makes copies, so that what a tensor shares memory with may be released
        right after it. One that has a true `tells_unused` takes gradients without values (on the
        meta device), for what a stage did not use, and gives them out as such.
    """

    @property
    def copies(self) -> bool: ...

    def copies_at_once(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `send` has copied these when it returns, so that they may change then."""
        ...

    def post(self, receive: Action) -> None:
        """Ask for a transfer; called in the order of its lane."""
        ...

    def take(self, receive: Action) -> Parcel:
        """Wait for a transfer that was posted. Its tensors may be used until `release`."""
        ...

    def release(self, receive: Action) -> None:
        """Nobody reads the tensors of this transfer any more."""
        ...

    def send(self, send: Action, parcel: Parcel) -> None:
        """Issue a transfer; called in the order of its lane. The tensors are kept until sent."""
        ...

    def ended(self, send: Action) -> None:
        """This transfer is known to have ended: let its tensors go."""
        ...

    def finish(self) -> None:
        """Wait for all sends."""
        ...


class Tiling(Protocol):
    """What a link has beside that sends a value while it is made; maybe one that is wrapped."""

    def open_send(self, send: Action) -> None:
        """What this will carry is about to be made, and it is the next of its lane: parts of it
        may go before `send` is called with all of it."""
        ...


class Clock(Protocol):
    """What is told of each action of compute."""

    def begin(self, action: Action, /) -> float:
        """It begins; the time, in microseconds."""
        ...

    def add(self, action: Action, start_us: float, end_us: float, /) -> None:
        """It has ended."""
        ...


class Board(Protocol):
    """Where to leave word of what runs: see `npu_pipe.ir.mark`."""

    cells: memoryview[int]


class _Todo(NamedTuple):
    """An instruction with all that it refers to.

    awaiting, running: the marks until its input is there, and from then on.
    sends_copy: its output is sent as soon as it is made, by a link that copies.
    opens: the SEND of its output, where parts of it may go while it is made: see `Tiling`.
    far, near: what it gives: the SEND to another rank, or the RECV on this one.
    tells_unused: whether what it gives may be a gradient without values.
    """

    action: Action
    stage: Stage
    awaiting: int
    running: int
    takes: Action | None
    is_far_take: bool
    posts: tuple[Action, ...]
    far: Action | None
    near: Action | None
    tells_unused: bool
    sends_copy: bool
    opens: Action | None
    sends: tuple[Action, ...]
    ended: tuple[Action, ...]
    releases: tuple[Action, ...]


class Executor:
    """A rank's stages, its plan and its link, run window after window.

    board: its first cell says what this rank is at, for who asks after it is stuck or dead.
    numbers: what the ranks of the schedule are called there.
    """

    def __init__(
        self,
        plan: RankPlan,
        stages: Mapping[int, Stage],
        *,
        link: Link,
        board: Board,
        numbers: Sequence[int],
    ) -> None:
        self.schedule = plan.schedule
        self._first_posts = plan.first_posts
        self._todos = [
            _todo(plan.schedule, each, stages, link, numbers) for each in plan.instructions
        ]
        self._stages = stages
        self._link = link
        self._open_send: Callable[[Action], None] | None = getattr(link, "open_send", None)
        self._board = board
        self._inbox: dict[Action, Parcel] = {}  # from another stage of this rank
        self._outbox: dict[Action, Parcel] = {}  # made, not yet issued
        self._seeds: dict[int, Tensor] = {}

    def run(
        self,
        inputs: Sequence[Parcel],
        keywords: Sequence[Mapping[str, Any]],
        end: Ending,
        clock: Clock,
    ) -> None:
        """Run one window.

        inputs: per microbatch, the model's input; may be empty where the first stage is not.
        keywords: per microbatch, the keyword arguments of this rank's stages; may be empty.
        """
        link, begin, add = self._link, clock.begin, clock.add
        for stage in self._stages.values():
            stage.begin()
        inbox, outbox, cells = self._inbox, self._outbox, self._board.cells
        for receive in self._first_posts:
            link.post(receive)
        for todo in self._todos:
            action = todo.action
            kind, _, microbatch = action
            taken: Parcel | None = None
            if todo.is_far_take:
                cells[0] = todo.awaiting
                assert todo.takes is not None
                taken = link.take(todo.takes)
                for send in todo.ended:
                    link.ended(send)
            elif todo.takes is not None:
                taken = inbox.pop(todo.takes)
            elif kind is Kind.F:
                taken = inputs[microbatch]
            cells[0] = todo.running
            for receive in todo.posts:
                link.post(receive)
            if todo.opens is not None and self._open_send is not None:
                self._open_send(todo.opens)
            start_us = begin(action)
            if kind is Kind.F:
                named = keywords[microbatch] if keywords else _NONE
                made, outputs = self._forward(todo, taken, named, end)
            else:
                made = self._backward(todo, taken)
            add(action, start_us, now_us())
            if made is not None:
                if todo.far is not None:
                    outbox[todo.far] = made
                elif todo.near is not None:
                    inbox[todo.near] = made
            for send in todo.sends:
                link.send(send, outbox.pop(send))
            if kind is Kind.F:  # after the send: no other rank waits for this
                todo.stage.keep(microbatch, outputs)
                outputs = ()
            made = None  # what has been sent is not kept while the next action runs
            for receive in todo.releases:
                link.release(receive)
        cells[0] = 0
        link.finish()

    def forget(self) -> None:
        """Drop all that a broken window left behind."""
        for stage in self._stages.values():
            stage.forget()
        self._inbox.clear()
        self._outbox.clear()
        self._seeds.clear()

    def _forward(
        self, todo: _Todo, taken: Parcel | None, keywords: Mapping[str, Any], end: Ending
    ) -> tuple[Parcel | None, Sequence[Tensor]]:
        """What to pass on, and what the backward starts from."""
        assert taken is not None
        microbatch, stage = todo.action.microbatch, todo.stage
        output = stage.forward(microbatch, *taken, keywords)
        if isinstance(output, WithLoss):
            stage.keep_loss(microbatch, output.loss, end.auxiliary(microbatch, output.loss))
            output = output.value
        if todo.far is None and todo.near is None:
            start = end.output(microbatch, output)
            if start is None:
                return None, ()
            loss, self._seeds[microbatch] = start
            stage.keep(microbatch, [loss])
            return None, ()
        meta, tensors = flatten_value(output, stage.index)
        if todo.sends_copy:
            if self._link.copies_at_once(tensors):
                return (meta, [tensor.detach() for tensor in tensors]), tensors
            return (meta, stage.leaving(tensors)), tensors
        leaving = stage.leaving(tensors)
        if todo.far is None:  # the next stage may work in place on what this one holds
            leaving = _apart(leaving, tensors)
        if todo.releases:  # a received buffer that is passed on may be filled before it is sent
            leaving = _apart(leaving, taken[1])
        return (meta, leaving), tensors

    def _backward(self, todo: _Todo, taken: Parcel | None) -> Parcel | None:
        kind, _, microbatch = todo.action
        if kind is Kind.W:
            todo.stage.weight_backward(microbatch)
            return None
        gradients = taken[1] if taken is not None else [self._seeds.pop(microbatch)]
        run = todo.stage.input_backward if kind is Kind.I else todo.stage.backward
        found = run(microbatch, gradients, tells_unused=todo.tells_unused)
        return _GRADIENTS, found if todo.sends_copy else _apart(found, gradients)


def _todo(
    schedule: Schedule,
    each: Instruction,
    stages: Mapping[int, Stage],
    link: Link,
    numbers: Sequence[int],
) -> _Todo:
    running = awaiting = to_int(each.action)
    if each.takes is not None and each.is_far_take:
        awaiting = to_int(each.action, numbers[route(schedule, each.takes).source])
    far = peer_of(each.gives) if each.gives is not None and each.is_far_give else None
    return _Todo(
        each.action,
        stages[each.action.stage],
        awaiting,
        running,
        each.takes,
        each.is_far_take,
        each.posts,
        far,
        None if far is not None else each.gives,
        far is None or getattr(link, "tells_unused", False),
        link.copies and far is not None and each.sends == (far,),
        far if hasattr(link, "open_send") and each.sends[:1] == (far,) else None,
        each.sends,
        () if link.copies else each.ended,
        each.releases,
    )


def _apart(tensors: list[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, copied where they share memory with one of the others."""
    places = {other.untyped_storage().data_ptr() for other in others}
    return [
        tensor.clone() if tensor.untyped_storage().data_ptr() in places else tensor
        for tensor in tensors
    ]
