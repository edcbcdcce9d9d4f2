"""Actions: what a rank does for one stage and one microbatch, and their text form.

    2F0                   stage 2, forward, microbatch 0
    2B0  2I0  2W0         whole backward; its input-gradient half; its weight-gradient half
    1SEND_F3 -> 2RECV_F3  the activation of microbatch 3 from stage 1 to stage 2
    2SEND_B3 -> 1RECV_B3  the gradient back
    (0F7;7B3)OVERLAP_F_B  a forward and a backward run as one fused pair

The text form is that of torch.distributed.pipelining; the parser accepts exactly it.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple, TypeAlias

from npu_pipe.errors import ScheduleError

__all__ = ["Action", "FusedPair", "Kind", "Step", "flatten", "parse_step"]


class Kind(enum.StrEnum):
    """What an action does; the value is its letter in the text form."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter for the input-gradient half
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"

    __hash__ = str.__hash__  # an Enum's own hash is a Python call; kinds are hashed a lot

    @property
    def is_compute(self) -> bool:
        return len(self._value_) == 1

    @property
    def is_send(self) -> bool:
        return self in (Kind.SEND_F, Kind.SEND_B)

    @property
    def is_receive(self) -> bool:
        return self in (Kind.RECV_F, Kind.RECV_B)


class Action(NamedTuple):
    """One action. `stage` and `microbatch` count from 0; `str` gives the text form."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind._value_}{self.microbatch}"


class FusedPair(NamedTuple):
    """A forward and a whole backward that a rank runs as one, their work overlapped."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Step: TypeAlias = Action | FusedPair
"""One entry of a rank's order."""

_NUMBER = "(0|[1-9][0-9]{0,17})"  # what an int64 holds
_ACTION = re.compile(_NUMBER + "(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)" + _NUMBER)
_PAIR = re.compile(rf"\({_ACTION.pattern};{_ACTION.pattern}\)OVERLAP_F_B")


def parse_step(text: str) -> Step:
    """Read one step from its text form; raises ScheduleError on anything else."""
    if single := _ACTION.fullmatch(text):
        return _action(*single.groups())
    pair = _PAIR.fullmatch(text)
    if pair is None:
        raise ScheduleError(
            "an action is written <stage><kind><microbatch> with a kind among "
            "F B I W SEND_F RECV_F SEND_B RECV_B, a fused pair (<F>;<B>)OVERLAP_F_B",
            f"{text!r:.80} is not",
            "write for example 2F0 or 1SEND_F3, without spaces, signs or leading zeros",
            action=text,
        )
    forward, backward = _action(*pair.groups()[:3]), _action(*pair.groups()[3:])
    if forward.kind is not Kind.F or backward.kind is not Kind.B:
        raise ScheduleError(
            "a fused pair is one F and one B, in this order",
            f"{text!r:.80} joins {forward.kind} and {backward.kind}",
            "write it as (<stage>F<microbatch>;<stage>B<microbatch>)OVERLAP_F_B",
            action=text,
        )
    return FusedPair(forward, backward)


def flatten(step: Step) -> tuple[Action, ...]:
    """The actions of a step: one, or the two of a fused pair."""
    return step if isinstance(step, FusedPair) else (step,)


def _action(stage: str, kind: str, microbatch: str) -> Action:
    return Action(_KINDS[kind], int(stage), int(microbatch))


_KINDS = {kind.value: kind for kind in Kind}
