"""Jobs whose boundaries are crossed in tiles: against the unsplit model, and the untiled run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from torch import Tensor, nn

from jobs.any_schedule import expected
from jobs.devices import LoggedDevice, open_device
from npu_pipe import MeanLoss, Pipeline, Schedule, World, build_schedule
from npu_pipe.comm import links
from npu_pipe.comm.part import part_of
from npu_pipe.device.cpu import Cpu
from npu_pipe.ir.action import Action, Kind, flatten
from npu_pipe_kernels.tiled import tiled

WIDTH = 6
CLOSE = {"rtol": 1e-11, "atol": 1e-14}  # rows of a product may be summed in another order
MSE = nn.functional.mse_loss


def stage(index: int) -> nn.Module:
    """The same on every rank: one linear layer, two with or without one at either end."""
    kind = index % 4
    torch.manual_seed(index)
    make = lambda bias=True: nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64)  # noqa: E731
    if kind == 0:
        return nn.Sequential(make(), nn.Tanh(), make(bias=False))
    if kind == 1:
        return make()
    if kind == 2:
        return nn.Sequential(nn.Sequential(make(), nn.Tanh()), make(), nn.Tanh())
    return nn.Sequential(nn.Tanh(), nn.Sequential(make(bias=False), nn.Tanh(), make()))


def inner_link(name: str, schedule: Schedule) -> Any:
    """By name; "device" is DeviceLink on a device that is made up."""
    if name == "device":
        return open_device(schedule, LoggedDevice())
    if name == "staged":
        return links.staged_link(Cpu(), schedule=schedule)
    return getattr(links, name)


def train_named(
    world: World, *, name: str, microbatches: int, link: str, tiles: int, shape: list[int]
) -> float:
    """shape: of a microbatch, but its width."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    return run(world, schedule, link=link, tiles=tiles, shape=shape)


def train_random(world: World, *, seeds: list[int], link: str, tiles: int) -> list[float]:
    shares = []
    for seed in seeds:
        rng = Random(seed)
        schedule = random_schedule(rng)
        more = {
            "costs": random_costs(rng, schedule),
            "prefetch": prefetch_for(schedule, rng.randint(1, 3)),
        }
        shares.append(run(world, schedule, link=link, tiles=tiles, shape=[5], **more))
    return shares


def run(
    world: World,
    schedule: Schedule,
    *,
    link: str,
    tiles: int | Mapping[int, int],
    shape: list[int],
    **more: Any,
) -> float:
    """Two steps and evaluations between; gives the share of this rank's sends at boundaries that
    began before what they carry was whole."""
    m = schedule.microbatches
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    rows, *others = shape
    full = (m * rows, *others, WIDTH)
    torch.manual_seed(schedule.stages)
    inputs, targets = torch.randn(2, *full, dtype=torch.float64)
    per_microbatch: dict[int, dict[int, list[Tensor]]] = {i: {} for i in range(schedule.stages)}
    total = 0.0
    for i, (x, y) in enumerate(zip(inputs.split(rows), targets.split(rows), strict=True)):
        whole.zero_grad()
        part = MSE(whole(x), y)
        (part / m).backward()
        total += part.item() / m
        for index, module in enumerate(whole):
            per_microbatch[index][i] = [p.grad.clone() for p in module.parameters()]
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}
    stages, tiled_link = tiled(
        mine, schedule=schedule, tiles=tiles, link=inner_link(link, schedule)
    )
    with Pipeline(
        stages,
        schedule=schedule,
        loss=MeanLoss(MSE),
        world=world,
        timeout_s=20,
        link=links.poisoned(tiled_link),
        **more,
    ) as pipe:
        for _ in range(2):
            for module in mine.values():
                module.zero_grad()
            result = pipe.step((inputs, targets))
            assert math.isclose(result.loss, total, rel_tol=1e-12)
            assert math.isclose(pipe.evaluate((inputs, targets)).loss, total, rel_tol=1e-12)
            for index, module in mine.items():
                wanted = expected(schedule, per_microbatch[index], index)
                for ours, theirs in zip(module.parameters(), wanted, strict=True):
                    assert ours.grad is not None
                    assert torch.allclose(ours.grad, theirs, **CLOSE), (schedule, index)
        output = pipe.predict(inputs)
        if output is not None:
            assert torch.allclose(output, whole(inputs), **CLOSE)
        assert all(each.held == 0 for each in pipe._stages.values())
        assert pipe._link.in_use == 0
        pipe.step((inputs, targets))
        timeline = pipe.timeline()
        measured = [s.action for s in timeline.compute if s.rank == world.rank]
        assert measured == [a for step in schedule.orders[world.rank] for a in flatten(step)]
        mine_sent = [s for s in timeline.transfers if s.rank == world.rank]
        assert len({s.action for s in mine_sent}) == len(mine_sent), "one span a transfer"
        return early(pipe, world)


def early(pipe: Pipeline, world: World) -> float:
    """Of the transfers that this rank sent in the last step, those of which a part went before
    the action had ended that made it."""
    events = pipe._recorded.events
    ends = {action: end for action, _, end in events if action.kind.is_compute}
    sent: dict[Action, float] = {}
    for action, start, _ in events:
        if action.kind.is_send and part_of(action) <= 0:
            sent[Action(*action)] = start
    before = 0
    for action, start in sent.items():
        kinds = (Kind.F,) if action.kind is Kind.SEND_F else (Kind.B, Kind.I)
        (end,) = (ends[made] for kind in kinds if (made := action._replace(kind=kind)) in ends)
        before += start < end
    return before / len(sent) if sent else 1.0
