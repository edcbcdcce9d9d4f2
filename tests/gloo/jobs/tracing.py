"""Jobs that look at what a step recorded of itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.links import fastest_link, gloo_link
from npu_pipe.errors import ConfigError
from npu_pipe.planner.changes import unfused
from npu_pipe.timeline.files import timeline_to_json
from npu_pipe.timeline.phase import Phase


def recorded(world: World, *, name: str, microbatches: int, over_gloo: bool) -> dict[str, Any]:
    """A step with all that may follow it, as a timeline's JSON; and one after an evaluation."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    mine = {s: stage(s) for s in schedule.stages_of(world.rank)}
    optimizer = torch.optim.Adam([p for m in mine.values() for p in m.parameters()])
    loss = MeanLoss(nn.functional.mse_loss)
    link = gloo_link if over_gloo else fastest_link
    with Pipeline(mine, schedule=schedule, loss=loss, world=world, link=link) as pipe:
        batch = data(2 * microbatches)
        pipe.step(batch)
        pipe.step(batch)
        pipe.clip_gradients(1.0)
        with pipe.phase(Phase.OPTIMIZER):
            optimizer.step()
        timeline = pipe.timeline()
        pipe.evaluate(batch)
        again = pipe.timeline()
    assert again == timeline, "an evaluation leaves it alone"
    return timeline_to_json(timeline)


def linear(seed: int) -> nn.Module:
    return next(stage(seed, width=64).children())


def footprint(world: World, *, name: str, microbatches: int) -> dict[str, Any]:
    """Bytes held, measured and predicted; and that watching changes no gradient."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    batch = data(64 * microbatches, width=64)
    found: dict[str, Any] = {"gradients": []}
    for watched in (False, True):
        mine = {
            # Ends with a layer that does not keep its output, which would be counted twice.
            s: nn.Sequential(*(stage(10 * s + i, width=64) for i in range(8)), linear(s))
            for s in schedule.stages_of(world.rank)
        }
        loss = MeanLoss(nn.functional.mse_loss)
        with Pipeline(mine, schedule=schedule, loss=loss, world=world) as pipe:
            if watched:
                with pipe.watching_memory():
                    pipe.step(batch)
                measured = pipe.footprint()
                found["held"] = measured.held_bytes[world.rank]
                found["highest"] = measured.highest_bytes[world.rank]
                found["predicted"] = measured.predicted_bytes(unfused(schedule))[world.rank]
                found["parameters"] = sum(
                    2 * p.nbytes for m in mine.values() for p in m.parameters()
                )
            else:
                pipe.step(batch)
            found["gradients"].append(
                [float(p.grad.sum()) for m in mine.values() for p in m.parameters()]
            )
            try:
                pipe.footprint()
            except ConfigError as error:
                found["refused"] = str(error)
    return found
