"""Stage: one piece of the model, and what it holds between a forward and its backward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import Meta, arguments
from npu_pipe.runtime.split import Deferred, input_half, run_backward, weight_half

__all__ = ["Stage"]


_NONE: Mapping[str, Any] = {}
_SAME_MEMORY = torch.ops.aten._unsafe_view.default


class _Held(NamedTuple):
    """Between forward and backward of one microbatch: edges instead of tensors, so that an
    output that only travels on is freed once it is sent."""

    ends: list[GradientEdge]
    losses: list[tuple[GradientEdge, Tensor]]  # auxiliary ones, and what they are scaled by
    leaves: list[Tensor]  # where gradients are wanted: see `_enter`
    entries: list[Any]  # the nodes that lead to them


class Stage:
    """A module with its microbatches in flight. `held` counts them."""

    def __init__(self, index: int, module: nn.Module) -> None:
        self.index = index
        self.module = module
        self._held: dict[int, _Held] = {}
        self._deferred: dict[int, list[Deferred]] = {}  # between I and W
        self._reuses_output: bool | None = None  # not known before the second output
        self._first_outputs: list[Tensor] = []
        self._lent: list[tuple[weakref.ref[Tensor], int]] = []  # with its version at that time
        self._bare: list[nn.Parameter] = []  # without a gradient so far in this window

    @property
    def held(self) -> int:
        return len(self._held) + len(self._deferred)

    def begin(self) -> None:
        """Begin a window."""
        self._bare = []
        if torch.is_grad_enabled():
            self._bare = [p for p in self.module.parameters() if p.requires_grad and p.grad is None]

    def forward(
        self,
        microbatch: int,
        meta: Meta,
        tensors: Sequence[Tensor],
        keywords: Mapping[str, Any] = _NONE,
    ) -> Any:
        """Run the module on a received value and, where gradients are on, keep what the backward
        needs.

        The value's tensors are used as they are, and may be changed by the module. What is
        returned goes to `keep` next, as it is or after the loss.
        Raises DataError where the module writes to an output that is still being sent.
        """
        lent = self._still_lent() if self._lent else ()
        output = self._called(microbatch, meta, tensors, keywords)
        for tensor, version in lent:
            if _version(tensor) != version:
                raise DataError(
                    "what a stage has returned is not written to before it has been sent",
                    f"stage {self.index} has written to an earlier output",
                    "return a new tensor each time",
                )
        return output

    def _called(
        self, microbatch: int, meta: Meta, tensors: Sequence[Tensor], keywords: Mapping[str, Any]
    ) -> Any:
        if not torch.is_grad_enabled():
            return self.module(*arguments(meta.value(tensors)), **keywords)
        held = self._held[microbatch] = _Held([], [], [], [])
        value = meta.value(
            [
                _enter(tensor, held) if form.needs_grad else tensor
                for tensor, form in zip(tensors, meta.tensors, strict=True)
            ]
        )
        return self.module(*arguments(value), **keywords)

    def keep(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Note the outputs from which the backward of this microbatch starts, if there is one."""
        if torch.is_grad_enabled():
            ends = self._held[microbatch].ends
            ends.extend(_edge(output) for output in outputs if output.requires_grad)

    def keep_loss(self, microbatch: int, loss: Tensor, seed: Tensor) -> None:
        """Note an auxiliary loss: the backward starts from it too, with `seed`."""
        if torch.is_grad_enabled() and loss.requires_grad:
            self._held[microbatch].losses.append((_edge(loss), seed))

    def leaving(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs to send: apart from their graph, and not overwritten by the next forward.

        A module may return one buffer each time. Whether it does shows when the second output
        lies where the first still lies; until then, and then ever after, copies are sent.
        """
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

    def _still_lent(self) -> list[tuple[Tensor, int]]:
        """The outputs on their way: who was lent one lets go of it when it has been sent."""
        found = [(lent(), (lent, version)) for lent, version in self._lent]
        self._lent = [each for tensor, each in found if tensor is not None]
        return [(tensor, version) for tensor, (_, version) in found if tensor is not None]

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor], *, tells_unused: bool = False
    ) -> list[Tensor]:
        """The whole backward: parameters' gradients into `.grad`, the input's returned.

        gradients: one for each output that needs one, in order; on the meta device, without
        values, for one that the next stage did not use.
        tells_unused: whether an input that this module did not use gets such a one too. Else it
        gets zeros, of which more comes: zeros, not None, for what only that input was made with.
        """
        held = self._held.pop(microbatch)
        ends, seeds = _starts(held, gradients)
        if ends:
            run_backward(ends, seeds)
            if self._bare:
                self._part_from([*seeds, *(leaf.grad for leaf in held.leaves)])
        return _found(held, tells_unused=tells_unused)

    def input_backward(
        self, microbatch: int, gradients: Sequence[Tensor], *, tells_unused: bool = False
    ) -> list[Tensor]:
        """The half that the stage before waits for, as `backward` but for the weights of layers:
        see `npu_pipe.runtime.split`."""
        held = self._held.pop(microbatch)
        ends, seeds = _starts(held, gradients)
        self._deferred[microbatch] = input_half(ends, seeds, held.entries) if ends else []
        if self._bare:
            self._part_from([*seeds, *(leaf.grad for leaf in held.leaves)])
        return _found(held, tells_unused=tells_unused)

    def weight_backward(self, microbatch: int) -> None:
        """The other half: what `input_backward` put off."""
        deferred = self._deferred.pop(microbatch)
        weight_half(deferred)
        if self._bare:
            self._part_from([each.output_gradient for each in deferred])

    def _part_from(self, lent: Sequence[Tensor | None]) -> None:
        """Have no parameter's first gradient lie where a backward's seed, its result or another
        parameter's gradient does.

        Autograd takes a first gradient as it is, which may be a view: with one row, of
        `x + position[None]` it is one of the seed. That is a buffer, which is filled again, while
        later gradients are added to the parameter's in place.
        """
        bare = [p for p in self._bare if p.grad is None]
        if len(bare) == len(self._bare):
            return
        places = {_place(tensor) for tensor in lent if tensor is not None}
        for parameter in self._bare:
            gradient = parameter.grad
            if gradient is not None:
                if _place(gradient) in places:
                    parameter.grad = gradient = gradient.clone()
                places.add(_place(gradient))
        self._bare = bare

    def forget(self) -> None:
        """Drop what is held: after an error or an evaluation."""
        self._held.clear()
        self._deferred.clear()


def _enter(received: Tensor, held: _Held) -> Tensor:
    """Begin a graph with a received value.

    What the module gets is the received memory itself, but neither a leaf nor, for autograd, a
    view of one: it may work on it in place, as it may in the unsplit model. The leaf collects
    the gradient.
    """
    leaf = received.detach().requires_grad_()
    entered: Tensor = _SAME_MEMORY(leaf, leaf.shape)
    held.leaves.append(leaf)
    held.entries.append(entered.grad_fn)
    return entered


def _edge(output: Tensor) -> GradientEdge:
    """get_gradient_edge, faster for what most outputs are."""
    node = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def _found(held: _Held, *, tells_unused: bool) -> list[Tensor]:
    """The gradients of the input."""
    return [
        (torch.empty_like(leaf, device="meta") if tells_unused else torch.zeros_like(leaf))
        if leaf.grad is None
        else leaf.grad
        for leaf in held.leaves
    ]


def _starts(
    held: _Held, gradients: Sequence[Tensor]
) -> tuple[Sequence[GradientEdge], Sequence[Tensor]]:
    """Where the backward starts, and with what."""
    ends = held.ends
    gradients = gradients if ends else ()
    if any(gradient.is_meta for gradient in gradients):
        used = [index for index, gradient in enumerate(gradients) if not gradient.is_meta]
        ends, gradients = [ends[index] for index in used], [gradients[index] for index in used]
    if not held.losses:
        return ends, gradients
    return (
        [*ends, *(edge for edge, _ in held.losses)],
        [*gradients, *(seed for _, seed in held.losses)],
    )


def _place(tensor: Tensor) -> int:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return tensor.untyped_storage().data_ptr()


def _version(tensor: Tensor) -> int:
    """How often it was written to, through whichever alias; not counted in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
