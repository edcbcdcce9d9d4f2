"""The weight gradients of single layers, as autograd computes them, from what autograd has saved.

A formula here is the weight half of one kind of autograd node, by the node's name. It takes the
saved tensors that this half needs and lets go of the node, so that autograd can run the other
half, and frees what only that one needs. Each is the expression of PyTorch's
tools/autograd/derivatives.yaml, so that the bits are the same.

The weights of a node that is missing here get their gradients with its input. So do those of
batch norm, whose input gradient needs the same sums. A torch.autograd.Function says for itself how
its weights can wait: see `npu_pipe.runtime.weight_half`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from npu_pipe.errors import DataError

__all__ = ["LAYERS", "WeightGradients", "weight_gradients"]

_Compute: TypeAlias = Callable[[Tensor], Sequence[Tensor | None]]
_Step: TypeAlias = Callable[[Tensor], Tensor]


class _NotApartError(Exception):
    """These gradients cannot be computed later."""


class _Saved:
    """What is read of the saved tensors of a node."""

    __slots__ = ("node", "read")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.read: list[tuple[Tensor, int]] = []  # with its version at that time

    def __call__(self, name: str) -> Tensor:
        """A tensor apart from its graph. It has to be a plain one that nobody has packed:
        activation checkpointing, for one, makes it again when it is unpacked, and only once."""
        if getattr(self.node, f"_raw_saved_{name}").unpack_hook is not None:
            raise _NotApartError
        tensor: Tensor = getattr(self.node, f"_saved_{name}")
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            raise _NotApartError
        tensor = tensor.detach()
        self.read.append((tensor, tensor._version))
        return tensor

    def settings(self, *names: str) -> list[Any]:
        """What is no tensor."""
        return [getattr(self.node, f"_saved_{name}") for name in names]

    def optional(self, name: str) -> Tensor | None:
        return None if getattr(self.node, f"_saved_{name}") is None else self(name)


class WeightGradients(NamedTuple):
    """Gradient of a layer's output -> gradients of its weights, before sums over broadcasts; None
    for one that has been added to its parameter already.

    Raises DataError where what the layer has read was written to since.
    """

    compute: _Compute
    read: list[tuple[Tensor, int]]

    def __call__(self, gradient: Tensor) -> Sequence[Tensor | None]:
        for tensor, version in self.read:
            if tensor._version != version:
                raise DataError(
                    "what a layer reads is not written to before its weight gradients are made",
                    f"a tensor of {tuple(tensor.shape)} was, after its input gradient",
                    "work on a new tensor in each forward, or use a schedule without W",
                )
        return self.compute(gradient)


_PLAIN = (Tensor, nn.Parameter)
_Formula: TypeAlias = Callable[[_Saved, tuple[int, ...]], _Compute]


def weight_gradients(node: Any, name: str, places: tuple[int, ...]) -> WeightGradients | None:
    """How to compute, later, the gradients of some inputs of a node.

    name: the node's, one of `LAYERS`. places: which of its inputs are weights. None where that
    cannot be done.
    """
    saved = _Saved(node)
    try:
        return WeightGradients(_FORMULAS[name](saved, places), saved.read)
    except _NotApartError:
        return None


def _addmm(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    """bias + left @ right, as F.linear makes of rows"""
    if saved.node._saved_alpha != 1 or saved.node._saved_beta != 1:
        raise _NotApartError
    steps: list[_Step] = []
    for place in places:
        if place == 0:
            steps.append(_itself)
        elif place == 1:
            form = saved.node._saved_mat1_sym_sizes, saved.node._saved_mat1_sym_strides
            steps.append(_left_factor(saved("mat2"), *form))
        else:
            form = saved.node._saved_mat2_sym_sizes, saved.node._saved_mat2_sym_strides
            steps.append(_right_factor(saved("mat1"), *form))
    return lambda gradient: [step(gradient) for step in steps]


def _mm(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    """left @ right, as F.linear makes of rows without a bias"""
    steps: list[_Step] = []
    for place in places:
        if place == 0:
            form = saved.node._saved_self_sym_sizes, saved.node._saved_self_sym_strides
            steps.append(_left_factor(saved("mat2"), *form))
        else:
            form = saved.node._saved_mat2_sym_sizes, saved.node._saved_mat2_sym_strides
            steps.append(_right_factor(saved("self"), *form))
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


def _bmm(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    if places == (0,):
        right = saved("mat2").transpose(1, 2).conj()
        return lambda gradient: [gradient.bmm(right)]
    if places == (1,):
        left = saved("self").transpose(1, 2).conj()
        return lambda gradient: [left.bmm(gradient)]
    raise _NotApartError


def _mul(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    """The gain of a norm that is written out."""
    if len(places) != 1:
        raise _NotApartError
    other = saved("self" if places[0] else "other")
    if other.is_complex():
        raise _NotApartError
    return lambda gradient: [gradient * other]


def _linear(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    """On devices where linear is one operator."""
    if 0 in places:
        raise _NotApartError
    entered, weight, mask = saved("input"), saved("weight"), _mask(places)
    backward = torch.ops.aten.linear_backward.default
    return lambda gradient: _chosen(backward(entered, gradient, weight, mask), places)


def _convolution(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    if 0 in places:
        raise _NotApartError
    tensors = saved("input"), saved("weight")
    settings = (
        *saved.settings("bias_sym_sizes_opt", "stride", "padding", "dilation"),
        *(*saved.settings("transposed", "output_padding", "groups"), _mask(places)),
    )
    backward = torch.ops.aten.convolution_backward.default
    return lambda gradient: _chosen(backward(gradient, *tensors, *settings), places)


def _embedding(saved: _Saved, _places: tuple[int, ...]) -> _Compute:
    rows, padding, by_frequency, is_sparse = saved.settings(
        "weight_sym_argsize_0", "padding_idx", "scale_grad_by_freq", "sparse"
    )
    if is_sparse:
        raise _NotApartError
    settings = saved("indices"), rows, _signed(padding), by_frequency, False
    backward = torch.ops.aten.embedding_backward.default
    return lambda gradient: [backward(gradient, *settings)]


def _layer_norm(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    if 0 in places:
        raise _NotApartError
    settings = (
        *(saved("input"), *saved.settings("normalized_shape")),
        *(saved("result1"), saved("result2")),
        *(saved.optional("weight"), saved.optional("bias"), _mask(places)),
    )
    backward = torch.ops.aten.native_layer_norm_backward.default
    return lambda gradient: _chosen(backward(gradient, *settings), places)


def _group_norm(saved: _Saved, places: tuple[int, ...]) -> _Compute:
    if 0 in places:
        raise _NotApartError
    settings = (
        *(saved("input"), saved("result1"), saved("result2"), saved.optional("weight")),
        *(*saved.settings("N", "C", "HxW", "group"), _mask(places)),
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


def _signed(number: int) -> int:
    """torch shows a saved index of -1, for none, as the largest number of 64 bits."""
    return number - 2**64 if number >= 2**63 else number


def _mask(places: tuple[int, ...]) -> list[bool]:
    return [place in places for place in range(3)]


def _chosen(found: Sequence[Tensor], places: tuple[int, ...]) -> list[Tensor]:
    return [found[place] for place in places]
