"""Jobs in which something is wrong on one rank. What each rank raises is the answer."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, SumLoss, TokenLoss, World, build_schedule

LOSS = MeanLoss(nn.functional.mse_loss)


class Faulty(nn.Module):
    """Raises in its n-th forward."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = stage(0)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls == 0:
            raise ValueError("the third forward is broken")
        return self.inner(x)


def ranks_differ(world: World, *, fact: str, odd: int) -> str:
    """Rank `odd` was built with another schedule, m, placement or loss."""
    is_odd = world.rank == odd
    name = "gpipe" if fact == "schedule" and is_odd else "1f1b"
    microbatches = 6 if fact == "number of microbatches" and is_odd else 4
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    loss: Any = SumLoss(LOSS.function) if fact == "loss" and is_odd else LOSS
    prefetch = 3 if fact == "prefetch" and is_odd else 2
    index = world.rank
    with Pipeline(
        {index: stage(index)}, schedule=schedule, loss=loss, world=world, prefetch=prefetch
    ):
        return "connected"


def wrong_stages(world: World) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    index = 0 if world.rank == 1 else world.rank
    with Pipeline({index: stage(index)}, schedule=schedule, loss=LOSS, world=world):
        return "connected"


def bad_batch(world: World, *, kind: str) -> list[str]:
    """A batch that is wrong on one rank only; then a good one, with the same pipeline."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    inputs, targets = data(8)
    batches: dict[str, Any] = {
        "rows that do not divide": (inputs[:7], targets),
        "targets that do not divide": (inputs, targets[:6]),
        "no tensor": (None, targets),
        "tensors of different rows": ((inputs, inputs[:4]), targets),
        "not a pair": inputs,
        "an opaque object": ((inputs, object()), targets),
        "zero rows": (inputs[:0], targets),
    }
    said = []
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world) as p:
        for batch in (batches[kind], (inputs, targets)):
            try:
                said.append(f"loss {p.step(batch).loss:.6f}")
            except NpuPipeError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def no_valid_token(world: World) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    loss = TokenLoss(lambda output, target: output.sum(), lambda target: 0)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world) as p:
        return str(p.step(data(8)))


def calls_differ(world: World, *, odd: int) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world) as p:
        return str(p.evaluate(data(8)) if world.rank == odd else p.step(data(8)))


def stage_raises(world: World, *, rank: int, calls: int) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    module = Faulty(calls) if world.rank == rank else stage(world.rank)
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        return str(pipe.step(data(16)))


def loss_is_no_scalar(world: World) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    loss = MeanLoss(lambda output, target: output - target)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world) as p:
        return str(p.step(data(8)))


def works_after_a_failure(world: World) -> float:
    """A failed pipeline is closed; a new one works in the same processes."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    faulty = Faulty(3) if world.rank == world.size - 1 else stage(world.rank)
    try:
        with Pipeline({world.rank: faulty}, schedule=schedule, loss=LOSS, world=world) as pipe:
            pipe.step(data(16))
    except (NpuPipeError, ValueError):
        with Pipeline(
            {world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world
        ) as pipe:
            return pipe.step(data(16)).loss
    raise AssertionError("the first pipeline did not fail")


def killed(world: World, *, rank: int) -> str:
    """One rank is killed in the middle of a step."""

    class Killed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return x

    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    module = Killed() if world.rank == rank else stage(world.rank)
    start = time.monotonic()
    try:
        with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
            pipe.step(data(16))
    except NpuPipeError as error:
        assert time.monotonic() - start < 10
        return type(error).__name__
    raise AssertionError("nobody noticed")


def never_comes(world: World, *, rank: int) -> str:
    """One rank does not call step; the others wait for the time-out that they were given."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    with Pipeline(
        {world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world, timeout_s=2
    ) as pipe:
        if world.rank == rank:
            time.sleep(4)
            return "was away"
        return str(pipe.step(data(16)))


def threads(world: World) -> int:
    del world
    return torch.get_num_threads()
