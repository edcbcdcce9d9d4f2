"""Jobs in which one rank fails in the middle of a step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch_npu
from torch import Tensor, nn

from ascend_jobs.training import stage
from npu_pipe import MeanLoss, Pipeline, World, build_schedule


class _Faulty(nn.Module):
    """A stage that does something bad in its n-th forward."""

    def __init__(self, inner: nn.Module, kind: str, call: int) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        self.call -= 1
        if self.call == 0:
            if self.kind == "raise":
                raise ValueError("the stage is broken")
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "stuck host":
                time.sleep(1000)
            if self.kind == "stuck device":
                stream = torch.npu.current_stream()
                torch_npu.npu._subscribe_report(stream)
                torch_npu.npu._launch_host_func(stream, time.sleep, 30)
        return self.inner(x)


def fails(world: World, *, name: str, kind: str, at: int, limit_s: float) -> dict[str, Any]:
    """What this rank raised, and after how long."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    place = torch.device("npu", world.rank)
    mine: dict[int, nn.Module] = {i: stage(i) for i in schedule.stages_of(world.rank)}
    if world.rank == at:
        mine = {i: _Faulty(each, kind, 6) for i, each in mine.items()}
    for each in mine.values():
        each.to(place)
    batch = (torch.ones(8, 6, device=place), torch.zeros(8, 6, device=place))
    start_s = time.perf_counter()
    try:
        with Pipeline(
            mine,
            schedule=schedule,
            loss=MeanLoss(nn.functional.mse_loss),
            world=world,
            timeout_s=limit_s,
        ) as pipe:
            pipe.step(batch)
            start_s = time.perf_counter()
            pipe.step(batch)
    except Exception as error:
        seconds = time.perf_counter() - start_s
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "seconds": seconds,
            "left": time.perf_counter() - start_s,
        }
    return {"kind": None}
