"""The loss function of a script, as the pipeline calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from npu_pipe.runtime.loss import Loss, LossFunction, MeanLoss, SumLoss
from npu_pipe.torch_api.given import Target

__all__ = ["loss_of"]


def loss_of(loss_fn: Callable[..., Any] | None, *, scale_grads: bool) -> Loss | None:
    """loss_fn: (output, target, **loss_kwargs) -> tensor of one element; in an evaluation,
    anything. `Target.keep` gets it, without its graph."""
    if loss_fn is None:
        return None

    def function(output: Any, told: Any) -> Any:
        if not isinstance(told, Target):  # of `schedule.pipeline`, without keywords
            return loss_fn(output, told)
        value = loss_fn(output, told.target, **told.keywords)
        told.keep(pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), value))
        if isinstance(value, Tensor) and value.numel() == 1:
            return value.reshape(())
        # Only a backward needs a scalar: see npu_pipe.runtime.loss.scalar.
        return value if torch.is_grad_enabled() else torch.zeros(())

    checked: LossFunction = function
    return MeanLoss(checked) if scale_grads else SumLoss(checked)
