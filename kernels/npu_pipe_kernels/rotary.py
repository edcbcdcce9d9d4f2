"""Rotary positions. [Su et al. 2104.09864]

Shapes: B batch, H heads, T sequence, K dim of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary", "rotate"]


def rotary(x_bhtk: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles, (T, K/2). [Su et al. 2104.09864]

    Made anew each time: it costs less than a hundredth of a block and spares a longest sequence.
    """
    time, half = x_bhtk.shape[-2], x_bhtk.shape[-1] // 2
    power = torch.arange(half, device=x_bhtk.device, dtype=torch.float32) / half
    position = torch.arange(time, device=x_bhtk.device, dtype=torch.float32)
    angle_tk = torch.outer(position, base**-power)
    return angle_tk.cos().to(x_bhtk.dtype), angle_tk.sin().to(x_bhtk.dtype)


def rotate(x_bhtk: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
    first, second = x_bhtk.chunk(2, dim=-1)
    return torch.cat((first * cos_tk - second * sin_tk, second * cos_tk + first * sin_tk), dim=-1)
