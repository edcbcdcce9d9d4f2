"""Splitting a backward: the weight gradients of a stage's layers, put off until W.

A layer that multiplies by its weights, y = f(x, w), runs as a small graph of its own:

    forward   x' --f--> y'                 x' and y' are x and y cut out of the stage's graph
                 w ----^
    I         dy ------> x'                dx goes on to the layer before; (y', dy) is noted
    W         dy ------> w                 accumulates into w.grad, all noted layers in one call

so no backward runs twice: each half asks its graph for its own gradient only. What y' needs for
both halves is kept until W. [Qi et al. 2401.10241]

Layers are met where they call torch (linear, matmul, embedding, convolution, norms), inside this
stage's forward and nowhere else; no module is changed. The parameters of every other operator
get their gradients in I, with the rest of the graph. So do those inside activation
checkpointing, whose graph is only made in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

__all__ = ["Deferred", "SplitWeights", "run_deferred"]

_LAYERS = frozenset(
    (
        F.linear,
        F.bilinear,
        F.embedding,
        *(F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.instance_norm),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum),
        *(Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.__matmul__),
    )
)


class Deferred(NamedTuple):
    """The weight half of one layer: of which output, for which gradient, into which weights."""

    output: Tensor
    gradient: Tensor
    weights: list[nn.Parameter]


def run_deferred(deferred: Iterable[Deferred]) -> None:
    """W: accumulate the weight gradients into `.grad`, hooks of parameters included."""
    halves = list(deferred)
    if halves:
        weights = {id(weight): weight for half in halves for weight in half.weights}
        torch.autograd.backward(
            [half.output for half in halves],
            [half.gradient for half in halves],
            inputs=list(weights.values()),
        )


class SplitWeights(TorchFunctionMode):
    """Inside it, layers that use these weights put their gradients off, into `deferred`."""

    def __init__(self, weights: Iterable[nn.Parameter], anchor: Tensor) -> None:
        """anchor: a scalar that requires gradient; it ties layers without one to the graph."""
        super().__init__()
        self.deferred: list[Deferred] = []
        self._weights = {id(weight) for weight in weights if weight.requires_grad}
        self._anchor = anchor

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _LAYERS or not torch.is_grad_enabled() or _is_checkpointed():
            return function(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        weights = [leaf for leaf in leaves if id(leaf) in self._weights]
        if not weights:
            return function(*args, **kwargs)
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in self._weights
        ]

        def call(inputs: list[Tensor]) -> Any:
            changed = list(leaves)
            for place, tensor in zip(places, inputs, strict=True):
                changed[place] = tensor
            inner_args, inner_kwargs = pytree.tree_unflatten(changed, spec)
            return function(*inner_args, **inner_kwargs)

        inputs = [leaves[place] for place in places]
        return _Layer.apply(call, self.deferred, weights, self._anchor, *inputs)  # type: ignore[no-untyped-call]


class _Layer(torch.autograd.Function):
    """y = f(x, w) with a graph of its own inside; its backward is the I half."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Any,
        deferred: list[Deferred],
        weights: list[nn.Parameter],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        del anchor
        ctx.inputs = [tensor.detach().requires_grad_() for tensor in inputs]
        with torch.enable_grad():
            ctx.output = call(ctx.inputs)
        ctx.deferred, ctx.weights = deferred, weights
        output: Tensor = ctx.output.detach()
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        found: tuple[Tensor | None, ...] = ()
        if ctx.inputs:
            found = torch.autograd.grad(
                ctx.output, ctx.inputs, gradient, retain_graph=True, allow_unused=True
            )
        ctx.deferred.append(Deferred(ctx.output, gradient, ctx.weights))
        ctx.output = ctx.inputs = None
        return (None, None, None, None, *found)


def _is_checkpointed() -> bool:
    """Whether saved tensors are packed by somebody, as activation checkpointing does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
