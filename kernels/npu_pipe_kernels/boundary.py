"""matmul_send and recv_matmul: the products on both sides of a boundary between ranks, in tiles.

    rank 0   | a0 | a1 | a2 | a3 |                 its last product, some rows at a time
    lane          `-a0-`-a1-`-a2-`-a3-.            each sent while the next is computed
    rank 1             | b0 | b1 | b2 | b3 |       its first product, on rows as they arrive

and the same backwards: the input gradient of rank 1's product goes out in tiles, and rank 0's
backward works on them as they arrive. The weight gradients are one product each over all rows, as
untiled, after the last tile is out; or in W, where the schedule has one.

Nothing here communicates: a `Side` says which rows are there and which may go, `npu_pipe.comm`
has what does. Where no side is open both are F.linear, in one piece.
"""

# x (rows, k), weight (n, k), bias (n,), product and residual (rows, n); x may have any leading
# dimensions.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npu_pipe.runtime.weight_half import WeightHalf

__all__ = ["Side", "linear_between", "matmul_send", "recv_matmul"]


class Side(Protocol):
    """What a product knows of the boundary next to it. Rows count over all leading dimensions."""

    def arriving(self) -> Sequence[int]:
        """Where the tiles end of what is coming in; nothing if all of it is there."""
        ...

    def wait(self, end: int) -> None:
        """Until all rows before `end` are there."""
        ...

    def leaving(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        """Where the tiles end of what is about to be made; nothing if it goes in one piece.

        made: the memory, of which nothing has been written. needs_grad: whether a gradient of
        it is wanted."""
        ...

    def send(self, end: int) -> None:
        """All rows before `end` have been made."""
        ...


class _Inside:
    """The side of a product that is not next to a boundary."""

    def arriving(self) -> Sequence[int]:
        return ()

    def wait(self, end: int) -> None:
        del end

    def leaving(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        del made, needs_grad
        return ()

    def send(self, end: int) -> None:
        del end


def matmul_send(
    x: Tensor, weight: Tensor, bias: Tensor | None, after: Side, residual: Tensor | None = None
) -> Tensor:
    """F.linear as the last product of a stage: its rows leave by `after` as they are made.

    residual: what is added to the product, row by row, before it leaves.
    """
    return linear_between(x, weight, bias, before=_Inside(), after=after, residual=residual)


def recv_matmul(x: Tensor, weight: Tensor, bias: Tensor | None, before: Side) -> Tensor:
    """F.linear as the first product of a stage, of rows that come by `before`."""
    return linear_between(x, weight, bias, before=before, after=_Inside())


def linear_between(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    before: Side,
    after: Side,
    residual: Tensor | None = None,
) -> Tensor:
    """Both at once: where one layer is all of a stage."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64  # as F.linear is
    dtype = torch.get_autocast_dtype(kind) if is_cast else None
    inputs = (x, weight, bias, residual)
    needs_grad = torch.is_grad_enabled() and any(
        each is not None and each.requires_grad for each in inputs
    )
    with torch.autocast(kind, enabled=False):
        out: Tensor = _Product.apply(*inputs, before, after, dtype, needs_grad)  # type: ignore[no-untyped-call]
    return out


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        before: Side,
        after: Side,
        dtype: torch.dtype | None,
        needs_grad: bool,
    ) -> Tensor:
        """dtype: to compute in, where autocast says so."""
        dtype = dtype or x.dtype
        turned = weight.to(dtype).t()
        added = None if bias is None else bias.to(dtype)
        kind = dtype if residual is None else torch.promote_types(dtype, residual.dtype)
        made = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=kind)
        rows, out = _matrix(x), _matrix(made)
        terms = None if residual is None else _matrix(residual.expand(made.shape))

        def product(tile: slice) -> None:
            own = rows[tile].to(dtype)
            into = out[tile] if terms is None else None
            if added is None:
                found = torch.mm(own, turned, out=into)
            else:
                found = torch.addmm(added, own, turned, out=into)
            if terms is not None:
                torch.add(terms[tile], found, out=out[tile])

        _in_tiles(product, made, before, after, needs_grad=needs_grad)
        ctx.save_for_backward(x, weight)
        ctx.sides, ctx.dtype, ctx.has_bias = (before, after), dtype, bias is not None
        ctx.weight_half = WeightHalf(1, 2) if bias is not None else WeightHalf(1)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        before, after = ctx.sides
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        of_x: Tensor | None = None
        if needs_x:
            of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            factor = weight.to(ctx.dtype)
            rows, out = _matrix(gradient), _matrix(of_x)

            def product(tile: slice) -> None:
                own = rows[tile].to(ctx.dtype)
                if out.dtype == own.dtype:
                    torch.mm(own, factor, out=out[tile])
                else:
                    out[tile] = own.mm(factor)

            _in_tiles(product, of_x, after, before, needs_grad=True)
        after.wait(_rows(gradient))
        wanted = weight.dtype, needs_weight, needs_bias and ctx.has_bias
        own = gradient.to(ctx.dtype)
        gradients = ctx.weight_half.gradients(_Weights(*wanted, ctx.has_bias), own, x)
        of_weight, of_bias = gradients if ctx.has_bias else (*gradients, None)
        of_residual = gradient if needs_residual else None
        return of_x, of_weight, of_bias, of_residual, None, None, None, None


class _Weights:
    """Gradients of weight and bias, as autograd has them of F.linear: bit for bit."""

    def __init__(
        self, dtype: torch.dtype, needs_weight: bool, needs_bias: bool, has_bias: bool
    ) -> None:
        self._dtype = dtype
        self._needs = needs_weight, needs_bias
        self._has_bias = has_bias

    def __call__(self, gradient: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        gradient = gradient.reshape(-1, gradient.shape[-1])
        x = x.reshape(-1, x.shape[-1]).to(gradient.dtype)
        needs_weight, needs_bias = self._needs
        of_weight = gradient.t().mm(x).to(self._dtype) if needs_weight else None
        if not self._has_bias:
            return (of_weight,)
        return of_weight, gradient.sum(0).to(self._dtype) if needs_bias else None


def _in_tiles(
    product: Callable[[slice], None],
    made: Tensor,
    source: Side,
    target: Side,
    *,
    needs_grad: bool,
) -> None:
    """Make rows of `made`, as the two sides want them."""
    leaving = target.leaving(made, needs_grad=needs_grad)
    start = 0
    for end in leaving or source.arriving() or (_rows(made),):
        source.wait(end)
        product(slice(start, end))
        target.send(end)
        start = end


def _rows(tensor: Tensor) -> int:
    return tensor.shape[:-1].numel()


def _matrix(tensor: Tensor) -> Tensor:
    """All leading dimensions as one. Received tensors are contiguous: it is the same memory."""
    return tensor.reshape(_rows(tensor), tensor.shape[-1])
