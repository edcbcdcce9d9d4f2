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

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npu_pipe.ops.collectives import all_gather
from npu_pipe.ops.need import Operator
from npu_pipe.ops.operators import Operators
from npu_pipe.runtime.weight_half import WeightHalf
from npu_pipe_kernels.accumulate import weight_gradient
from npu_pipe_kernels.autocast import as_autocast
from npu_pipe_kernels.sharding import Keep

__all__ = ["copy_linear", "gather_linear", "linear_reduce", "linear_scatter"]


class _Layer(NamedTuple):
    """forward, backward: the products of y and of dx; None for one without a transfer."""

    forward: Operator | None
    backward: Operator | None
    operators: Operators
    keep: Keep = Keep.GATHERED


def gather_linear(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators, keep: Keep
) -> Tensor:
    """Of the rows of all ranks: (n * m, c)."""
    gather, scatter = Operator.ALL_GATHER_MATMUL, Operator.MATMUL_REDUCE_SCATTER
    return _linear(x_mk, weight_ck, bias_c, _Layer(gather, scatter, operators, keep))


def linear_scatter(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators, keep: Keep
) -> Tensor:
    """This rank's rows of the sum over all ranks: (m / n, c)."""
    gather, scatter = Operator.ALL_GATHER_MATMUL, Operator.MATMUL_REDUCE_SCATTER
    return _linear(x_mk, weight_ck, bias_c, _Layer(scatter, gather, operators, keep))


def linear_reduce(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators
) -> Tensor:
    """The sum over all ranks: (m, c)."""
    return _linear(x_mk, weight_ck, bias_c, _Layer(Operator.MATMUL_ALL_REDUCE, None, operators))


def copy_linear(
    x_mk: Tensor, weight_ck: Tensor, bias_c: Tensor | None, operators: Operators
) -> Tensor:
    """Of an x that is the same on all ranks, whose gradient is the sum over them: (m, c)."""
    return _linear(x_mk, weight_ck, bias_c, _Layer(None, Operator.MATMUL_ALL_REDUCE, operators))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
    out: Tensor = _Linear.apply(x, weight, bias, layer)  # type: ignore[no-untyped-call]
    return out


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        ctx.layer, ctx.weight_half = layer, WeightHalf(1, 2)
        ctx.parameters = (
            weight,
            bias,
        )  # what is saved may come back as another tensor, and only once
        x, used = as_autocast(x), as_autocast(weight)
        y, rows = layer.operators.product(layer.forward, x, used.t())
        kept = rows if layer.keep is Keep.GATHERED else x
        # The weight as it is: in autocast's dtype it would be one for each microbatch under way.
        ctx.save_for_backward(kept if ctx.needs_input_grad[1] else None, weight)
        return y if bias is None else y.add_(as_autocast(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer, of_x, rows = ctx.layer, None, gradient
        if ctx.needs_input_grad[0]:
            used = weight.to(gradient.dtype)
            of_x, rows = layer.operators.product(layer.backward, gradient, used)
        kept = rows if layer.keep is Keep.GATHERED else gradient
        is_whole = kept is not gradient or layer.backward is not Operator.ALL_GATHER_MATMUL
        return of_x, *_of_weights(ctx, kept, x, is_whole=is_whole), None


def _of_weights(
    ctx: Any, gradient: Tensor, x: Tensor | None, *, is_whole: bool
) -> Sequence[Tensor | None]:
    """Of weight and bias, now or in W. is_whole: the gradient has the rows of all that it has to;
    else they are gathered in W, to which all ranks come in one order."""
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    if not (needs_weight or needs_bias):
        return None, None
    weight, bias = ctx.parameters
    layer: _Layer = ctx.layer
    whole = partial(all_gather, ranks=layer.operators.ranks)
    is_x_whole = layer.forward is not Operator.ALL_GATHER_MATMUL or layer.keep is Keep.GATHERED

    def formula(gradient: Tensor, *read: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows = gradient if is_whole else whole(gradient)
        of_weight = None
        if needs_weight:
            (x,) = read
            of_weight = weight_gradient(weight, rows, x if is_x_whole else whole(x))
        return of_weight, rows.sum(0).to(bias.dtype) if needs_bias else None

    read = () if x is None else (x,)
    found: Sequence[Tensor | None] = ctx.weight_half.gradients(formula, gradient, *read)
    return found
