"""Jobs in which a script for torch does something wrong on one rank, or on all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TheirStage

from jobs.models import data, gradients, stage
from jobs.torch_api import CPU, connect, require_equal
from jobs.torch_api_cases import MSE, call, give, make, require_unsplit, whole_of
from npu_pipe import World
from npu_pipe.errors import NpuPipeError
from npu_pipe.torch_api import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)


def refusal(act: Callable[[], Any]) -> str:
    """The error of a refused act, caught as what torch raises."""
    try:
        act()
    except (ValueError, RuntimeError) as error:
        return (
            f"{type(error).__name__}: {error}" if isinstance(error, NpuPipeError) else repr(error)
        )
    return "not refused"


def bad_call(world: World, *, kind: str) -> str:
    """A call that is refused; the next one runs as if it had not been."""
    schedule, module = make(world)
    inputs, targets = data(8)
    good = give(world, inputs, targets)
    verb = schedule.eval if "eval" in kind else schedule.step
    bad: dict[str, dict[str, Any]] = {
        "no target": give(world, inputs, None),
        "no inputs": {name: value for name, value in good.items() if name != "arg"},
        "losses are a tuple": {**good, "losses": ()},
        "fewer rows than microbatches": give(world, inputs[:3], targets),
        "fewer targets than microbatches": give(world, inputs, targets[:3]),
        "a scalar": give(world, torch.tensor(1.0), targets),
        "too few arg_mbs": {**good, "arg_mbs": [(inputs,)]},
        "whole and cut": {**good, "kwarg_mbs": [{}] * 4, "x": 1},
        "gradients are disabled": good,
        "eval: losses without target": {**give(world, inputs, None), "losses": []},
    }
    with torch.no_grad() if "disabled" in kind else nullcontext():
        text = refusal(lambda: call(verb, bad[kind]))
    call(schedule.step, good)
    whole = whole_of(world.size)
    MSE(whole(inputs), targets).backward()
    require_unsplit(world, module, whole)
    return text


class Breaks(nn.Module):
    """Breaks in its third forward."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)
        self.forwards = 0

    def forward(self, x: Tensor) -> Any:
        self.forwards += 1
        if self.forwards == 3:
            raise KeyError("the third forward is broken")
        return self.inner(x)


