"""A backward in two halves: the input gradient in I, the layers' weight gradients in W.

    forward   x ---> layer ---> y       as ever: no module is changed, no call is caught
                w ----^
    I         dx <-- layer <-- dy       autograd leaves out what leads to w only; dy is noted, and
                                        of what the layer has saved, what W needs: x
    W         dw <-- x, dy              by the layer's formula; accumulated by autograd

I reads the graph that the forward has made, so it does not matter how a layer was called. No
backward runs twice: I runs each node once, W none of them again. After I only x and dy are kept.
[Qi et al. 2401.10241]

A torch.autograd.Function takes part if it says how: see `npu_pipe.runtime.weight_half`. The weights
of what else is no layer get their gradients in I, with the rest of the graph. So do those under
activation checkpointing, whose graph is only made in the backward, and those that are used in
such a place too: a parameter gets its gradient of one microbatch in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from npu_pipe.runtime.graph import Weight, read_graph, sharing_layers
from npu_pipe.runtime.weight_gradients import WeightGradients
from npu_pipe.runtime.weight_half import WeightHalf

__all__ = ["Deferred", "input_half", "run_backward", "weight_half"]

_ENGINE = torch.autograd.Variable._execution_engine
_AS_IT_IS = nullcontext()


class Deferred(NamedTuple):
    """The weight half of one layer. is_shared: other layers have a parameter in common with it."""

    weights: list[Weight | None]
    gradients: WeightGradients
    output_gradient: Tensor
    is_shared: bool


def input_half(
    ends: Sequence[GradientEdge], seeds: Sequence[Tensor], entries: Sequence[Any]
) -> list[Deferred]:
    """I: run the backward that starts at `ends` with `seeds`, all but what it returns.

    entries: nodes that lead to nothing but a leaf each, where the stage's input came in.
    """
    found = read_graph(ends, entries)
    if found is None:
        run_backward(ends, seeds)
        return []
    layers, leaves = found
    shared = sharing_layers(layers) if len(layers) > 1 else ()
    deferred: list[Deferred] = []
    goals = [GradientEdge(entry.next_functions[0][0], 0) for entry in entries]
    goals += [GradientEdge(leaf, 0) for leaf in leaves]
    for node, weights, gradients in layers:
        if isinstance(gradients, WeightHalf):
            gradients.put_off()
            node.register_hook(partial(_note_half, deferred, weights, gradients, node in shared))
        else:
            node.register_prehook(partial(_note, deferred, weights, gradients, node in shared))
        goals.append(GradientEdge(node, 0))
    run_backward(ends, seeds, goals)
    return _apart(deferred, leaves) if leaves else deferred


def weight_half(deferred: Iterable[Deferred]) -> None:
    """W: accumulate the weight gradients into `.grad`, hooks of parameters included."""
    sums: dict[GradientEdge, Tensor] = {}
    for weights, formula, output_gradient, is_shared in deferred:
        with _outside_autocast(output_gradient):
            gradients = formula(output_gradient)
        found = [
            (weight, gradient)
            for weight, gradient in zip(weights, gradients, strict=True)
            if weight is not None and gradient is not None
        ]
        if is_shared:
            for weight, gradient in found:
                weight.add(gradient, sums)
        elif found:
            run_backward([weight.end for weight, _ in found], [each for _, each in found])
    if sums:  # as autograd: first the sum over the uses, then on to `.grad`
        run_backward(list(sums), list(sums.values()))


def run_backward(
    ends: Sequence[GradientEdge], seeds: Sequence[Tensor], inputs: Sequence[GradientEdge] = ()
) -> None:
    """torch.autograd.backward without its checks of every seed, which take longer than a layer
    of a few rows. The engine still sums over broadcasts, and runs the parameters' hooks."""
    with _outside_autocast(seeds[0]):
        _ENGINE.run_backward(
            tuple(ends),
            tuple(seeds),
            False,  # keep_graph
            False,  # create_graph
            tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def _outside_autocast(seed: Tensor) -> AbstractContextManager[None]:
    """A backward computes in the dtypes of its forward. Who calls a step within autocast means
    the forwards, and cannot leave it in between."""
    if not torch._C._is_any_autocast_enabled():
        return _AS_IT_IS
    return torch.autocast(seed.device.type, enabled=False)


def _note(
    deferred: list[Deferred],
    weights: list[Weight | None],
    gradients: WeightGradients,
    is_shared: bool,
    output_gradients: tuple[Tensor | None, ...],
) -> None:
    output_gradient = output_gradients[0]
    if output_gradient is not None:
        deferred.append(Deferred(weights, gradients, output_gradient, is_shared))


def _note_half(
    deferred: list[Deferred],
    weights: list[Weight | None],
    half: WeightHalf,
    is_shared: bool,
    _input_gradients: tuple[Tensor | None, ...],
    _output_gradients: tuple[Tensor | None, ...],
) -> None:
    later = half.take()
    if later is not None:
        deferred.append(Deferred(weights, *later, is_shared))


def _apart(deferred: list[Deferred], leaves: Iterable[Any]) -> list[Deferred]:
    """A gradient that has become some `.grad` may be added to before W: keep a copy."""
    grads = [leaf.variable.grad for leaf in leaves]
    places = {g.untyped_storage().data_ptr() for g in grads if g is not None and not g.is_sparse}
    return [
        each._replace(output_gradient=each.output_gradient.clone())
        if each.output_gradient.untyped_storage().data_ptr() in places
        else each
        for each in deferred
    ]
