"""What of an autograd graph can wait: its layers, whose weights come from parameters alone.

ends --> layer --> layer --> entries        a walk from where the backward starts to where
           |         |                      the stage's input came in
         weight    weight                   a parameter, or made of parameters alone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from npu_pipe.runtime.weight_gradients import LAYERS, WeightGradients, weight_gradients
from npu_pipe.runtime.weight_half import WeightHalf

__all__ = ["Layer", "Weight", "read_graph", "sharing_layers"]

_LEAF = "torch::autograd::AccumulateGrad"
_TRANSPOSE = "TBackward0"
_MAKERS = 32  # at most so many operators make a weight of its parameters, as weight norm does


class Weight(NamedTuple):
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


class Layer(NamedTuple):
    """gradients: how to compute them later; a custom function says so after its backward only."""

    node: Any
    weights: list[Weight | None]  # None for one that is frozen
    gradients: WeightGradients | WeightHalf

    def leaves(self) -> set[Any]:
        return {leaf for weight in self.weights if weight is not None for leaf in weight.leaves}


def read_graph(
    ends: Sequence[GradientEdge], entries: Sequence[Any]
) -> tuple[list[Layer], set[Any]] | None:
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
) -> tuple[list[Layer], set[Any]] | None:
    layers: list[Layer] = []
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
                layers.append(Layer(node, [*weights.values()], gradients))
                inputs = [each for place, each in enumerate(inputs) if place not in weights]
        elif isinstance(half := getattr(node, "weight_half", None), WeightHalf):
            edges = _edges_by_place(node)
            own = _own_weights(half, edges, entries, kept)
            if own is not None:
                layers.append(Layer(node, own, half))
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
) -> list[Weight | None] | None:
    """The weights of a custom function; None unless all that need a gradient can wait."""
    found: list[Weight | None] = []
    for place in half.places:
        weight = None
        if place in edges:
            weight = _weight(*edges[place], entries)
            if weight is None or not kept.isdisjoint(weight.leaves):
                return None
        found.append(weight)
    return found if any(found) else None


def _weight(node: Any, index: int, entries: Sequence[Any]) -> Weight | None:
    """What lies behind an input of a layer, if that is a weight."""
    if node in entries:
        return None
    name = node.name()
    if name == _LEAF:
        return Weight(GradientEdge(node, index), (node,))
    if name == _TRANSPOSE:  # as F.linear has it; the quick way
        ((behind, _),) = node.next_functions
        if behind.name() == _LEAF:
            return Weight(GradientEdge(node, index), (behind,))
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
    return Weight(GradientEdge(node, index), tuple(leaves))


def sharing_layers(layers: Iterable[Layer]) -> set[Any]:
    """The nodes of the layers that have a parameter in common with another one, or twice."""
    users: dict[Any, list[Any]] = {}
    for node, weights, _ in layers:
        for weight in weights:
            for leaf in weight.leaves if weight is not None else ():
                users.setdefault(leaf, []).append(node)
    return {node for nodes in users.values() if len(nodes) > 1 for node in nodes}
