"""Jobs whose boundaries are crossed in tiles: against the unsplit model, and the untiled run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import torch
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from torch import Tensor, nn

from jobs.devices import LoggedDevice, open_device
from jobs.unsplit import LOSS, in_order, two_steps, unsplit
from npu_pipe import MeanLoss, Pipeline, Schedule, World, build_schedule
from npu_pipe.comm import links
from npu_pipe.comm.part import part_of
from npu_pipe.device.cpu import Cpu
from npu_pipe.ir.action import Action, Kind
from npu_pipe_kernels.tile_choice import Measured
from npu_pipe_kernels.tiled import tiled

WIDTH = 6
CLOSE = {"rtol": 1e-11, "atol": 1e-14}  # rows of a product may be summed in another order


class Sum(nn.Module):
    """x + up(tanh(down(x))), as a transformer's block ends."""

    def __init__(self, down: nn.Linear, up: nn.Linear) -> None:
        super().__init__()
        self.down = down
        self.up = up

    def forward(self, x: Tensor) -> Tensor:
        residual, rows = self.before_last(x)
        made: Tensor = residual + self.up(rows)
        return made

    def last_linear(self) -> nn.Linear:
        return self.up

    def before_last(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.down(x).tanh()


def stage(index: int) -> nn.Module:
    """The same on every rank: with a linear layer at both ends, at one, or as all of it."""
    kind = index % 4
    torch.manual_seed(index)
    make = lambda bias=True: nn.Linear(WIDTH, WIDTH, bias=bias, dtype=torch.float64)  # noqa: E731
    if kind == 0:
        return nn.Sequential(make(), nn.Tanh(), Sum(make(), make(bias=False)))
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
    """shape: of a microbatch, but its width. tiles: 0 for as many as are measured to be best."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    found = tiles or Measured(rows=math.prod(shape), most=4)
    return run(world, schedule, link=link, tiles=found, shape=shape)


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
    tiles: int | Mapping[int, int] | Measured,
    shape: list[int],
    **more: Any,
) -> float:
    """Two steps and evaluations between; gives the share of this rank's sends at boundaries that
    began before what they carry was whole."""
    torch.manual_seed(schedule.stages)
    full = (schedule.microbatches * shape[0], *shape[1:], WIDTH)
    inputs, targets = torch.randn(2, *full, dtype=torch.float64)
    batch = inputs, targets
    wanted = unsplit(
        [stage(i) for i in range(schedule.stages)], batch, microbatches=schedule.microbatches
    )
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}
    stages, tiled_link = tiled(
        mine, schedule=schedule, tiles=tiles, link=inner_link(link, schedule)
    )
    with Pipeline(
        stages,
        schedule=schedule,
        loss=MeanLoss(LOSS),
        world=world,
        timeout_s=20,
        link=links.poisoned(tiled_link),
        **more,
    ) as pipe:
        two_steps(pipe, mine, batch, wanted, same=partial(torch.allclose, **CLOSE))
        output = pipe.predict(inputs)
        if output is not None:
            assert torch.allclose(output, wanted.model(inputs), **CLOSE)
        pipe.step(batch)
        in_order(pipe)
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
