"""The products of tensor-parallel layers as autograd functions, fused forward and backward.

Shapes: m rows of x on this rank, k its width, c columns of the result, n ranks; weights are (c, k).

    gather_linear    x (m, k)    F   y = all_gather_matmul(x, w')               (n*m, c)
                                 I  dx = matmul_reduce_scatter(dy, w)           (m, k)
                                 W  dw = dy' x of all ranks, as kept or gathered anew
    linear_scatter   x (m, k)    F   y = matmul_reduce_scatter(x, w')           (m/n, c)
                                 I  dx, dy of all ranks = all_gather_matmul(dy, w)
                                 W  dw = (dy of all ranks)' x
    linear_reduce    x (m, k)    F   y = matmul_all_reduce(x, w')               (m, c)
                                 I  dx = dy w;  W  dw = dy' x
    copy_linear      x (m, k)    F   y = x w'                                   (m, c)
                                 I  dx = matmul_all_reduce(dy, w);  W  dw = dy' x

The first two are for a sequence that is cut over the ranks, the others for one that each has whole.
W is put off as with any layer: see `npu_pipe.runtime.weight_half`. A bias is added after the
transfer, never in the fused product; its gradient is made in W too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npu_pipe.ops.collectives import all_gather
from npu_pipe.ops.operators import Operators
from npu_pipe.runtime.weight_half import WeightHalf
from npu_pipe_kernels.accumulate import weight_gradient
from npu_pipe_kernels.sharding import Keep

__all__ = ["copy_linear", "gather_linear", "linear_reduce", "linear_scatter"]

_WEIGHTS = (1, 2)  # among the inputs of each: weight, bias
_Found = tuple[Tensor | None, ...]


def gather_linear(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators, keep: Keep
) -> Tensor:
    """Of the rows of all ranks: (n * m, c)."""
    out: Tensor = _GatherLinear.apply(x_mk, weight_ck, bias_c, operators, keep)  # type: ignore[no-untyped-call]
    return out


def linear_scatter(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators, keep: Keep
) -> Tensor:
    """This rank's rows of the sum over all ranks: (m / n, c)."""
    out: Tensor = _LinearScatter.apply(x_mk, weight_ck, bias_c, operators, keep)  # type: ignore[no-untyped-call]
    return out


def linear_reduce(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators
) -> Tensor:
    """The sum over all ranks: (m, c)."""
    out: Tensor = _LinearReduce.apply(x_mk, weight_ck, bias_c, operators)  # type: ignore[no-untyped-call]
    return out


def copy_linear(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators
) -> Tensor:
    """Of an x that is the same on all ranks, whose gradient is the sum over them: (m, c)."""
    out: Tensor = _CopyLinear.apply(x_mk, weight_ck, bias_c, operators)  # type: ignore[no-untyped-call]
    return out


class _GatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operators: Operators, keep: Keep
    ) -> Tensor:
        x, used, added = _as_autocast(x, weight, bias)
        y, gathered = operators.all_gather_matmul(x, used.t())
        _begin(ctx, gathered if keep is Keep.GATHERED else x, weight, bias, operators)
        ctx.whole = _as_it_is if keep is Keep.GATHERED else partial(_gathered, operators)
        return _shifted(y, added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> _Found:
        x, weight = ctx.saved_tensors
        of_x = (
            ctx.operators.matmul_reduce_scatter(gradient, weight.to(gradient.dtype))
            if ctx.needs_input_grad[0]
            else None
        )
        return of_x, *_of_weights(ctx, gradient, x, whole_x=ctx.whole), None, None


class _LinearScatter(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operators: Operators, keep: Keep
    ) -> Tensor:
        x, used, added = _as_autocast(x, weight, bias)
        _begin(ctx, x, weight, bias, operators)
        ctx.keep = keep
        return _shifted(operators.matmul_reduce_scatter(x, used.t()), added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> _Found:
        x, weight = ctx.saved_tensors
        of_x, gathered = None, None
        if ctx.needs_input_grad[0]:
            of_x, gathered = ctx.operators.all_gather_matmul(gradient, weight.to(gradient.dtype))
        if gathered is not None and ctx.keep is Keep.GATHERED:
            return of_x, *_of_weights(ctx, gathered, x), None, None
        again = partial(_gathered, ctx.operators)
        return of_x, *_of_weights(ctx, gradient, x, whole_gradient=again), None, None


class _LinearReduce(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operators: Operators
    ) -> Tensor:
        x, used, added = _as_autocast(x, weight, bias)
        _begin(ctx, x, weight, bias, operators)
        return _shifted(operators.matmul_all_reduce(x, used.t()), added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> _Found:
        x, weight = ctx.saved_tensors
        of_x = gradient.mm(weight.to(gradient.dtype)) if ctx.needs_input_grad[0] else None
        return of_x, *_of_weights(ctx, gradient, x), None


class _CopyLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operators: Operators
    ) -> Tensor:
        x, used, added = _as_autocast(x, weight, bias)
        _begin(ctx, x, weight, bias, operators)
        return _shifted(x.mm(used.t()), added)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> _Found:
        x, weight = ctx.saved_tensors
        of_x = (
            ctx.operators.matmul_all_reduce(gradient, weight.to(gradient.dtype))
            if ctx.needs_input_grad[0]
            else None
        )
        return of_x, *_of_weights(ctx, gradient, x), None


def _begin(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operators: Operators) -> None:
    """Save x only where the weight needs it; and the weight as it is, since a copy in autocast's
    dtype would be one for each microbatch that is under way."""
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.operators = operators
    ctx.parameters = weight, bias  # what is saved may come back as another tensor, and only once
    ctx.weight_half = WeightHalf(*_WEIGHTS)


def _as_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In autocast's dtype, where it is on; a custom function is none of its operators. float64
    stays, as there."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return _cast(x, dtype), _cast(weight, dtype), None if bias is None else _cast(bias, dtype)


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _gathered(operators: Operators, tensor: Tensor) -> Tensor:
    """Also in W: its ranks run one program, so they come here in the same order."""
    return all_gather(tensor, operators.ranks)


def _shifted(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)


def _of_weights(
    ctx: Any,
    gradient: Tensor,
    x: Tensor | None,
    *,
    whole_x: Callable[[Tensor], Tensor] = _as_it_is,
    whole_gradient: Callable[[Tensor], Tensor] = _as_it_is,
) -> Sequence[Tensor | None]:
    """Of weight and bias, now or in W."""
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    if not (needs_weight or needs_bias):
        return None, None
    weight, bias = ctx.parameters

    def formula(gradient: Tensor, *read: Tensor) -> _Found:
        gradient = whole_gradient(gradient)
        return (
            weight_gradient(weight, gradient, whole_x(*read)) if needs_weight else None,
            gradient.sum(0).to(bias.dtype) if needs_bias else None,
        )

    found: Sequence[Tensor | None] = ctx.weight_half.gradients(
        formula, gradient, *(() if x is None else (x,))
    )
    return found
