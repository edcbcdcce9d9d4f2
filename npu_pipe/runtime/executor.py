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
from npu_pipe.runtime.record import Recorder, now_us
from npu_pipe.runtime.stage import Stage

__all__ = ["Ending", "Executor", "Link", "Parcel"]

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
    """What the executor needs of the transfers between ranks. Transfers are named by actions."""

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


class Board(Protocol):
    """Where to leave word of what runs: see `npu_pipe.ir.mark`."""

    cells: memoryview[int]


class Executor:
    """A rank's stages, its plan and its link, run window after window.

    board: its first cell says what this rank is at, for who asks after it is stuck or dead.
    """

    def __init__(
        self, plan: RankPlan, stages: Mapping[int, Stage], *, link: Link, board: Board
    ) -> None:
        self.schedule = plan.schedule
        self._plan = plan
        self._stages = stages
        self._link = link
        self._board = board
        self._marks = [_marks(plan.schedule, todo) for todo in plan.instructions]
        self._inbox: dict[Action, Parcel] = {}  # from another stage of this rank
        self._outbox: dict[Action, Parcel] = {}  # made, not yet issued
        self._seeds: dict[int, Tensor] = {}

    def run(
        self,
        inputs: Sequence[Parcel],
        keywords: Sequence[Mapping[str, Any]],
        end: Ending,
        recorder: Recorder,
    ) -> None:
        """Run one window.

        inputs: per microbatch, the model's input; may be empty where the first stage is not.
        keywords: per microbatch, the keyword arguments of this rank's stages; may be empty.
        """
        link, begin, add = self._link, recorder.begin, recorder.add
        for receive in self._plan.first_posts:
            link.post(receive)
        cells = self._board.cells
        for todo, (awaiting, running) in zip(self._plan.instructions, self._marks, strict=True):
            cells[0] = awaiting
            action = todo.action
            taken = self._take(todo, inputs)
            cells[0] = running
            for receive in todo.posts:
                link.post(receive)
            start_us = begin()
            if action.kind is Kind.F:
                named = keywords[action.microbatch] if keywords else _NONE
                made = self._forward(todo, taken, named, end)
            else:
                made = self._backward(todo, taken)
            add(action, start_us, now_us())
            if todo.gives is not None and made is not None:
                if todo.is_far_give:
                    self._outbox[peer_of(todo.gives)] = made
                else:
                    self._inbox[todo.gives] = made
            for send in todo.sends:
                link.send(send, self._outbox.pop(send))
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

    def _take(self, todo: Instruction, inputs: Sequence[Parcel]) -> Parcel | None:
        if todo.takes is None:
            return inputs[todo.action.microbatch] if todo.action.kind is Kind.F else None
        if not todo.is_far_take:
            return self._inbox.pop(todo.takes)
        parcel = self._link.take(todo.takes)
        for send in todo.ended:
            self._link.ended(send)
        return parcel

    def _forward(
        self, todo: Instruction, taken: Parcel | None, keywords: Mapping[str, Any], end: Ending
    ) -> Parcel | None:
        assert taken is not None
        microbatch = todo.action.microbatch
        stage = self._stages[todo.action.stage]
        output = stage.forward(microbatch, *taken, keywords)
        if isinstance(output, WithLoss):
            stage.keep_loss(microbatch, output.loss, end.auxiliary(microbatch, output.loss))
            output = output.value
        if todo.gives is None:
            start = end.output(microbatch, output)
            if start is not None:
                loss, self._seeds[microbatch] = start
                stage.keep(microbatch, [loss])
            return None
        meta, tensors = flatten_value(output, f"the output of stage {stage.index}")
        stage.keep(microbatch, tensors)
        leaving = stage.leaving(tensors)
        if not todo.is_far_give:  # the next stage may work in place on what this one holds
            leaving = _apart(leaving, tensors)
        if todo.releases:  # a received buffer that is passed on may be filled before it is sent
            leaving = _apart(leaving, taken[1])
        return meta, leaving

    def _backward(self, todo: Instruction, taken: Parcel | None) -> Parcel | None:
        microbatch = todo.action.microbatch
        stage = self._stages[todo.action.stage]
        if todo.action.kind is Kind.W:
            stage.weight_backward(microbatch)
            return None
        gradients = taken[1] if taken is not None else [self._seeds.pop(microbatch)]
        run = stage.input_backward if todo.action.kind is Kind.I else stage.backward
        found = run(microbatch, gradients)
        if todo.gives is None:
            return None
        return _GRADIENTS, _apart(found, gradients)


def _marks(schedule: Schedule, todo: Instruction) -> tuple[int, int]:
    """Of an instruction: until its input is there, and from then on."""
    running = to_int(todo.action)
    if todo.takes is None or not todo.is_far_take:
        return running, running
    return to_int(todo.action, route(schedule, todo.takes).source), running


def _apart(tensors: list[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, copied where they share memory with one of the others."""
    places = {other.untyped_storage().data_ptr() for other in others}
    return [
        tensor.clone() if tensor.untyped_storage().data_ptr() in places else tensor
        for tensor in tensors
    ]
