"""A stage that sleeps: it takes its time and next to no work."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BACKWARD_MS", "FORWARD_MS", "WIDTH", "Sleeper"]

FORWARD_MS, BACKWARD_MS = 5.0, 10.0
WIDTH = 8


def sleep_until(end_s: float) -> None:
    """A sleep alone lasts up to 0.1 ms longer than asked, and its ends are not what is measured."""
    time.sleep(max(0.0, end_s - time.perf_counter() - 2e-4))
    while time.perf_counter() < end_s:
        pass


class Sleep(torch.autograd.Function):
    """The same value, in so many milliseconds each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, end_s: float, module: Sleeper) -> Tensor:
        ctx.module = module
        y = x.view_as(x)
        sleep_until(end_s)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.module.ended_s = time.perf_counter() + ctx.module.half_ms / 1e3
        sleep_until(ctx.module.ended_s)
        return gradients[0], None, None


class Sleeper(nn.Module):
    """Half of its backward is for the input; the other half is the gradient of a small weight.

    A boundary is what the layer gives; in a large one a large tensor passes by, so that there is
    next to nothing to compute.
    """

    def __init__(self, stages_a_rank: int, *, is_first: bool) -> None:
        super().__init__()
        # The batch needs no gradient, but what passes by shall have one from the first stage on.
        self.start = nn.Parameter(torch.zeros(1)) if is_first else None
        self.forward_ms = FORWARD_MS / stages_a_rank
        self.half_ms = BACKWARD_MS / stages_a_rank / 2
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layer.weight.register_hook(self.sleep)
        self.ended_s = 0.0

    def sleep(self, gradient: Tensor) -> Tensor:
        """The weight's half: at once after the input's in a whole backward, else in W."""
        now_s = time.perf_counter()
        start_s = self.ended_s if now_s - self.ended_s < 1e-3 else now_s
        sleep_until(start_s + self.half_ms / 1e3)
        return gradient

    def forward(self, x: Tensor, *beside: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        end_s = time.perf_counter() + self.forward_ms / 1e3
        x = self.layer(x)
        if not beside:
            return Sleep.apply(x, end_s, self)
        (large,) = beside
        if self.start is not None:
            large = large + self.start
        return x, Sleep.apply(large, end_s, self)
