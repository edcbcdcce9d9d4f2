"""Jobs of several pipelines that share the rows of an update."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, gradients, stage
from npu_pipe import (
    MeanLoss,
    Pipeline,
    SumLoss,
    Tied,
    TokenLoss,
    World,
    build_schedule,
)
from npu_pipe.comm.axes import open_axes
from npu_pipe.comm.links import link_for
from npu_pipe.device.cpu import Cpu
from npu_pipe.errors import PeerError
from npu_pipe.launch.group import join, open_replicas
from npu_pipe.launch.mesh import Mesh
from npu_pipe.runtime.loss import Loss

ROWS = 12


def squares(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2 * (target > 0)).sum()


def positive(target: Tensor) -> int:
    return int((target > 0).sum())


LOSSES: dict[str, Callable[[], Loss]] = {
    "mean": lambda: MeanLoss(nn.functional.mse_loss),
    "tokens": lambda: TokenLoss(squares, positive),
    "sum": lambda: SumLoss(squares),
}


def equal_the_unsplit_model(
    world: World, *, dp: int, name: str, loss: str, shares: list[int], windows: int = 1
) -> dict[str, Any]:
    """shares: rows of each replica in each window, of ROWS in all."""
    mesh = Mesh(dp=dp, pp=world.size // dp)
    here, index = mesh.pipeline_world(world), mesh.coordinates(world.rank).dp
    schedule = build_schedule(name, ranks=here.size, microbatches=4 if "dual" in name else 2)
    mine = {i: stage(i) for i in schedule.stages_of(here.rank)}
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    start = sum(shares[:index])
    rows = slice(start, start + shares[index])
    batches = [data(ROWS, seed=k) for k in range(windows)]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    output = whole(inputs)
    if loss == "mean":
        expected = nn.functional.mse_loss(output, targets)
    else:
        expected = squares(output, targets) / (positive(targets) if loss == "tokens" else 1)
    expected.backward()
    with (
        open_replicas(mesh, world, mine, device=Cpu()) as replicas,
        Pipeline(mine, schedule=schedule, loss=replicas.loss(LOSSES[loss]()), world=here) as pipe,
    ):
        result = pipe.step(*((x[rows], y[rows]) for x, y in batches))
        total = replicas.add(result.loss)
        evaluated = replicas.total(pipe.evaluate((inputs[rows], targets[rows])).loss)
        bits = [float(g.sum()) for g in gradients(list(mine.values()))]
        worst = 0.0
        for number, module in mine.items():
            theirs = gradients([whole[number]])
            for ours, wanted in zip(gradients([module]), theirs, strict=True):
                worst = max(worst, float((ours - wanted).abs().max() / wanted.abs().max()))
        norm = pipe.clip_gradients(1e9)
        assert all(each == bits for each in replicas.gather(bits)), "bit-equal replicas"
    expected_norm = nn.utils.clip_grad_norm_(whole.parameters(), 1e9)
    assert math.isclose(norm, float(expected_norm), rel_tol=1e-12)
    assert math.isclose(total, expected.item(), rel_tol=1e-12), (total, expected.item())
    assert windows > 1 or math.isclose(evaluated, total, rel_tol=1e-12)
    assert worst < 1e-12, worst
    return {"loss": total, "bits": bits, "at": [here.rank, index]}


def first_parameters_are_shared(world: World) -> list[float]:
    """Each replica begins with others; all end with those of the first."""
    mesh = Mesh(dp=world.size)
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    nn.init.constant_(module[0].weight, float(world.rank))
    module[1].running_mean += world.rank
    open_replicas(mesh, world, {0: module}, device=Cpu()).close()
    return [float(module[0].weight.detach().sum()), float(module[1].running_mean.sum())]


def frozen_and_unused(world: World) -> dict[str, Any]:
    """One parameter is used by one replica only, one by none, one is frozen."""
    names = ("used", "once", "never", "frozen")
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in names})
    module["frozen"].requires_grad_(False)
    with open_replicas(Mesh(dp=world.size), world, {0: module}, device=Cpu()) as replicas:
        module["used"].grad = torch.full((3,), float(world.rank + 1))
        if world.rank == 0:
            module["once"].grad = torch.full((3,), 5.0)
        replicas.add(0.0)
    found = {name: module[name].grad for name in names}
    return {name: None if grad is None else grad.tolist() for name, grad in found.items()}


def shared_by_two_stages(world: World) -> list[float]:
    """A parameter that two modules of a rank share is added once."""
    one = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    other.weight = one.weight
    one.weight.grad = torch.ones(2, 2)
    with open_replicas(Mesh(dp=world.size), world, {0: one, 1: other}, device=Cpu()) as replicas:
        replicas.add(0.0)
    assert one.weight.grad is not None
    return one.weight.grad.flatten().tolist()


def tied_copies_stay_equal(world: World, *, dp: int) -> list[float]:
    """The first and the last stage hold copies: equal bit by bit after three updates."""
    mesh = Mesh(dp=dp, pp=world.size // dp)
    here, index = mesh.pipeline_world(world), mesh.coordinates(world.rank).dp
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=2)
    mine = {i: stage(i) for i in schedule.stages_of(here.rank)}
    tied = [Tied((0, "0.weight"), (schedule.stages - 1, "0.weight"))]
    optimizer = torch.optim.AdamW([p for m in mine.values() for p in m.parameters()], lr=1e-2)
    with (
        open_replicas(mesh, world, mine, device=Cpu()) as replicas,
        Pipeline(
            mine,
            schedule=schedule,
            loss=replicas.loss(LOSSES["mean"]()),
            world=here,
            tied=tied,
        ) as pipe,
    ):
        for step in range(3):
            inputs, targets = data(4 * dp, seed=step)
            rows = slice(4 * index, 4 * index + 4)
            replicas.add(pipe.step((inputs[rows], targets[rows])).loss)
            optimizer.step()
            optimizer.zero_grad()
    ends = {0, schedule.stages - 1} & set(mine)
    return mine[ends.pop()][0].weight.detach().flatten().tolist() if ends else []


def differing_modules(world: World) -> None:
    """Refused when they are opened."""
    module = nn.Linear(3, 3 + world.rank)
    open_replicas(Mesh(dp=world.size), world, {0: module}, device=Cpu()).close()


class OwnLoss:
    function = staticmethod(nn.functional.mse_loss)

    def scales(self, targets: Any) -> Any:
        raise AssertionError("it is refused before")


def own_loss(world: World) -> None:
    with open_replicas(Mesh(dp=world.size), world, {0: stage(0)}, device=Cpu()) as replicas:
        replicas.loss(OwnLoss())


def nothing_valid(world: World, *, where: list[int]) -> float:
    """The replicas of `where` have no valid token."""
    mesh = Mesh(dp=world.size)
    here = mesh.pipeline_world(world)
    schedule = build_schedule("1f1b", ranks=1, microbatches=2)
    module = stage(0)
    with (
        open_replicas(mesh, world, {0: module}, device=Cpu()) as replicas,
        Pipeline(
            {0: module}, schedule=schedule, loss=replicas.loss(LOSSES["tokens"]()), world=here
        ) as pipe,
    ):
        inputs, targets = data(4, seed=world.rank)
        if world.rank in where:
            targets = -torch.ones_like(targets)
        return replicas.add(pipe.step((inputs, targets)).loss)


def one_is_killed(world: World, *, victim: int, at: str) -> None:
    """Rank `victim` is killed, before its step or before the sum."""
    mesh = Mesh(dp=2, pp=world.size // 2)
    here, index = mesh.pipeline_world(world), mesh.coordinates(world.rank).dp
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=2)
    mine = {i: stage(i) for i in schedule.stages_of(here.rank)}
    with (
        open_replicas(mesh, world, mine, device=Cpu()) as replicas,
        Pipeline(mine, schedule=schedule, loss=replicas.loss(LOSSES["mean"]()), world=here) as pipe,
    ):
        rows = slice(4 * index, 4 * index + 4)
        for step in range(10):
            inputs, targets = data(8, seed=step)
            if step == 3 and world.rank == victim and at == "step":
                os.kill(os.getpid(), signal.SIGKILL)
            loss = pipe.step((inputs[rows], targets[rows])).loss
            if step == 3 and world.rank == victim and at == "sum":
                os.kill(os.getpid(), signal.SIGKILL)
            replicas.add(loss)


class Slow(nn.Module):
    """A stage whose forward takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner = stage(0)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        out: Tensor = self.inner(x)
        return out


