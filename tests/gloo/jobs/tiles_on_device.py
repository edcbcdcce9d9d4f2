"""Jobs whose boundaries are crossed in tiles between devices, against the CPU's unsplit model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from jobs.any_schedule import expected
from jobs.tiles import MSE, WIDTH, early, stage
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import poisoned, staged_link
from npu_pipe.device.choose import choose
from npu_pipe.ir.action import flatten
from npu_pipe_kernels.tiled import tiled

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
ROWS = 5


def equals_cpu(
    world: World, *, kind: str, name: str, microbatches: int, tiles: int, shared: bool = False
) -> dict[str, Any]:
    """Two steps of a schedule, with poisoned buffers, and an evaluation of each.

    shared: all ranks are on one device.
    """
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    device = choose(kind, index=0 if shared else world.rank).device
    device.select()
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, ROWS * microbatches, WIDTH)
    whole = nn.Sequential(*(stage(i).float() for i in range(schedule.stages)))
    wanted: dict[int, dict[int, list[Tensor]]] = {i: {} for i in range(schedule.stages)}
    total = 0.0
    for i, (x, y) in enumerate(zip(inputs.split(ROWS), targets.split(ROWS), strict=True)):
        whole.zero_grad()
        part = MSE(whole(x), y)
        (part / microbatches).backward()
        total += part.item() / microbatches
        for index, module in enumerate(whole):
            wanted[index][i] = [p.grad.clone() for p in module.parameters()]
    mine = {i: stage(i).float().to(device.place) for i in schedule.stages_of(world.rank)}
    inner = staged_link(device, schedule=schedule) if shared else None
    stages, link = tiled(mine, schedule=schedule, tiles=tiles, link=inner)
    with Pipeline(
        stages,
        schedule=schedule,
        loss=MeanLoss(MSE),
        world=world,
        timeout_s=30,
        link=poisoned(link),
    ) as pipe:
        batch = (inputs.to(device.place), targets.to(device.place))
        for _ in range(2):
            for module in mine.values():
                module.zero_grad()
            result = pipe.step(batch)
            assert math.isclose(result.loss, total, rel_tol=1e-5), (result.loss, total)
            for index, module in mine.items():
                sums = expected(schedule, wanted[index], index)
                for ours, theirs in zip(module.parameters(), sums, strict=True):
                    assert ours.grad is not None
                    assert torch.allclose(ours.grad.cpu(), theirs, **CLOSE), (name, index)
            assert math.isclose(pipe.evaluate(batch).loss, total, rel_tol=1e-5)
        assert pipe._link.in_use == 0
        timeline = pipe.timeline()
        measured = [s.action for s in timeline.compute if s.rank == world.rank]
        assert measured == [a for step in schedule.orders[world.rank] for a in flatten(step)]
        sent = [s.action for s in timeline.transfers if s.rank == world.rank]
        assert len(set(sent)) == len(sent)
        return {
            "link": type(pipe._link).__name__,
            "inner": type(pipe._link._inner).__name__,
            "early": early(pipe, world),
        }
