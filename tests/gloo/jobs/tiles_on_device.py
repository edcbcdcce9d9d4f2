"""Jobs whose boundaries are crossed in tiles between devices, against the CPU's unsplit model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from jobs.tiles import WIDTH, early, stage
from jobs.unsplit import LOSS, in_order, two_steps, unsplit
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import poisoned, staged_link
from npu_pipe.device.choose import choose
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
    wanted = unsplit(
        [stage(i).float() for i in range(schedule.stages)],
        (inputs, targets),
        microbatches=microbatches,
    )
    mine = {i: stage(i).float().to(device.place) for i in schedule.stages_of(world.rank)}
    inner = staged_link(device, schedule=schedule) if shared else None
    stages, link = tiled(mine, schedule=schedule, tiles=tiles, link=inner)
    with Pipeline(
        stages,
        schedule=schedule,
        loss=MeanLoss(LOSS),
        world=world,
        timeout_s=30,
        link=poisoned(link),
    ) as pipe:
        batch = (inputs.to(device.place), targets.to(device.place))
        same = partial(torch.allclose, **CLOSE)
        two_steps(pipe, mine, batch, wanted, same=same, rel_tol=1e-5)
        in_order(pipe)
        return {
            "link": type(pipe._link).__name__,
            "inner": type(pipe._link._inner).__name__,
            "early": early(pipe, world),
        }
