"""Jobs of replicas whose gradients travel over HCCL."""

from __future__ import annotations

import time
from typing import Any

import torch
from jobs.on_device import WIDTH, stage
from torch import nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.device.npu import Npu
from npu_pipe.launch.group import open_replicas
from npu_pipe.launch.mesh import Mesh


def adds(world: World, *, steps: int) -> dict[str, Any]:
    """What this rank raised, and when: one stage, as many replicas as ranks."""
    mesh, device = Mesh(dp=world.size), Npu(world.rank)
    device.select()
    schedule = build_schedule("gpipe", ranks=1, microbatches=2)
    mine = {0: stage(0).to(device.place)}
    batch = (torch.ones(4, WIDTH, device=device.place), torch.zeros(4, WIDTH, device=device.place))
    start_s = time.perf_counter()
    try:
        with (
            open_replicas(mesh, world, mine, device=device) as replicas,
            Pipeline(
                mine,
                schedule=schedule,
                loss=replicas.loss(MeanLoss(nn.functional.mse_loss)),
                world=mesh.pipeline_world(world),
            ) as pipe,
        ):
            for _ in range(steps):
                replicas.add(pipe.step(batch).loss)
    except Exception as error:
        seconds = time.perf_counter() - start_s
        return {"kind": type(error).__name__, "text": str(error), "seconds": seconds}
    return {"kind": None}
