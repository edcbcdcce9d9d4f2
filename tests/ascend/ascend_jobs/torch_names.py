"""A script for torch.distributed.pipelining, with npu_pipe.torch_api in its place, on NPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jobs.models import data
from jobs.on_device import CLOSE, WIDTH, stage
from jobs.unsplit import unsplit
from torch import nn

from npu_pipe import World
from npu_pipe.launch.store import open_store
from npu_pipe.torch_api import PipelineStage, Schedule1F1B


def trains(world: World, *, microbatches: int) -> str:
    """Gradients are those of the CPU. What is said of a module that lies elsewhere."""
    store = open_store(world, timeout_s=30)
    dist.init_process_group("hccl", store=store, rank=world.rank, world_size=world.size)
    place = torch.device("npu", world.rank)
    inputs, targets = (part.float() for part in data(2 * microbatches, WIDTH))
    module = stage(world.rank).to(place)
    made = PipelineStage(module, world.rank, world.size, place)
    assert made.device == place
    schedule = Schedule1F1B(made, microbatches, nn.functional.mse_loss)
    is_first, is_last = world.rank == 0, world.rank == world.size - 1
    arguments = (inputs.to(place),) if is_first else ()
    output = schedule.step(*arguments, target=targets.to(place) if is_last else None)
    assert (output is not None) == is_last
    stages = [stage(index) for index in range(world.size)]
    wanted = unsplit(stages, (inputs, targets), microbatches=microbatches).gradients[world.rank]
    sums = [sum(each) for each in zip(*wanted.values(), strict=True)]
    for parameter, expected in zip(module.parameters(), sums, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad.cpu(), expected, **CLOSE)
    schedule.close()
    try:
        PipelineStage(stage(0), world.rank, world.size, place)
    except ValueError as error:
        return str(error)
    return ""
