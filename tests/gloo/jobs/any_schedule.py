"""Training by random valid schedules: any placement, split backwards, fused pairs, replicas."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from torch import nn

from jobs.models import data, stage
from jobs.unsplit import LOSS, in_order, two_steps, unsplit
from npu_pipe import MeanLoss, Pipeline, Schedule, World, build_schedule
from npu_pipe.comm import links


def seeds_for(ranks: int, count: int) -> list[int]:
    """The first seeds whose schedule trains on this number of ranks."""
    found: list[int] = []
    seed = 0
    while len(found) < count:
        schedule = random_schedule(Random(seed))
        if schedule.ranks == ranks and schedule.training:
            found.append(seed)
        seed += 1
    return found


def train(world: World, *, seeds: list[int], link: str) -> list[str]:
    """Each schedule for two steps; gradients bit for bit those of the unsplit model."""
    names = []
    for seed in seeds:
        rng = Random(seed)
        schedule = random_schedule(rng)
        costs, prefetch = random_costs(rng, schedule), prefetch_for(schedule, rng.randint(1, 3))
        run(world, schedule, costs, prefetch, link)
        names.append(str(schedule.orders[0][0]))
    return names


def train_named(world: World, *, name: str, sizes: list[int], link: str) -> None:
    """A schedule of the library, for each of these numbers of microbatches."""
    for microbatches in sizes:
        schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
        run(world, schedule, None, 2, link)


def run(
    world: World, schedule: Schedule, costs: Any, prefetch: int, link: str | links.OpenLink
) -> None:
    batch = data(2 * schedule.microbatches, seed=schedule.stages)
    wanted = unsplit(
        [stage(i) for i in range(schedule.stages)], batch, microbatches=schedule.microbatches
    )
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(LOSS),
        world=world,
        costs=costs,
        prefetch=prefetch,
        timeout_s=20,
        link=links.poisoned(getattr(links, link) if isinstance(link, str) else link),
    ) as pipe:
        two_steps(pipe, mine, batch, wanted, same=torch.equal)
        norm = pipe.clip_gradients(1e9)
        inputs, targets = batch
        wanted.model.zero_grad()
        LOSS(wanted.model(inputs), targets).backward()
        theirs = nn.utils.clip_grad_norm_(wanted.model.parameters(), 1e9)
        assert math.isclose(norm, theirs, rel_tol=1e-9)
        in_order(pipe)