def stage_raises(world: World, *, rank: int) -> str:
    """The step of a model with a broken stage; after it the schedule runs the batch again."""
    schedule, module = make(world, Breaks(rank) if world.rank == rank else None)
    inputs, targets = data(8)
    text = "nothing was raised"
    try:
        call(schedule.step, give(world, inputs, targets))
    except (KeyError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    module.zero_grad()
    call(schedule.step, give(world, inputs, targets))
    whole = whole_of(world.size)
    MSE(whole(inputs), targets).backward()
    require_unsplit(world, module, whole)
    return text


def wrong_placement(world: World, *, kind: str) -> str:
    connect(world)
    made: Any
    if kind == "reversed":
        index = world.size - 1 - world.rank
        made = Schedule1F1B(PipelineStage(stage(index), index, world.size, CPU), 4, MSE)
    else:
        indices = [world.rank, world.rank + world.size]
        stages = [PipelineStage(stage(i), i, 2 * world.size, CPU) for i in indices]
        made = ScheduleZBVZeroBubble(stages, 4, MSE)
    inputs, targets = data(8)
    return refusal(lambda: call(made.step, give(world, inputs, targets)))


def ranks_differ(world: World, *, what: str) -> str:
    options: dict[str, Any] = {"scale_grads": False} if what == "loss" else {"microbatches": 6}
    schedule, _ = make(world, **(options if world.rank == 1 else {}))
    inputs, targets = data(12)
    return refusal(lambda: call(schedule.step, give(world, inputs, targets)))


def odd_loss(world: World) -> str:
    """A loss function that returns a tuple."""
    schedule, _ = make(world, loss_fn=lambda output, target: (MSE(output, target), 1.0))
    inputs, targets = data(8)
    return refusal(lambda: call(schedule.step, give(world, inputs, targets)))


def construction(world: World) -> dict[str, str]:
    """What is refused before anything is sent."""
    early = refusal(lambda: PipelineStage(stage(0), 0, 2, CPU))
    connect(world)
    alone: list[Any] = [dist.new_group([rank]) for rank in range(world.size)]
    everybody = dist.new_group(list(range(world.size)))
    one = PipelineStage(stage(world.rank), world.rank, world.size, CPU)
    pair = [PipelineStage(stage(i), i, 4, CPU) for i in (world.rank, world.rank + 2)]
    three = [PipelineStage(stage(i), i, 6, CPU) for i in (0, 1, 2)]
    other: Any = TheirStage(stage(0), 0, 2, CPU)
    acts: dict[str, Callable[[], Any]] = {
        "the stage's index": lambda: PipelineStage(stage(0), 2, 2, CPU),
        "not a module": lambda: PipelineStage(torch.tanh, 0, 2, CPU),  # type: ignore[arg-type]
        "a device": lambda: PipelineStage(stage(0), 0, 2, "meta"),
        "dw_builder": lambda: PipelineStage(stage(0), 0, 2, CPU, dw_builder=lambda: print),
        "others' group": lambda: PipelineStage(stage(0), 0, 2, CPU, group=alone[1 - world.rank]),
        "all of the ranks": lambda: PipelineStage(stage(0), 0, 2, CPU, group=everybody),
        "data parallelism": lambda: PipelineStage(
            nn.parallel.DistributedDataParallel(
                stage(0), process_group=alone[world.rank], static_graph=True
            ),
            0,
            2,
            CPU,
        ),
        "number of stages": lambda: Schedule1F1B(pair[0], 4, MSE),
        "a list for one": lambda: Schedule1F1B([one], 4, MSE),  # type: ignore[arg-type]
        "one for a list": lambda: ScheduleInterleaved1F1B(one, 4, MSE),  # type: ignore[arg-type]
        "torch's stage": lambda: Schedule1F1B(other, 4, MSE),
        "three in a V": lambda: ScheduleZBVZeroBubble(three, 4, MSE),
        "few microbatches": lambda: ScheduleDualPipeV(pair, 2, MSE),
        "no microbatches": lambda: ScheduleGPipe(one, 0, MSE),
        "twins": lambda: ScheduleInterleaved1F1B([pair[0], pair[0]], 4, MSE),
        "no stages": lambda: ScheduleInterleaved1F1B([], 4, MSE),
    }
    return {"too early": early, **{what: refusal(act) for what, act in acts.items()}}


def stalls(world: World) -> str:
    """Rank 1 does not come to the second step."""
    schedule, _ = make(world, timeout_s=5)
    inputs, targets = data(8)
    call(schedule.step, give(world, inputs, targets))
    if world.rank == 1:
        time.sleep(9)
    return refusal(lambda: call(schedule.step, give(world, inputs, targets)))


def one_of_two_pipelines_fails(world: World) -> str:
    """Ranks 0 and 1 are a pipeline, 2 and 3 another. A stage of the first fails once."""
    connect(world)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    place = world.rank % 2
    module = Breaks(1) if world.rank == 1 else stage(place)
    made = PipelineStage(module, place, 2, CPU, group=groups[world.rank // 2])
    schedule = Schedule1F1B(made, 4, MSE)
    inputs, targets = data(8)
    given = {"target": targets} if place else {"arg": inputs}
    text = "nothing was raised"
    try:
        call(schedule.step, given)
    except (KeyError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    module.zero_grad()
    call(schedule.step, given)
    whole = whole_of(2)
    MSE(whole(inputs), targets).backward()
    require_equal(gradients([module]), gradients([whole[place]]))
    return text


def made_in_any_order(world: World) -> None:
    """Schedules made at another time on each rank, with collective calls in between."""
    connect(world)
    module = stage(world.rank)
    made = PipelineStage(module, world.rank, world.size, CPU)
    schedules: dict[type, Any] = {}
    kinds = [Schedule1F1B, ScheduleGPipe]
    for kind in kinds if world.rank else reversed(kinds):
        if world.rank:
            dist.barrier()
        schedules[kind] = kind(made, 4, MSE)
        if not world.rank:
            dist.barrier()
    inputs, targets = data(8)
    for kind in kinds:
        call(schedules[kind].step, give(world, inputs, targets))
        dist.barrier()
    schedules[Schedule1F1B].close()
    call(schedules[Schedule1F1B].step, give(world, inputs, targets))
    whole = whole_of(world.size)
    (3 * MSE(whole(inputs), targets)).backward()
    require_unsplit(world, module, whole)