def one_is_killed_while_another_replica_computes(world: World, *, victim: int) -> float:
    """Each microbatch of the second replica takes 1.5 s of eight; the seconds until it leaves."""
    mesh = Mesh(dp=2, pp=world.size // 2)
    here, index = mesh.pipeline_world(world), mesh.coordinates(world.rank).dp
    schedule = build_schedule("1f1b", ranks=here.size, microbatches=8)
    mine = {i: Slow(1.5 * index) if i == 0 else stage(i) for i in schedule.stages_of(here.rank)}
    with open_replicas(mesh, world, mine, device=Cpu()) as replicas:
        link = replicas.watched(link_for(mine.values(), schedule=schedule))
        loss = replicas.loss(LOSSES["mean"]())
        with Pipeline(mine, schedule=schedule, loss=loss, world=here, link=link) as pipe:
            begun_s = time.monotonic()
            if world.rank == victim:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                replicas.add(pipe.step(data(8)).loss)
            except PeerError:
                return time.monotonic() - begun_s
    raise AssertionError("it went on without a rank")


def axes(world: World, *, dp: int, tp: int) -> dict[str, float]:
    """The sum of ranks over this rank's group along each axis."""
    import torch.distributed as dist

    mesh = Mesh(dp=dp, pp=world.size // dp // tp, tp=tp)
    join(world)
    groups = open_axes(mesh.axes(world.rank), device=Cpu(), timeout_s=30)
    found = {}
    for axis, group in groups.items():
        total = torch.tensor([float(world.rank)])
        dist.all_reduce(total, group=group)
        found[axis] = float(total)
    return found
