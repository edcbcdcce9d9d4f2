"""The weight gradient of a linear layer, added in float32 where it is collected in float32.

The sum over the microbatches, of a weight in half precision, is kept in float32 in one of these:

    weight.main_grad                       as Megatron-LM and MindSpeed have it
    weight.grad                            where weight.grad_dtype is torch.float32

There the product is added in one kernel, without a gradient tensor in between: MindSpeed's
npu_matmul_add_fp32 where it is installed, addmm_ elsewhere. Autograd does not see it, so a weight
with hooks on its gradient gets it from autograd after all, if it is collected in `.grad`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

__all__ = ["add_product", "weight_gradient"]

_MINDSPEED = "mindspeed.ops.npu_matmul_add"
_ON = "npu"


def weight_gradient(weight: Tensor, gradient_mc: Tensor, x_mk: Tensor) -> Tensor | None:
    """gradient' x, (c, k); None where it has been added to where the weight collects it."""
    place = _place(weight)
    if place is None:
        return gradient_mc.t().mm(x_mk).to(weight.dtype)
    add_product(place, gradient_mc, x_mk)
    return None


def add_product(place_ck: Tensor, gradient_mc: Tensor, x_mk: Tensor) -> None:
    """place += gradient' x, where place is float32 and the others may be of half precision.

    MindSpeed's kernel multiplies in half precision and adds in float32. Without it, factors of
    another dtype are made float32 first.
    """
    if x_mk.dtype != place_ck.dtype and place_ck.device.type == _ON:
        kernel = _mindspeed()
        if kernel is not None:
            kernel(x_mk, gradient_mc, place_ck)
            return
    place_ck.addmm_(gradient_mc.t().to(place_ck.dtype), x_mk.to(place_ck.dtype))


def _place(weight: Tensor) -> Tensor | None:
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is not None or not weight.is_leaf:
        return main
    if weight.dtype == torch.float32 or weight.grad_dtype != torch.float32:
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


@cache
def _mindspeed() -> Callable[[Tensor, Tensor, Tensor], object] | None:
    try:
        found: Callable[[Tensor, Tensor, Tensor], object] = importlib.import_module(
            _MINDSPEED
        ).npu_matmul_add_fp32
    except ImportError:
        return None
    return found
