"""The norm of gradients, with as many digits as their device has."""

from __future__ import annotations

import math

import pytest
import torch

from npu_pipe.runtime.gradients import square_norm

SIZES = ((300, 400), (7,), ())


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_it_is_that_of_all_values_together_in_double_precision(dtype: torch.dtype) -> None:
    found = gradients(dtype)
    wanted = math.fsum(float(value) ** 2 for each in found for value in each.abs().flatten())
    assert square_norm(found) == pytest.approx(wanted, rel=1e-12)
    assert square_norm([]) == 0.0


def test_without_doubles_each_gradient_is_summed_in_single_precision_and_only_it() -> None:
    """Many gradients whose sum of squares single precision would lose."""
    found = [torch.full((1,), 2.0**12), *(torch.full((1,), 2.0**-2) for _ in range(64))]
    assert square_norm(found, digits=torch.float32) == 2.0**24 + 64 * 2.0**-4
    for dtype in (torch.float32, torch.bfloat16):
        each = gradients(dtype)
        assert square_norm(each, digits=torch.float32) == pytest.approx(square_norm(each), rel=1e-5)
