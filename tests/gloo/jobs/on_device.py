"""Jobs that train on a device, and compare with the unsplit model on the CPU."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn

from jobs.models import data
from jobs.unsplit import LOSS, in_order, two_steps, unsplit
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import link_for, poisoned, staged_link
from npu_pipe.device.choose import choose
from npu_pipe.runtime.tied import Tied

WIDTH = 6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # one rounding of float32, here and there


def stage(index: int, width: int = WIDTH) -> nn.Module:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(index)
    linear = nn.Linear(width, width)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / width**0.5)
    return nn.Sequential(linear, nn.Tanh())


def equals_cpu(
    world: World, *, kind: str, name: str, microbatches: int, shared: bool = False
) -> dict[str, Any]:
    """Two steps of a schedule on a device, with poisoned buffers, and an evaluation.

    kind: of device. shared: all ranks are on one.
    """
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    device = choose(kind, index=0 if shared else world.rank).device
    device.select()
    place = device.place
    inputs, targets = (part.float() for part in data(2 * microbatches, WIDTH))
    wanted = unsplit(
        [stage(i) for i in range(schedule.stages)], (inputs, targets), microbatches=microbatches
    )
    mine = {i: stage(i).to(place) for i in schedule.stages_of(world.rank)}
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(LOSS),
        world=world,
        timeout_s=30,
        link=poisoned(
            staged_link(device, schedule=schedule)
            if shared
            else link_for(mine.values(), schedule=schedule)
        ),
    ) as pipe:
        batch = (inputs.to(place), targets.to(place))
        same = partial(torch.allclose, **CLOSE)
        two_steps(pipe, mine, batch, wanted, same=same, rel_tol=1e-5)
        in_order(pipe)
        return {
            "loss": wanted.loss,
            "buffers": pipe._link.buffers,
            "link": type(pipe._link).__name__,
        }


def tied_equals_cpu(world: World, *, kind: str, name: str, microbatches: int) -> None:
    """The first and the last stage share a weight, which has two copies on devices."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    device = choose(kind, index=world.rank).device
    device.select()
    place = device.place
    inputs, targets = (part.float() for part in data(2 * microbatches, WIDTH))
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    last = schedule.stages - 1
    mine = {i: stage(i).to(place) for i in schedule.stages_of(world.rank)}
    whole[last][0].weight = whole[0][0].weight
    loss = nn.functional.mse_loss
    loss(whole(inputs), targets).backward()
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(loss),
        world=world,
        tied=[Tied((0, "0.weight"), (last, "0.weight"))],
    ) as pipe:
        pipe.step((inputs.to(place), targets.to(place)))
        norm = pipe.clip_gradients(1e9)
        for index, module in mine.items():
            for ours, theirs in zip(module.parameters(), whole[index].parameters(), strict=True):
                assert torch.allclose(ours.detach().cpu(), theirs.detach())
                assert torch.allclose(ours.grad.cpu(), theirs.grad, **CLOSE), (name, index)
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    assert math.isclose(norm, wanted, rel_tol=1e-5)
