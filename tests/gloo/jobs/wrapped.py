"""Jobs whose stages are wrapped by torch's own data parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

import npu_pipe.torch_api
from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, SumLoss, Tied, World, build_schedule
from npu_pipe.comm.axes import open_axes
from npu_pipe.device.cpu import Cpu
from npu_pipe.launch.group import join, open_replicas
from npu_pipe.launch.mesh import Axis, Mesh

LOSS = MeanLoss(nn.functional.mse_loss)


class Half(nn.Module):
    """A parameter of it is used by the first replica only, and one by none."""

    def __init__(self, inner: nn.Module, *, uses: bool) -> None:
        super().__init__()
        self.inner = inner
        self.uses = uses
        self.sometimes = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.never = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + self.sometimes if self.uses else y


def ddp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(module, process_group=group)


def inside(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    """The wrapper is a part of the stage."""
    return nn.Sequential(ddp(module, group), nn.Identity())


def fsdp(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    fully_shard(module, mesh=DeviceMesh.from_group(group, "cpu"))
    return module


def static(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(module, process_group=group, static_graph=True)


def hooked(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    wrapped = DistributedDataParallel(module, process_group=group)
    wrapped.register_comm_hook(None, lambda state, bucket: None)
    return wrapped


WRAPS: dict[str, Callable[[nn.Module, dist.ProcessGroup], nn.Module]] = {
    "ddp": ddp,
    "inside": inside,
    "fsdp": fsdp,
    "static": static,
    "hooked": hooked,
}


def _connect(world: World) -> tuple[World, dist.ProcessGroup, int]:
    """This rank's pipeline, its replicas and which of them it is."""
    mesh = Mesh(dp=2, pp=world.size // 2)
    join(world)
    groups = open_axes(mesh.axes(world.rank), device=Cpu(), timeout_s=30)
    at = mesh.coordinates(world.rank)
    return mesh.pipeline_world(world), groups[Axis.DP.value], at.dp


def differences(world: World, *, wrap: str, name: str) -> list[float]:
    """Of the second step's gradients from the unsplit model's, relative; and of the losses."""
    here, group, index = _connect(world)
    schedule = build_schedule(name, ranks=here.size, microbatches=4)
    mine = {i: stage(i) for i in schedule.stages_of(here.rank)}
    wrapped = {i: WRAPS[wrap](module, group) for i, module in mine.items()}
    kept = {i: list(module.parameters()) for i, module in mine.items()}  # as an optimizer does
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    inputs, targets = data(16)
    expected = nn.functional.mse_loss(whole(inputs), targets)
    torch.autograd.backward(expected)
    rows = slice(index * 8, index * 8 + 8)
    with Pipeline(wrapped, schedule=schedule, loss=LOSS, world=here) as pipe:
        pipe.step((inputs[rows], targets[rows]))
        pipe.evaluate((inputs[rows], targets[rows]))
        for parameters in kept.values():
            for parameter in parameters:
                parameter.grad = None
        result = pipe.step((inputs[rows], targets[rows]))
    loss = torch.tensor(result.loss, dtype=torch.float64)
    dist.all_reduce(loss, group=group)
    found = [abs(float(loss / 2 - expected.detach()))]
    for i, parameters in kept.items():
        for parameter, one in zip(parameters, whole[i].parameters(), strict=True):
            gradient: Any = parameter.grad
            if wrap == "fsdp":
                gradient = gradient.full_tensor()
            assert one.grad is not None
            found.append(float((gradient - one.grad).abs().max() / one.grad.abs().max()))
    return found


def accumulated(world: World) -> list[float]:
    """Two steps without zeroing between them give twice the gradient of one."""
    here, group, index = _connect(world)
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=4)
    module = stage(here.rank)
    inputs, targets = data(16)
    rows = slice(index * 8, index * 8 + 8)
    with Pipeline(
        {here.rank: ddp(module, group)}, schedule=schedule, loss=LOSS, world=here
    ) as pipe:
        sums = []
        for _ in range(2):
            pipe.step((inputs[rows], targets[rows]))
            sums.append([float(p.grad.sum()) for p in module.parameters() if p.grad is not None])
    return [abs(two - 2 * one) for one, two in zip(*sums, strict=True)]


def unused(world: World) -> list[bool | float]:
    """Whether a parameter that no replica uses has a gradient, and the one of one that one uses."""
    here, group, index = _connect(world)
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=2)
    module = Half(stage(here.rank), uses=index == 0)
    inputs, targets = data(8)
    rows = slice(index * 4, index * 4 + 4)
    with Pipeline(
        {here.rank: ddp(module, group)}, schedule=schedule, loss=LOSS, world=here
    ) as pipe:
        pipe.step((inputs[rows], targets[rows]))
    assert module.sometimes.grad is not None
    return [module.never.grad is None, float(module.sometimes.grad)]


