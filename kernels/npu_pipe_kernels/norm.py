"""RMS norm; on a part of the sequence its gain is the same on all ranks, and stays so.

    F   y = x * r * gain,  r = 1 / sqrt(mean(x^2) + eps)        by row, in float32
    I   dx = r * (g - x * r^2 * mean(g * x)),  g = dy * gain
    W   dgain = sum over rows of dy * x * r, and over the ranks

Kept are x, in its own dtype, and a number a row. The sum over the ranks is a few numbers, in W,
where nobody waits for it.
[Zhang and Sennrich 1910.07467]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npu_pipe.ops.collectives import all_reduce
from npu_pipe.ops.ranks import Ranks
from npu_pipe.runtime.weight_half import WeightHalf
from npu_pipe_kernels.sharding import Sequence, Sharding

__all__ = ["RMSNorm", "SharedRMSNorm"]


class RMSNorm(nn.Module):
    """(..., dim) -> the same, in the dtype of x. The gain starts as ones."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x, None)

    def _normed(self, x: Tensor, ranks: Ranks | None) -> Tensor:
        out: Tensor = _Norm.apply(x, self.weight, self.eps, ranks)  # type: ignore[no-untyped-call]
        return out


class SharedRMSNorm(RMSNorm):
    """The same, of the rows that this rank has."""

    def __init__(self, dim: int, sharding: Sharding, *, eps: float) -> None:
        super().__init__(dim, eps=eps)
        self.sharding = sharding

    def forward(self, x: Tensor) -> Tensor:
        shares = self.sharding.sequence is Sequence.SHARDED
        return self._normed(x, self.sharding.operators.ranks if shares else None)


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float, ranks: Ranks | None) -> Tensor:
        wide = x.to(_wide(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, scale, gain)
        ctx.ranks = ranks
        ctx.weight_half = WeightHalf(1)
        return (wide * scale * gain).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, scale, gain = ctx.saved_tensors
        ranks, of_x, of_gain = ctx.ranks, None, None
        if ctx.needs_input_grad[0]:
            wide, g = x.to(scale.dtype), gradient * gain.to(scale.dtype)
            of_x = scale * (g - wide * scale.square() * (g * wide).mean(-1, keepdim=True))
            of_x = of_x.to(x.dtype)
        if ctx.needs_input_grad[1]:

            def formula(gradient: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor]:
                found = (gradient * (x.to(scale.dtype) * scale)).flatten(0, -2).sum(0)
                return ((found if ranks is None else all_reduce(found, ranks)).to(gain.dtype),)

            (of_gain,) = ctx.weight_half.gradients(formula, gradient, x, scale)
        return of_x, of_gain, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
