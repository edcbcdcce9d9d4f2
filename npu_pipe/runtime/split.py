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

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from npu_pipe.runtime.weight_gradients import LAYERS, WeightGradients, weight_gradients
from npu_pipe.runtime.weight_half import WeightHalf

__all__ = ["Deferred", "input_half", "run_backward", "weight_half"]

_ENGINE = torch.autograd.Variable._execution_engine
_LEAF = "torch::autograd::AccumulateGrad"
_TRANSPOSE = "TBackward0"
_AS_IT_IS = nullcontext()
_MAKERS = 32  # at most so many operators make a weight of its parameters, as weight norm does


class _Weight(NamedTuple):
    """An input of a layer that comes from parameters alone.

    end: where its gradient goes to. leaves: the parameters' nodes that it gets to from there.
    """

    end: GradientEdge
    leaves: tuple[Any, ...]

    def add(self, gradient: Tensor, sums: dict[GradientEdge, Tensor]) -> None:
        """Sum up, as close to the parameter as can be: it may be used in each step of many."""
        end: Any = self.end
        leaf = self.leaves[0]
        if end.node.name() == _TRANSPOSE and end.node.next_functions[0][0] is leaf:
            end, gradient = GradientEdge(leaf, 0), gradient.t()
        gradient = gradient.sum_to_size(end.node._input_metadata[end.output_nr].shape)
        sums[end] = sums[end] + gradient if end in sums else gradient


class _Layer(NamedTuple):
    """gradients: how to compute them later; a custom function says so after its backward only."""

    node: Any
    weights: list[_Weight | None]  # None for one that is frozen
    gradients: WeightGradients | WeightHalf

    def leaves(self) -> set[Any]:
        return {leaf for weight in self.weights if weight is not None for leaf in weight.leaves}


class Deferred(NamedTuple):
    """The weight half of one layer. is_shared: other layers have a parameter in common with it."""

    weights: list[_Weight | None]
    gradients: WeightGradients
    output_gradient: Tensor
    is_shared: bool


def input_half(
    ends: Sequence[GradientEdge], seeds: Sequence[Tensor], entries: Sequence[Any]
) -> list[Deferred]:
    """I: run the backward that starts at `ends` with `seeds`, all but what it returns.

    entries: nodes that lead to nothing but a leaf each, where the stage's input came in.
    """
    found = _read(ends, entries)
    if found is None:
        run_backward(ends, seeds)
        return []
    layers, leaves = found
    shared = _shared(layers) if len(layers) > 1 else ()
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


def _read(
    ends: Sequence[GradientEdge], entries: Sequence[Any]
) -> tuple[list[_Layer], set[Any]] | None:
    """The layers whose weights can wait, and the parameters, as nodes, that cannot.

    None where nothing can, or where autograd must not be asked for a part.
    """
    kept: set[Any] = set()
    while True:
        found = _walk(ends, entries, kept)
        if found is None or not found[0]:
            return None
        layers, leaves = found
        if not leaves or not any(layer.leaves() & leaves for layer in layers):
            return found
        kept |= leaves  # they would be asked for both now and later


def _walk(
    ends: Sequence[GradientEdge], entries: Sequence[Any], kept: set[Any]
) -> tuple[list[_Layer], set[Any]] | None:
    layers: list[_Layer] = []
    leaves: set[Any] = set()
    seen = set(entries)
    todo: list[Any] = [end.node for end in ends]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        name = node.name()
        if name == _LEAF:
            leaves.add(node)
            continue
        inputs = node.next_functions
        if name in LAYERS:
            weights = {}
            for place, (behind, index) in enumerate(inputs):
                if behind is not None:
                    weight = _weight(behind, index, entries)
                    if weight is not None and (not kept or kept.isdisjoint(weight.leaves)):
                        weights[place] = weight
            gradients = weight_gradients(node, name, tuple(weights)) if weights else None
            if gradients is not None:
                layers.append(_Layer(node, [*weights.values()], gradients))
                inputs = [each for place, each in enumerate(inputs) if place not in weights]
        elif isinstance(half := getattr(node, "weight_half", None), WeightHalf):
            edges = _edges_by_place(node)
            own = _own_weights(half, edges, entries, kept)
            if own is not None:
                layers.append(_Layer(node, own, half))
                inputs = [each for place, each in edges.items() if place not in half.places]
        elif "Checkpoint" in name:  # reentrant: it runs a backward inside its own
            return None
        todo += [behind for behind, _ in inputs if behind is not None]
    return layers, leaves


def _edges_by_place(node: Any) -> dict[int, tuple[Any, int]]:
    """Where each input of a custom function comes from, of those that need a gradient. Its node
    has edges for tensors only, and flags for all arguments."""
    places = [place for place, needs in enumerate(node.needs_input_grad) if needs]
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return dict(zip(places, edges, strict=True))


def _own_weights(
    half: WeightHalf, edges: Mapping[int, tuple[Any, int]], entries: Sequence[Any], kept: set[Any]
) -> list[_Weight | None] | None:
    """The weights of a custom function; None unless all that need a gradient can wait."""
    found: list[_Weight | None] = []
    for place in half.places:
        weight = None
        if place in edges:
            weight = _weight(*edges[place], entries)
            if weight is None or not kept.isdisjoint(weight.leaves):
                return None
        found.append(weight)
    return found if any(found) else None


def _weight(node: Any, index: int, entries: Sequence[Any]) -> _Weight | None:
    """What lies behind an input of a layer, if that is a weight."""
    if node in entries:
        return None
    name = node.name()
    if name == _LEAF:
        return _Weight(GradientEdge(node, index), (node,))
    if name == _TRANSPOSE:  # as F.linear has it; the quick way
        ((behind, _),) = node.next_functions
        if behind.name() == _LEAF:
            return _Weight(GradientEdge(node, index), (behind,))
    if isinstance(node, torch._C._FunctionBase):
        return None  # a custom function's node does not outlive the graph
    leaves: list[Any] = []
    seen = set()
    todo = [node]
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        name = each.name()
        if name == _LEAF:
            leaves.append(each)
            continue
        behind = [next_node for next_node, _ in each.next_functions]
        is_data = each in entries or name in LAYERS or not behind or None in behind
        if is_data or len(seen) > _MAKERS:
            return None
        todo += behind
    return _Weight(GradientEdge(node, index), tuple(leaves))


def _shared(layers: Iterable[_Layer]) -> set[Any]:
    """The nodes of the layers that have a parameter in common with another one, or twice."""
    users: dict[Any, list[Any]] = {}
    for node, weights, _ in layers:
        for weight in weights:
            for leaf in weight.leaves if weight is not None else ():
                users.setdefault(leaf, []).append(node)
    return {node for nodes in users.values() if len(nodes) > 1 for node in nodes}


def _note(
    deferred: list[Deferred],
    weights: list[_Weight | None],
    gradients: WeightGradients,
    is_shared: bool,
    output_gradients: tuple[Tensor | None, ...],
) -> None:
    output_gradient = output_gradients[0]
    if output_gradient is not None:
        deferred.append(Deferred(weights, gradients, output_gradient, is_shared))


def _note_half(
    deferred: list[Deferred],
    weights: list[_Weight | None],
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
