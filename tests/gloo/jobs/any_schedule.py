"""Training by random valid schedules: any placement, split backwards, fused pairs, replicas."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch
from core_helpers.random_cases import prefetch_for, random_costs, random_schedule
from torch import Tensor, nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, Schedule, World, build_schedule
from npu_pipe.comm import links
from npu_pipe.ir.action import Kind, flatten


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


def expected(
    schedule: Schedule, per_microbatch: dict[int, list[Tensor]], index: int
) -> list[Tensor]:
    """The sum of a stage's gradients in the order in which its ranks accumulate them."""
    sums: dict[int, list[Tensor]] = {}
    for rank, order in enumerate(schedule.orders):
        for step in order:
            for action in flatten(step):
                if action.stage != index or action.kind not in (Kind.B, Kind.W):
                    continue
                gradients = per_microbatch[action.microbatch]
                if rank in sums:
                    sums[rank] = [a + b for a, b in zip(sums[rank], gradients, strict=True)]
                else:
                    sums[rank] = gradients
    replicas = [sums[rank] for rank in sorted(sums)]
    return [sum(parts[1:], start=parts[0]) for parts in zip(*replicas, strict=True)]


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
    m, loss = schedule.microbatches, nn.functional.mse_loss
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}
    inputs, targets = data(2 * m, seed=schedule.stages)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    per_microbatch: dict[int, dict[int, list[Tensor]]] = {i: {} for i in range(schedule.stages)}
    total = 0.0
    for i, (x, y) in enumerate(zip(inputs.split(2), targets.split(2), strict=True)):
        whole.zero_grad()
        part = loss(whole(x), y)
        (part / m).backward()
        total += part.item() / m
        for index, module in enumerate(whole):
            per_microbatch[index][i] = [p.grad.clone() for p in module.parameters()]
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(loss),
        world=world,
        costs=costs,
        prefetch=prefetch,
        timeout_s=20,
        link=links.poisoned(getattr(links, link) if isinstance(link, str) else link),
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
                    assert torch.equal(ours.grad, theirs), (schedule, index)
        norm = pipe.clip_gradients(1e9)
        whole.zero_grad()
        loss(whole(inputs), targets).backward()
        assert math.isclose(norm, nn.utils.clip_grad_norm_(whole.parameters(), 1e9), rel_tol=1e-9)
        assert all(each.held == 0 for each in pipe._stages.values())
        timeline = pipe.timeline()
        measured = {
            r: [s.action for s in timeline.compute if s.rank == r] for r in range(world.size)
        }
        for rank, order in enumerate(schedule.orders):
            assert measured[rank] == [a for step in order for a in flatten(step)], "law 10"
