"""Receives that wait for the form of what they receive.

The sender tells the form of what crosses a boundary, the receiver hears it before it posts its
first receive there. Until then the receives of a lane queue up in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from npu_pipe.comm.control import Control
from npu_pipe.comm.ways import Ways, boundary_of
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.program import Lane
from npu_pipe.runtime.form import form_from_json

__all__ = ["Receives"]


class Receives:
    """One rank's. Both calls give those to post now, in the order of their lane."""

    def __init__(self, ways: Ways, control: Control) -> None:
        self._ways = ways
        self._control = control
        self._queues: dict[Lane, deque[Action]] = {lane: deque() for lane in Lane}

    def ask(self, receive: Action) -> Iterator[Action]:
        """One more: it, if its form and those of all before it in its lane are known."""
        queue = self._queues[self._ways.way(receive).lane]
        queue.append(receive)
        while queue and self._ways.form(queue[0]) is not None:
            yield queue.popleft()

    def require(self, receive: Action) -> Iterator[Action]:
        """All up to this one, if it has not been posted: waits for the forms that are not known."""
        queue = self._queues[self._ways.way(receive).lane]
        while receive in queue:
            if self._ways.form(queue[0]) is None:
                self._hear(queue[0])
            yield queue.popleft()

    def forget(self) -> None:
        for queue in self._queues.values():
            queue.clear()

    def _hear(self, receive: Action) -> None:
        assert receive.kind is Kind.RECV_F, "a gradient's form is known from its activation"
        source = self._ways.way(receive).source
        text = self._control.hear(source, topic=boundary_of(receive))
        self._ways.learn(receive, form_from_json(text))
