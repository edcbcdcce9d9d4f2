"""Jobs that train on device npu, and compare with the unsplit model on the CPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from jobs.any_schedule import expected
from jobs.models import data
from torch import Tensor, nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import link_for, poisoned
from npu_pipe.ir.action import flatten

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


def equals_cpu(world: World, *, name: str, microbatches: int) -> dict[str, Any]:
    """Two steps of a schedule on the device, with poisoned buffers, and an evaluation."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    place = torch.device("npu", world.rank)
    inputs, targets = (part.float() for part in data(2 * microbatches, WIDTH))
    wanted, total = reference(schedule.stages, inputs, targets, microbatches)
    mine = {i: stage(i).to(place) for i in schedule.stages_of(world.rank)}
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        timeout_s=30,
        link=poisoned(link_for(mine.values(), schedule=schedule)),
    ) as pipe:
        batch = (inputs.to(place), targets.to(place))
        for _ in range(2):
            for module in mine.values():
                module.zero_grad()
            result = pipe.step(batch)
            assert math.isclose(result.loss, total, rel_tol=1e-5), (result.loss, total)
            for index, module in mine.items():
                sums = expected(schedule, wanted[index], index)
                for ours, theirs in zip(module.parameters(), sums, strict=True):
                    assert ours.grad is not None
                    assert ours.grad.device == place
                    assert torch.allclose(ours.grad.cpu(), theirs, **CLOSE), (name, index)
            assert math.isclose(pipe.evaluate(batch).loss, total, rel_tol=1e-5)
        assert pipe._link.in_use == 0
        timeline = pipe.timeline()
        measured = [s.action for s in timeline.compute if s.rank == world.rank]
        assert measured == [a for step in schedule.orders[world.rank] for a in flatten(step)]
        return {
            "loss": result.loss,
            "buffers": pipe._link.buffers,
            "link": type(pipe._link).__name__,
        }


def reference(
    stages: int, inputs: Tensor, targets: Tensor, microbatches: int
) -> tuple[dict[int, dict[int, list[Tensor]]], float]:
    """Gradients by stage and microbatch, and the loss, of the unsplit model on the CPU."""
    whole = nn.Sequential(*(stage(i) for i in range(stages)))
    found: dict[int, dict[int, list[Tensor]]] = {i: {} for i in range(stages)}
    total = 0.0
    parts = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
    for i, (x, y) in enumerate(parts):
        whole.zero_grad()
        part = nn.functional.mse_loss(whole(x), y)
        (part / microbatches).backward()
        total += part.item() / microbatches
        for index, module in enumerate(whole):
            found[index][i] = [p.grad.clone() for p in module.parameters()]
    return found, total
