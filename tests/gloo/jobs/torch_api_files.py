"""Jobs of schedules by torch's private names: orders from files, forwards only."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage as TheirStage
from torch.distributed.pipelining import schedules as theirs

from jobs.models import data, gradients, stage
from jobs.torch_api import CPU, connect, require_equal, stages_of
from npu_pipe import World, torch_api
from npu_pipe.torch_api import _ScheduleForwardOnly, schedules

MSE = nn.functional.mse_loss


def made(world: World, placement: list[int], microbatches: int) -> tuple[Any, dict[int, nn.Module]]:
    connect(world)
    mine = {i: stage(i) for i, rank in enumerate(placement) if rank == world.rank}
    stages = [
        torch_api.PipelineStage(module, index, len(placement), CPU)
        for index, module in mine.items()
    ]
    cls = torch_api.get_schedule_class("PipelineScheduleMulti")
    return cls(stages, microbatches, MSE), mine


def runs(
    world: World, *, path: str, placement: list[int], microbatches: int, form: str
) -> list[str]:
    """Two steps and an evaluation in the order of a file; the order as it is written again."""
    schedule, mine = made(world, placement, microbatches)
    schedule._load_csv(path, format=form)
    inputs, targets = data(3 * microbatches)
    args = (inputs,) if 0 in mine else ()
    given = {"target": targets} if len(placement) - 1 in mine else {}
    for _ in range(2):
        for module in mine.values():
            module.zero_grad()
        output = schedule.step(*args, **given)
        again = schedule.eval(*args, **given)
    whole = nn.Sequential(*(stage(i) for i in range(len(placement))))
    expected = whole(inputs)
    torch.autograd.backward(MSE(expected, targets))
    require_equal(gradients(list(mine.values())), gradients([whole[i] for i in mine]))
    if given:
        require_equal(output, expected)
        require_equal(again, expected)
    copy = Path(f"{path}.{world.rank}")
    schedule._dump_csv(copy)
    return copy.read_text().splitlines()


def refused(world: World, *, path: str | None, microbatches: int) -> str:
    schedule, _ = made(world, [0, 1], microbatches)
    if path is not None:
        schedule._load_csv(path)
    return str(schedule.step())


def written_and_read(world: World, *, path: str, cls: str, form: str | None) -> list[str]:
    """A named schedule is written by each rank, under its own file name, and run from there by
    torch and by us. The lines of the file."""
    connect(world)
    mine = {i: stage(i) for i in stages_of(world.rank, cls, ranks=world.size, chunks=2)}
    stages = [torch_api.PipelineStage(m, i, 2 * world.size, CPU) for i, m in mine.items()]
    named = getattr(torch_api, cls)(stages, 4, MSE)
    own = Path(f"{path}_{world.rank}.csv")
    named._dump_csv(own, **({} if form is None else {"format": form}))
    inputs, targets = data(8)
    args = (inputs,) if 0 in mine else ()
    given = {"target": targets} if 2 * world.size - 1 in mine else {}
    results = []
    for package, kind in ((theirs, TheirStage), (schedules, torch_api.PipelineStage)):
        modules = copy.deepcopy(mine)
        there = [kind(m, i, 2 * world.size, CPU) for i, m in modules.items()]
        schedule = package._PipelineScheduleRuntime(there, 4, MSE)
        schedule._load_csv(str(own), format=form or "compute_comms")
        outputs = schedule.step(*args, **given)
        results.append((outputs, gradients(list(modules.values()))))
    require_equal(results[1], results[0])
    return own.read_text().splitlines()


def odd_form(world: World) -> None:
    schedule, _ = made(world, [0, 1], 4)
    schedule._load_csv("nowhere.csv", format="comms_only")


def forward_only(world: World) -> None:
    connect(world)
    module = stage(world.rank)
    made = torch_api.PipelineStage(module, world.rank, world.size, CPU)
    schedule = _ScheduleForwardOnly(made, 4, MSE)
    inputs, _ = data(8)
    output = schedule.step(inputs) if world.rank == 0 else schedule.step()
    assert all(parameter.grad is None for parameter in module.parameters())
    if world.rank == world.size - 1:
        require_equal(output, nn.Sequential(*(stage(i) for i in range(world.size)))(inputs))
