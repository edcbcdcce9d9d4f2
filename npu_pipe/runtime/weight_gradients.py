"""The weight gradients of single layers, as autograd computes them, from what autograd has saved.

A formula here is the weight half of one kind of autograd node, by the node's name. It takes the
saved tensors that this half needs and lets go of the node, so that autograd can run the other
half, and frees what only that one needs. Each is the expression of PyTorch's
tools/autograd/derivatives.yaml, so that the bits are the same.

The weights of a node that is missing here get their gradients with its input. So do those of
batch norm, whose input gradient needs the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["LAYERS", "WeightGradients", "weight_gradients"]

WeightGradients: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""Gradient of the layer's output -> gradients of its weights, before sums over broadcasts."""

_Formula: TypeAlias = Callable[["_Node", tuple[int, ...]], WeightGradients]
_Step: TypeAlias = Callable[[Tensor], Tensor]


class _NotApartError(Exception):
    """These gradients cannot be computed later."""


def weight_gradients(node: Any, name: str, places: tuple[int, ...]) -> WeightGradients | None:
    """How to compute, later, the gradients of some inputs of a node.

    name: the node's, one of `LAYERS`. places: which of its inputs are weights. None where that
    cannot be done.
    """
    try:
        return _FORMULAS[name](node, places)
    except _NotApartError:
        return None


def _addmm(node: Any, places: tuple[int, ...]) -> WeightGradients:
    """bias + left @ right, as F.linear makes of rows"""
    if node._saved_alpha != 1 or node._saved_beta != 1:
        raise _NotApartError
    steps: list[_Step] = []
    for place in places:
        if place == 0:
            steps.append(_itself)
        elif place == 1:
            form = node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides
            steps.append(_left_factor(_saved(node, "mat2"), *form))
        else:
            form = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
            steps.append(_right_factor(_saved(node, "mat1"), *form))
    return lambda gradient: [step(gradient) for step in steps]


def _mm(node: Any, places: tuple[int, ...]) -> WeightGradients:
    """left @ right, as F.linear makes of rows without a bias"""
    steps: list[_Step] = []
    for place in places:
        if place == 0:
            form = node._saved_self_sym_sizes, node._saved_self_sym_strides
            steps.append(_left_factor(_saved(node, "mat2"), *form))
        else:
            form = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
            steps.append(_right_factor(_saved(node, "self"), *form))
    return lambda gradient: [step(gradient) for step in steps]


# Autograd multiplies in the order that suits the memory of the factor, and so do these.


def _left_factor(right: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Step:
    right = right.conj()
    if strides == (1, sizes[0]):
        return lambda gradient: right.mm(gradient.t()).t()
    return lambda gradient: gradient.mm(right.t())


def _right_factor(left: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...]) -> _Step:
    left = left.conj()
    if strides == (1, sizes[0]):
        return lambda gradient: gradient.t().mm(left).t()
    return lambda gradient: left.t().mm(gradient)


def _bmm(node: Any, places: tuple[int, ...]) -> WeightGradients:
    if places == (0,):
        right = _saved(node, "mat2").transpose(1, 2).conj()
        return lambda gradient: [gradient.bmm(right)]
    if places == (1,):
        left = _saved(node, "self").transpose(1, 2).conj()
        return lambda gradient: [left.bmm(gradient)]
    raise _NotApartError


def _mul(node: Any, places: tuple[int, ...]) -> WeightGradients:
    """The gain of a norm that is written out."""
    if len(places) != 1:
        raise _NotApartError
    other = _saved(node, "self" if places[0] else "other")
    if other.is_complex():
        raise _NotApartError
    return lambda gradient: [gradient * other]


def _linear(node: Any, places: tuple[int, ...]) -> WeightGradients:
    """On devices where linear is one operator."""
    if 0 in places:
        raise _NotApartError
    entered, weight, mask = _saved(node, "input"), _saved(node, "weight"), _mask(places)
    backward = torch.ops.aten.linear_backward.default
    return lambda gradient: _chosen(backward(entered, gradient, weight, mask), places)


def _convolution(node: Any, places: tuple[int, ...]) -> WeightGradients:
    if 0 in places:
        raise _NotApartError
    entered, weight = _saved(node, "input"), _saved(node, "weight")
    settings = (
        *(node._saved_bias_sym_sizes_opt, node._saved_stride, node._saved_padding),
        *(node._saved_dilation, node._saved_transposed, node._saved_output_padding),
        *(node._saved_groups, _mask(places)),
    )
    backward = torch.ops.aten.convolution_backward.default
    return lambda gradient: _chosen(backward(gradient, entered, weight, *settings), places)


def _embedding(node: Any, _places: tuple[int, ...]) -> WeightGradients:
    if node._saved_sparse:
        raise _NotApartError
    settings = (
        *(_saved(node, "indices"), node._saved_weight_sym_argsize_0),
        *(_signed(node._saved_padding_idx), node._saved_scale_grad_by_freq, False),
    )
    backward = torch.ops.aten.embedding_backward.default
    return lambda gradient: [backward(gradient, *settings)]


def _layer_norm(node: Any, places: tuple[int, ...]) -> WeightGradients:
    if 0 in places:
        raise _NotApartError
    settings = (
        *(_saved(node, "input"), node._saved_normalized_shape),
        *(_saved(node, "result1"), _saved(node, "result2")),
        *(_optional(node, "weight"), _optional(node, "bias"), _mask(places)),
    )
    backward = torch.ops.aten.native_layer_norm_backward.default
    return lambda gradient: _chosen(backward(gradient, *settings), places)


def _group_norm(node: Any, places: tuple[int, ...]) -> WeightGradients:
    if 0 in places:
        raise _NotApartError
    settings = (
        *(_saved(node, "input"), _saved(node, "result1"), _saved(node, "result2")),
        *(_optional(node, "weight"), node._saved_N, node._saved_C, node._saved_HxW),
        *(node._saved_group, _mask(places)),
    )
    backward = torch.ops.aten.native_group_norm_backward.default
    return lambda gradient: _chosen(backward(gradient, *settings), places)


_FORMULAS: dict[str, _Formula] = {
    "AddmmBackward0": _addmm,
    "BmmBackward0": _bmm,
    "ConvolutionBackward0": _convolution,
    "EmbeddingBackward0": _embedding,
    "LinearBackward0": _linear,
    "MmBackward0": _mm,
    "MulBackward0": _mul,
    "NativeGroupNormBackward0": _group_norm,
    "NativeLayerNormBackward0": _layer_norm,
}

LAYERS = frozenset(_FORMULAS)
"""The names of the autograd nodes whose halves can run apart."""


def _itself(gradient: Tensor) -> Tensor:
    return gradient


def _saved(node: Any, name: str) -> Tensor:
    """A saved tensor, apart from its graph. It has to be a plain one that nobody has packed:
    activation checkpointing, for one, makes it again when it is unpacked, and only once."""
    if getattr(node, f"_raw_saved_{name}").unpack_hook is not None:
        raise _NotApartError
    tensor: Tensor = getattr(node, f"_saved_{name}")
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise _NotApartError
    return tensor.detach()


def _signed(number: int) -> int:
    """torch shows a saved index of -1, for none, as the largest number of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _optional(node: Any, name: str) -> Tensor | None:
    return None if getattr(node, f"_saved_{name}") is None else _saved(node, name)


def _mask(places: tuple[int, ...]) -> list[bool]:
    return [place in places for place in range(3)]


def _chosen(found: Sequence[Tensor], places: tuple[int, ...]) -> list[Tensor]:
    return [found[place] for place in places]
