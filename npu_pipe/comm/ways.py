"""Ways: where the transfers of a rank go, and in which form.

The form of what crosses a boundary is learnt from the first value. Forms are kept per signature
(of what the model is called with, for one microbatch), so that a shape seen before costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from torch import Tensor

from npu_pipe.comm.part import part_of
from npu_pipe.errors import DataError
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.program import Lane, route
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.boundary import Meta, TensorMeta
from npu_pipe.runtime.form import Form, form_of

__all__ = ["GRADIENTS", "Way", "Ways", "boundary_of"]

GRADIENTS = Meta("", ())  # both ends know the form of gradients from the activation

_KNOWN = 64  # signatures whose forms are remembered: a batch may have a new shape every time

# The stage before the boundary, the ranks that the activation goes between (with replicas a
# boundary lies between several), and which part of it this is: see `npu_pipe.comm.part`.
_Crossing: TypeAlias = tuple[int, int, int, int]


class Way(NamedTuple):
    """Where a transfer goes, worked out once. crossing: what its form is known by."""

    source: int
    target: int
    lane: Lane
    crossing: _Crossing


class Ways:
    """The transfers of one window, and the forms known from earlier ones."""

    def __init__(self) -> None:
        self._schedule: Schedule | None = None
        # With replicas a training step and an evaluation go other ways; and so does a trial.
        self._ways_of: dict[object, dict[Action, Way]] = {}
        self._ways: dict[Action, Way] = {}
        self._known: dict[str, dict[_Crossing, Form]] = {}  # by signature
        self._forms: Sequence[dict[_Crossing, Form]] = ()  # of this window, by microbatch
        self._unneeded: dict[tuple[_Crossing, int], tuple[int, ...]] = {}
        self._wanted: dict[tuple[_Crossing, int], Form] = {}  # back, of values that tell it

    def start_window(self, schedule: Schedule, signatures: Sequence[str]) -> None:
        """Begin a window of this schedule; signatures: of each microbatch."""
        self._schedule = schedule
        routes = schedule.training, schedule.placement, schedule.mirrored
        self._ways = self._ways_of.setdefault(routes, {})
        for signature in dict.fromkeys(signatures):
            self._known[signature] = self._known.pop(signature, {})  # now the latest
        while len(self._known) > max(_KNOWN, len(signatures)):
            del self._known[next(iter(self._known))]  # the same one at both ends
        self._forms = [self._known[signature] for signature in signatures]
        self._wanted.clear()

    def forget(self) -> None:
        """After an error: what one end has learnt the other may not have."""
        self._known.clear()
        self._forms = ()
        self._unneeded.clear()
        self._wanted.clear()

    def way(self, transfer: Action) -> Way:
        found = self._ways.get(transfer)
        if found is None:
            assert self._schedule is not None
            source, target, lane = route(self._schedule, transfer)
            # A gradient has the form of the activation that went the other way.
            is_activation = transfer.kind in (Kind.SEND_F, Kind.RECV_F)
            pair = (source, target) if is_activation else (target, source)
            found = Way(source, target, lane, (boundary_of(transfer), *pair, part_of(transfer)))
            self._ways[transfer] = found
        return found

    def form(self, transfer: Action) -> Form | None:
        """None where it is not known yet. The gradients of a value that tells which of them it
        needs are known once it has been sent, or has come."""
        crossing = self.way(transfer).crossing
        form = self._forms[transfer.microbatch].get(crossing)
        if form is not None and form.tells_need and transfer.kind in (Kind.SEND_B, Kind.RECV_B):
            return self._wanted.get((crossing, transfer.microbatch))
        return form

    def learn(self, transfer: Action, form: Form) -> None:
        self._forms[transfer.microbatch][self.way(transfer).crossing] = form

    def form_for(self, send: Action, meta: Meta, *, tells_need: bool = True) -> tuple[Form, bool]:
        """The form to send this value in, and whether the receiver has to be told it.

        tells_need: whether a form may have each value tell what needs a gradient.
        Raises DataError for a value of another form than an earlier one like it.
        """
        known = self.form(send)
        if known is None:
            assert self._schedule is not None
            form = form_of(meta, may_need=tells_need and self._schedule.training)
            self.learn(send, form)
            self._note(send, form, meta)
            return form, True
        self._note(send, known, meta)
        if not known.fits(meta):
            raise DataError(
                "a stage returns one form for inputs of one form",
                f"stage {send.stage} returned {_text(meta.leaves)} for microbatch "
                f"{send.microbatch}, and {_text(known.leaves)} before",
                "return the same shapes, and tensors that need a gradient, each time; and what "
                "changes from one microbatch to the next in a tensor",
            )
        if meta.leaves != known.leaves and not known.tells_need:
            unneeded = known.unneeded(meta)
            if unneeded:
                self._unneeded[self.way(send).crossing, send.microbatch] = unneeded
        return known, False

    def unpack(self, receive: Action, tensors: Sequence[Tensor]) -> tuple[Meta, list[Tensor]]:
        """A value from what has come."""
        form = self.form(receive)
        assert form is not None, "a form is told before what it is of"
        meta, own = form.unpack(tensors)
        self._note(receive, form, meta)
        return meta, own

    def _note(self, transfer: Action, form: Form, meta: Meta) -> None:
        if form.tells_need:
            self._wanted[self.way(transfer).crossing, transfer.microbatch] = _of(meta.tensors)

    def needed(self, receive: Action, gradients: list[Tensor]) -> list[Tensor]:
        """Of the gradients of a value those that it needs: a microbatch may need fewer than the
        first of its form did, and the receiver does not know."""
        if not self._unneeded:
            return gradients
        unneeded = self._unneeded.pop((self.way(receive).crossing, receive.microbatch), ())
        return [each for index, each in enumerate(gradients) if index not in unneeded]


@lru_cache(maxsize=64)  # links know forms by their identity
def _of(tensors: tuple[TensorMeta, ...]) -> Form:
    return Form("", tensors)


def _text(leaves: Sequence[object]) -> str:
    return ", ".join(map(str, leaves))[:300] or "nothing"


def boundary_of(transfer: Action) -> int:
    """The stage before the boundary that a transfer crosses."""
    down_model = transfer.kind in (Kind.SEND_F, Kind.RECV_B)
    return transfer.stage if down_model else transfer.stage - 1
