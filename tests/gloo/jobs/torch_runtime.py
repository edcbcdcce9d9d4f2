"""Files of ours in the runtime of torch.distributed.pipelining."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from jobs.models import data, gradients, stage
from npu_pipe import World, load_program, load_schedule
from npu_pipe.launch.store import open_store


def trains_as_unsplit(world: World, *, path: str, transfers: bool) -> float:
    """Two steps as the file says; each time the loss and gradients are those of the whole model.

    The loss of the last step, on the rank of the last stage; 0 elsewhere.
    """
    store = open_store(world, timeout_s=30)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    schedule = load_program(path).schedule if transfers else load_schedule(path)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}
    cpu = torch.device("cpu")
    runtime = _PipelineScheduleRuntime(
        [PipelineStage(module, i, schedule.stages, cpu) for i, module in mine.items()],
        schedule.microbatches,
        loss_fn=nn.functional.mse_loss,
    )
    runtime._load_csv(path, format="compute_comms" if transfers else "compute_only")
    result = 0.0
    for step in range(2):
        inputs, targets = data(3 * schedule.microbatches, seed=step)
        for module in (whole, *mine.values()):
            module.zero_grad()
        losses: list[torch.Tensor] = []
        runtime.step(
            *([inputs] if 0 in mine else []),
            target=targets if schedule.stages - 1 in mine else None,
            losses=losses,
        )
        loss = nn.functional.mse_loss(whole(inputs), targets)
        loss.backward()
        for index, module in mine.items():
            for theirs, unsplit in zip(gradients([module]), gradients([whole[index]]), strict=True):
                assert torch.allclose(theirs, unsplit, rtol=1e-10, atol=1e-15), index
        if losses:
            result = sum(each.item() for each in losses) / schedule.microbatches
            assert math.isclose(result, loss.item(), rel_tol=1e-12)
    return result