def in_float32(world: World, *, through: str) -> list[list[float] | str]:
    """Gradients of weights in bfloat16 that are collected in float32, one of which only the first
    replica makes; through DistributedDataParallel, our replicas or tied copies."""
    mesh = Mesh(dp=2, pp=world.size // 2) if through != "tied" else Mesh(pp=world.size)
    index = mesh.coordinates(world.rank).dp
    module = Sometimes(uses=index == 0).bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    join(world)
    here = mesh.pipeline_world(world)
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=2)
    stages: dict[int, nn.Module] = {here.rank: module}
    more: dict[str, Any] = {}
    if through == "tied":
        more["tied"] = (
            Tied((0, "always"), (1, "always")),
            Tied((0, "sometimes"), (1, "sometimes")),
        )
        module.uses = here.rank == 0
    if through == "ddp":
        group = open_axes(mesh.axes(world.rank), device=Cpu(), timeout_s=30)[Axis.DP.value]
        stages[here.rank] = ddp(module, group)
    x = torch.ones(4, 3, dtype=torch.bfloat16)
    with ExitStack() as stack:
        loss: Any = SumLoss(lambda y, _: y.float().sum())
        replicas = None
        if through == "replicas":
            replicas = stack.enter_context(open_replicas(mesh, world, stages, device=Cpu()))
            loss = replicas.loss(loss)
        pipe = stack.enter_context(
            Pipeline(stages, schedule=schedule, loss=loss, world=here, **more)
        )
        made = pipe.step((x, x)).loss
        if replicas is not None:
            replicas.add(made)
    return [[str(p.grad.dtype), *p.grad.tolist()] for p in (module.always, module.sometimes)]


class Sometimes(nn.Module):
    """Two parameters in a row, of which one is not always used."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.uses = uses
        self.always = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.always
        return y * self.sometimes if self.uses else y


def kept_elsewhere(world: World) -> None:
    here, group, _ = _connect(world)
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=4)
    module = stage(here.rank)
    module[0].weight.main_grad = torch.zeros(6, 6)
    inputs, targets = data(8)
    wrapped = ddp(module, group)
    with Pipeline({here.rank: wrapped}, schedule=schedule, loss=LOSS, world=here) as pipe:
        pipe.step((inputs, targets))


def refused(world: World, *, wrap: str) -> None:
    here, group, _ = _connect(world)
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=4)
    wrapped = WRAPS[wrap](stage(here.rank), group) if here.rank == 1 else stage(here.rank)
    Pipeline({here.rank: wrapped}, schedule=schedule, loss=LOSS, world=here).close()


def clipped(world: World, *, wrap: str) -> list[float]:
    """The norm that clipping finds, the one after it, and the unsplit model's."""
    here, group, index = _connect(world)
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=4)
    module = WRAPS[wrap](stage(here.rank), group)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    inputs, targets = data(16)
    torch.autograd.backward(nn.functional.mse_loss(whole(inputs), targets))
    norm = float(nn.utils.clip_grad_norm_(whole.parameters(), math.inf))
    rows = slice(index * 8, index * 8 + 8)
    with Pipeline({here.rank: module}, schedule=schedule, loss=LOSS, world=here) as pipe:
        pipe.step((inputs[rows], targets[rows]))
        return [pipe.clip_gradients(norm / 4), pipe.clip_gradients(math.inf) * 4, norm]


def reductions(world: World, *, name: str) -> int:
    """How often a step reduces the gradients of a sharded stage."""
    here, group, _ = _connect(world)
    schedule = build_schedule(name, ranks=here.size, microbatches=4)
    mine = {i: fsdp(stage(i), group) for i in schedule.stages_of(here.rank)}
    calls = []
    for module in mine.values():
        module.set_custom_reduce_scatter(_Counted(calls))
    inputs, targets = data(8)
    with Pipeline(mine, schedule=schedule, loss=LOSS, world=here) as pipe:
        pipe.step((inputs, targets))
    return len(calls) // len(mine)


class _Counted:
    """What fully_shard reduces with by itself, counted."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.of_torch = DefaultReduceScatter()

    def allocate(self, *args: Any, **kw: Any) -> Any:
        return self.of_torch.allocate(*args, **kw)

    def __call__(self, *args: Any, **kw: Any) -> Any:
        self.calls.append(None)
        return self.of_torch(*args, **kw)


def like_torch(world: World, *, wrap: str, microbatches: int) -> list[float]:
    """Differences of gradients from those of torch.distributed.pipelining, each around stages
    wrapped alike."""
    here, group, index = _connect(world)
    pipeline: Any = dist.new_group(here.members, use_local_synchronization=True)
    inputs, targets = data(16)
    rows = slice(index * 8, index * 8 + 8)
    found: list[list[Tensor]] = []
    for api in (npu_pipe.torch_api, torch.distributed.pipelining):
        module = WRAPS[wrap](stage(here.rank), group)
        parameters = list(module.parameters())
        place = torch.device("cpu")
        made = api.PipelineStage(module, here.rank, here.size, place, group=pipeline)
        schedule = api.Schedule1F1B(made, microbatches, nn.functional.mse_loss)
        for _ in range(2):
            for parameter in parameters:
                parameter.grad = None
            if here.rank == 0:
                schedule.step(inputs[rows])
            else:
                schedule.step(target=targets[rows])
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        found.append([each.full_tensor() if wrap == "fsdp" else each for each in gradients])
    ours, theirs = found
    return [float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)]
