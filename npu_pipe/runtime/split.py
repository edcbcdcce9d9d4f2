"""A backward in two halves: the input gradient in I, the layers' weight gradients in W.

    forward   x ---> layer ---> y       as ever: no module is changed, no call is caught
                w ----^
    I         dx <-- layer <-- dy       autograd leaves out what leads to w only; dy is noted, and
                                        of what the layer has saved, what W needs: x
    W         dw <-- x, dy              by the layer's formula; accumulated by autograd

I reads the graph that the forward has made, so it does not matter how a layer was called. No
backward runs twice: I runs each node once, W none of them again. After I only x and dy are kept.
[Qi et al. 2401.10241]

The weights of what is no layer get their gradients in I, with the rest of the graph. So do those
under activation checkpointing, whose graph is only made in the backward, and those that are used
in such a place too: a parameter gets its gradient of one microbatch in one piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from npu_pipe.runtime.weight_gradients import LAYERS, WeightGradients, weight_gradients

__all__ = ["Deferred", "input_half", "run_backward", "weight_half"]

_LEAF = "torch::autograd::AccumulateGrad"
_TRANSPOSE = "TBackward0"
_MAKERS = 32  # at most so many operators make a weight of its parameters, as weight norm does


class _Weight(NamedTuple):
    """An input of a layer that comes from parameters alone.

    end: where its gradient goes to. leaves: the parameters' nodes that it gets to.
    """

    end: GradientEdge
    is_transposed: bool
    leaves: tuple[Any, ...]


class _Layer(NamedTuple):
    node: Any
    weights: list[_Weight]
    gradients: WeightGradients


class Deferred(NamedTuple):
    """The weight half of one layer. is_shared: other layers have a weight in common with it."""

    layer: list[_Weight]
    gradients: WeightGradients
    output_gradient: Tensor
    is_shared: bool


def input_half(
    ends: Sequence[GradientEdge], seeds: Sequence[Tensor], entries: Iterable[Any]
) -> list[Deferred]:
    """I: run the backward that starts at `ends` with `seeds`, all but what it returns.

    entries: the nodes behind which the stage's input lies, and no weight.
    """
    found = _read(ends, frozenset(entries))
    if found is None:
        run_backward(ends, seeds)
        return []
    layers, leaves = found
    uses = Counter(leaf for layer in layers for weight in layer.weights for leaf in weight.leaves)
    deferred: list[Deferred] = []
    for node, weights, gradients in layers:
        is_shared = any(uses[leaf] > 1 for weight in weights for leaf in weight.leaves)
        node.register_prehook(partial(_note, deferred, weights, gradients, is_shared))
    goals = [*(layer.node for layer in layers), *leaves]
    run_backward(ends, seeds, [GradientEdge(goal, 0) for goal in goals])
    return _apart(deferred, leaves)


def weight_half(deferred: Iterable[Deferred]) -> None:
    """W: accumulate the weight gradients into `.grad`, hooks of parameters included."""
    shared: dict[GradientEdge, Tensor] = {}
    for weights, formula, output_gradient, is_shared in deferred:
        gradients = [
            gradient.t() if weight.is_transposed else gradient
            for weight, gradient in zip(weights, formula(output_gradient), strict=True)
        ]
        if not is_shared:
            run_backward([weight.end for weight in weights], gradients)
            continue
        for (end, _, _), gradient in zip(weights, gradients, strict=True):
            gradient = gradient.sum_to_size(end.node._input_metadata[end.output_nr].shape)  # type: ignore[attr-defined]
            shared[end] = shared[end] + gradient if end in shared else gradient
    if shared:  # as autograd: first the sum over the uses, then on to `.grad`
        run_backward(list(shared), list(shared.values()))


def run_backward(
    ends: Sequence[GradientEdge], seeds: Sequence[Tensor], inputs: Sequence[GradientEdge] = ()
) -> None:
    """torch.autograd.backward without its checks of every seed, which take longer than a layer
    of a few rows. The engine still sums over broadcasts, and runs the parameters' hooks."""
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        tuple(ends), tuple(seeds), False, False, tuple(inputs),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def _read(
    ends: Sequence[GradientEdge], entries: frozenset[Any]
) -> tuple[list[_Layer], set[Any]] | None:
    """The layers whose weights can wait, and the leaves, as nodes, that cannot.

    None where nothing can, or autograd must not be asked for a part.
    """
    layers: list[_Layer] = []
    leaves: set[Any] = set()
    seen = set()
    todo = [end.node for end in ends]
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == _LEAF:
            leaves.add(node)
            continue
        inputs = node.next_functions
        if name in LAYERS:
            weights = {
                place: weight
                for place, (next_node, index) in enumerate(inputs)
                if next_node is not None and (weight := _weight(next_node, index, entries)) is not None
            }
            gradients = weight_gradients(node, tuple(weights)) if weights else None
            if gradients is not None:
                layers.append(_Layer(node, list(weights.values()), gradients))
                inputs = [each for place, each in enumerate(inputs) if place not in weights]
        elif "Checkpoint" in name:  # reentrant: it runs a backward inside its own
            return None
        todo += [next_node for next_node, _ in inputs if next_node is not None]
    while leaves and (clash := [layer for layer in layers if _leaves_of(layer) & leaves]):
        layers = [layer for layer in layers if layer not in clash]
        leaves.update(*map(_leaves_of, clash))
    return (layers, leaves) if layers else None


def _weight(node: Any, index: int, entries: frozenset[Any]) -> _Weight | None:
    """What lies behind an input of a layer, if that is a weight."""
    if node in entries or isinstance(node, torch._C._FunctionBase):
        return None  # the latter would not outlive the graph
    if node.name() == _LEAF:
        return _Weight(GradientEdge(node, index), is_transposed=False, leaves=(node,))
    if node.name() == _TRANSPOSE:
        ((behind, _),) = node.next_functions
        if behind.name() == _LEAF:  # as F.linear has it: the transposition is done in W
            return _Weight(GradientEdge(behind, 0), is_transposed=True, leaves=(behind,))
    leaves: list[Any] = []
    seen = set()
    todo = [node]
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        if each.name() == _LEAF:
            leaves.append(each)
            continue
        behind = [next_node for next_node, _ in each.next_functions]
        # None: data may come in here
        is_data = each in entries or each.name() in LAYERS or not behind or None in behind
        if is_data or len(seen) > _MAKERS:
            return None
        todo += behind
    return _Weight(GradientEdge(node, index), is_transposed=False, leaves=tuple(leaves))


def _leaves_of(layer: _Layer) -> set[Any]:
    return {leaf for weight in layer.weights for leaf in weight.leaves}


def _note(
    deferred: list[Deferred],
    weights: list[_Weight],
    gradients: WeightGradients,
    is_shared: bool,
    output_gradients: tuple[Tensor | None, ...],
) -> None:
    if output_gradients[0] is not None:
        deferred.append(Deferred(weights, gradients, output_gradients[0], is_shared))


def _apart(deferred: list[Deferred], leaves: Iterable[Any]) -> list[Deferred]:
    """A gradient that became some `.grad` may be added to before W."""
    grads = [leaf.variable.grad for leaf in leaves]
    places = {g.untyped_storage().data_ptr() for g in grads if g is not None and not g.is_sparse}
    return [
        each._replace(output_gradient=each.output_gradient.clone())
        if each.output_gradient.untyped_storage().data_ptr() in places
        else each
        for each in deferred
    ]


