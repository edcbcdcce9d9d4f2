"""Jobs about the memory that values arrive in: it is used again for later ones."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm import links

MSE = nn.functional.mse_loss

PASSES_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "a view": lambda x: x.view(-1, 6),
    "dropout in evaluation": lambda x: nn.functional.dropout(x, 0.5, training=False),
    "in place": lambda x: x.mul_(2),
}


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.inner = inner or nn.Identity()

    def forward(self, *values: Tensor) -> Any:
        return self.function(self.inner(values[0]), *values[1:])


def _pipeline(world: World, modules: list[nn.Module], microbatches: int, link: str) -> Pipeline:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    mine = {world.rank: modules[world.rank]}
    return Pipeline(
        mine, schedule=schedule, loss=MeanLoss(MSE), world=world, link=getattr(links, link)
    )


def outputs_are_kept(world: World, *, case: str, link: str) -> list[float]:
    """The last stage gives what it was given. Differences of all outputs, where they are."""
    last = PASSES_ON[case]
    inputs, targets = data(32)
    expected = last(stage(0)(inputs).detach())
    with _pipeline(world, [stage(0), Applied(last)], 8, link) as pipe:
        found = [
            *(pipe.step((inputs, targets), outputs=True).outputs for _ in range(2)),
            pipe.evaluate((inputs, None), outputs=True).outputs,
            (pipe.predict(inputs),),
        ]
    if world.rank == 0:
        return []
    return [(torch.cat(each) - expected).abs().max().item() for each in found]


def evaluated_in_inference_mode(world: World, *, link: str) -> list[float]:
    """Inference tensors are of no use to autograd: none may be left among the buffers."""
    first = Applied(lambda y, *_: (y.detach(), y.abs().detach()), stage(0))
    last = Applied(lambda y, x: y * x, stage(1))
    batch = data(16)
    losses = []
    with _pipeline(world, [first, last], 4, link) as pipe:
        for _ in range(3):
            with torch.inference_mode():
                losses.append(pipe.evaluate(batch).loss)
            losses.append(pipe.step(batch).loss)
    return losses


def open_files(world: World) -> list[int]:
    """After the first step, and after steps of many sizes."""
    counts = []
    with _pipeline(world, [stage(0), stage(1)], 8, "fastest_link") as pipe:
        for exponent in range(12):
            pipe.step(data(8 * 2**exponent))
            counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def many_open_files(world: World) -> float:
    """More than select knows, and more messages than a socket holds."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        schedule = build_schedule("gpipe", ranks=world.size, microbatches=1500)
        mine = {world.rank: stage(world.rank)}
        with Pipeline(mine, schedule=schedule, loss=MeanLoss(MSE), world=world) as pipe:
            return pipe.step(data(1500)).loss
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
