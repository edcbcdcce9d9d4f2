"""Unused: a gradient without values, for what the next stage did not use, as it crosses.

It crosses as any other, in a buffer of its form, whose first number is a NaN of our own: one that
nothing computes. Processors make one kind of NaN only, and pass on those that they are given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["marked", "unmarked"]

_KINDS = {  # what a number is read as, and the bits of the NaN
    torch.float16: (torch.int16, ctypes.c_int16, 0x7FE5),
    torch.bfloat16: (torch.int16, ctypes.c_int16, 0x7FE5),
    torch.float32: (torch.int32, ctypes.c_int32, 0x7FE5_7A3B),
    torch.float64: (torch.int64, ctypes.c_int64, 0x7FF9_7A3B_5C1D_4E2F),
}


def marked(gradients: Sequence[Tensor]) -> list[Tensor]:
    """To send: those without values (on the meta device) are made tensors that say so."""
    return [_mark(each) if each.is_meta else each for each in gradients]


def unmarked(gradients: Sequence[Tensor]) -> list[Tensor]:
    """What came, in memory of the host."""
    return [
        torch.empty_like(each, device="meta") if _is_marked(each) else each for each in gradients
    ]


def _mark(gradient: Tensor) -> Tensor:
    bits, _, mark = _KINDS[gradient.dtype]
    made = torch.zeros(gradient.shape, dtype=gradient.dtype, device="cpu")
    made.view(-1).view(bits)[:1] = mark
    return made


def _is_marked(gradient: Tensor) -> bool:
    _, number, mark = _KINDS[gradient.dtype]
    # Read as it lies: the operators of torch would take longer than a small transfer.
    return gradient.numel() > 0 and number.from_address(gradient.data_ptr()).value == mark
