"""Autocast for what is none of its operators: custom functions, and where a residual begins."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_autocast"]


def as_autocast(tensor: Tensor) -> Tensor:
    """In autocast's dtype, where it is on; float64 stays, as in autocast's own operators."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
