"""Jobs under torch's profiler."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.device.cpu import Cpu


class _Stage(nn.Module):
    """fails: in its n-th forward."""

    def __init__(self, fails: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fails -= 1
        if self.fails == 0:
            raise ValueError("the stage is broken")
        return self.linear(x)


def steps(world: World, *, name: str, microbatches: int, fails: int = 0) -> dict[str, Any]:
    """The names in the profile of the second of three steps, and how often ranges were asked for
    in the first and the third."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    asked: list[str] = []

    class Asked(Cpu):
        def range(self, action: Any) -> Any:
            asked.append(str(action))
            return super().range(action)

    stages = {i: _Stage(fails if world.rank == 0 else 0) for i in schedule.stages_of(world.rank)}
    batch = (torch.ones(microbatches, 4), torch.zeros(microbatches, 4))
    error = None
    with Pipeline(
        stages, schedule=schedule, loss=MeanLoss(nn.functional.mse_loss), world=world
    ) as pipe:
        pipe._device = Asked()
        pipe.step(batch)
        before = len(asked)
        with torch.profiler.profile() as profile:
            try:
                pipe.step(batch)
            except Exception as raised:
                error = type(raised).__name__
        if error is None:
            inside = len(asked)
            pipe.step(batch)
            before += len(asked) - inside
    names = [event.name for event in profile.events()]
    return {
        "outside": before,
        "error": error,
        "names": [name for name in names if name.startswith("action ")],
        "wanted": [f"action {each}" for each in schedule.orders[world.rank]],
    }
