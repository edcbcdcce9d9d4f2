"""Stage: one piece of the model, and what it holds between a forward and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import Meta, TensorMeta, arguments
from npu_pipe.runtime.split import Deferred, SplitWeights, run_deferred

__all__ = ["Stage"]


class _Enter(torch.autograd.Function):
    """Where a received value enters this stage's graph.

    Its outputs are the received buffers themselves, but no leaves: a stage may work on its
    input in place, as it may in the unsplit model. Backward leaves their gradients in `found`.
    """

    @staticmethod
    def forward(ctx: Any, found: list[Tensor | None], anchor: Tensor, *buffers: Tensor) -> Any:
        del anchor  # requires gradient, so that a graph is made
        ctx.found = found
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(*buffers)
        return buffers

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.found[:] = gradients
        return (None,) * (2 + len(gradients))


class _Held(NamedTuple):
    """Between forward and backward of one microbatch: edges instead of tensors, so that an
    output that only travels on is freed once it is sent."""

    ends: list[GradientEdge]
    found: list[Tensor | None]
    entered: tuple[TensorMeta, ...]
    deferred: list[Deferred]


class Stage:
    """A module with its microbatches in flight. `held` counts them.

    splits: whether backwards come in halves, so that forwards have to prepare for it.
    """

    def __init__(self, index: int, module: nn.Module, *, splits: bool) -> None:
        self.index = index
        self.module = module
        self._splits = splits
        self._anchor = torch.zeros((), requires_grad=True)
        self._held: dict[int, _Held] = {}
        self._deferred: dict[int, list[Deferred]] = {}  # between I and W
        self._reuses_output: bool | None = None  # not known before the second output
        self._first_outputs: list[Tensor] = []
        self._lent: list[tuple[weakref.ref[Tensor], int]] = []  # with its version at that time

    @property
    def held(self) -> int:
        return len(self._held) + len(self._deferred)

    def forward(self, microbatch: int, meta: Meta, tensors: Sequence[Tensor]) -> Any:
        """Run the module on a received value and, where gradients are on, keep what the backward
        needs.

        The value's tensors are used as they are, and may be changed by the module. What is
        returned goes to `keep` next, as it is or after the loss.
        """
        if not torch.is_grad_enabled():
            return self.module(*arguments(meta.value(tensors)))
        found: list[Tensor | None] = []
        entering = [
            tensor.detach()  # a new alias each time: the buffer's last use left it in a graph
            for tensor, leaf in zip(tensors, meta.tensors, strict=True)
            if leaf.needs_grad
        ]
        if entering:
            entered = iter(_Enter.apply(found, self._anchor, *entering))  # type: ignore[no-untyped-call]
            tensors = [
                next(entered) if leaf.needs_grad else tensor
                for tensor, leaf in zip(tensors, meta.tensors, strict=True)
            ]
        mode = SplitWeights(self.module.parameters(), self._anchor) if self._splits else None
        self._held[microbatch] = _Held([], found, meta.gradients, mode.deferred if mode else [])
        with mode or nullcontext():
            return self.module(*arguments(meta.value(tensors)))

    def keep(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Note the outputs from which the backward of this microbatch starts, if there is one."""
        if torch.is_grad_enabled():
            ends = self._held[microbatch].ends
            ends.extend(get_gradient_edge(output) for output in outputs if output.requires_grad)

    def leaving(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs to send: apart from their graph, and not overwritten by the next forward.

        A module may return one buffer each time. Whether it does shows when the second output
        lies where the first still lies; until then, and then ever after, copies are sent.
        Raises DataError where it takes turns among several, and an output was overwritten.
        """
        self._require_unchanged()
        if self._reuses_output is None and self._first_outputs:
            places = {_place(tensor) for tensor in self._first_outputs}
            self._reuses_output = any(_place(tensor) in places for tensor in outputs)
            self._first_outputs = []
        elif self._reuses_output is None:
            self._first_outputs = [tensor.detach() for tensor in outputs]
        if self._reuses_output is not False:
            return [tensor.detach().clone() for tensor in outputs]
        lent = [tensor.detach() for tensor in outputs]
        self._lent += [(weakref.ref(tensor), _version(tensor)) for tensor in lent]
        return lent

    def _require_unchanged(self) -> None:
        """Who was lent an output lets go of it when it has been sent."""
        self._lent = [each for each in self._lent if each[0]() is not None]
        for lent, version in self._lent:
            tensor = lent()
            if tensor is not None and _version(tensor) != version:
                raise DataError(
                    "what a stage has returned is not written to before it has been sent",
                    f"stage {self.index} has written to an earlier output",
                    "return a new tensor each time",
                )

    def backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The whole backward: parameters' gradients into `.grad`, the input's returned.

        gradients: one for each output that needs one, in order. An input that the module did
        not use gets zeros.
        """
        found = self.input_backward(microbatch, gradients)
        self.weight_backward(microbatch)
        return found

    def input_backward(self, microbatch: int, gradients: Sequence[Tensor]) -> list[Tensor]:
        """The half that the stage before waits for, as `backward` but for the weights of layers:
        see `npu_pipe.runtime.split`."""
        held = self._held.pop(microbatch)
        if held.ends:
            torch.autograd.backward(held.ends, gradients)
        self._deferred[microbatch] = held.deferred
        found = held.found or [None] * len(held.entered)
        return [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=self._anchor.device)
            if gradient is None
            else gradient
            for gradient, leaf in zip(found, held.entered, strict=True)
        ]

    def weight_backward(self, microbatch: int) -> None:
        """The other half: what `input_backward` put off."""
        run_deferred(self._deferred.pop(microbatch))

    def forget(self) -> None:
        """Drop what is held: after an error or an evaluation."""
        self._held.clear()
        self._deferred.clear()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int:
    """How often it was written to, through whichever alias; not counted in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
