"""Jobs that count a device's memory."""

from __future__ import annotations

import gc
from typing import Any

import torch
from jobs.on_device import WIDTH, stage
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.device.npu import Npu


def after_steps(world: World, *, name: str, microbatches: int, steps: int) -> dict[str, Any]:
    """Bytes in tensors: before the pipeline, after its third step, after `steps`, and after it."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    device = Npu(world.rank)
    mine = {i: stage(i).to(device.place) for i in schedule.stages_of(world.rank)}
    rows = 64 * microbatches
    batch = tuple(torch.ones(rows, WIDTH, device=device.place) for _ in range(2))
    found: dict[str, Any] = {"before": _allocated(device)}
    with Pipeline(
        mine, schedule=schedule, loss=MeanLoss(nn.functional.mse_loss), world=world
    ) as pipe:
        for step in range(steps):
            pipe.step(batch)
            for module in mine.values():
                module.zero_grad()
            if step == 2:
                found["third"] = _allocated(device)
                found["reserved, third"] = device.memory().reserved
                found["buffers, third"] = pipe._link.buffers
        found["last"] = _allocated(device)
        found["reserved, last"] = device.memory().reserved
        found["buffers, last"] = pipe._link.buffers
    del pipe
    found["after"] = _allocated(device)
    return found


def _allocated(device: Npu) -> int:
    gc.collect()
    device.synchronize()
    return device.memory().allocated
