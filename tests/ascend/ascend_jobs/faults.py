"""Jobs in which one rank fails in the middle of a step."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn
from unittest.mock import patch

import torch
import torch_npu
from jobs.on_device import stage
from torch import Tensor, nn

from npu_pipe import ConfigError, MeanLoss, PeerError, Pipeline, World, build_schedule


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
            if self.kind == "bad index":
                wrong = torch.full((2,), 99, device=x.device)
                x = x + nn.functional.embedding(wrong, x.new_zeros(3, x.shape[1]))
            if self.kind == "reads":
                assert x.sum().item() == x.sum().item()
        return self.inner(x)


def fails(world: World, *, name: str, kinds: list[str], limit_s: float) -> dict[str, Any]:
    """What this rank raised, and after how long. kinds: by rank."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    place = torch.device("npu", world.rank)
    mine = {
        i: _Faulty(stage(i), kinds[world.rank], 6).to(place) for i in schedule.stages_of(world.rank)
    }
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
        return {"kind": type(error).__name__, "text": str(error), "seconds": seconds}
    return {"kind": None}


def resets(world: World, *, name: str) -> float:
    """Rank 1 raises in the middle of a step; both reset, and the same pipeline trains."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    place = torch.device("npu", world.rank)
    kind = "raise" if world.rank == 1 else "nothing"
    mine = {i: _Faulty(stage(i), kind, 6).to(place) for i in schedule.stages_of(world.rank)}
    batch = (torch.ones(8, 6, device=place), torch.zeros(8, 6, device=place))
    with Pipeline(
        mine, schedule=schedule, loss=MeanLoss(nn.functional.mse_loss), world=world, timeout_s=20
    ) as pipe:
        before = pipe.step(batch).loss
        try:
            pipe.step(batch)
        except (PeerError, ValueError):
            pipe.reset()
        assert pipe.step(batch).loss == before
        time.sleep(2.5)  # what the failure had set going is to end what was before the reset only
        assert pipe.step(batch).loss == before
        assert pipe._link.in_use == 0
        return before


def dies_connecting(world: World, *, kind: str) -> dict[str, Any]:
    """Rank 1 is killed, or stuck, when the other is already setting a communicator up with it."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=2)
    place = torch.device("npu", world.rank)
    mine = {i: stage(i).to(place) for i in schedule.stages_of(world.rank)}

    def dies(*_: object, **__: object) -> NoReturn:
        time.sleep(1)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
        raise AssertionError

    start_s = time.perf_counter()
    try:
        with ExitStack() as stack:
            if world.rank == 1:
                stack.enter_context(patch("npu_pipe.comm.links.open_lanes", dies))
            Pipeline(
                mine,
                schedule=schedule,
                loss=MeanLoss(nn.functional.mse_loss),
                world=world,
                timeout_s=2,
                connect_s=6,
            )
    except Exception as error:
        seconds = time.perf_counter() - start_s
        return {"kind": type(error).__name__, "text": str(error), "seconds": seconds}
    return {"kind": None}


def out_of_bounds(world: World, *, settings: dict[str, str]) -> list[str]:
    """What a Pipeline says to each of these variables, one at a time; afterwards it trains."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=2)
    place = torch.device("npu", world.rank)
    mine = {i: stage(i).to(place) for i in schedule.stages_of(world.rank)}
    make = partial(
        Pipeline, mine, schedule=schedule, loss=MeanLoss(nn.functional.mse_loss), world=world
    )
    said = []
    for name, value in settings.items():
        with patch.dict(os.environ, {name: value}):
            try:
                make().close()
            except ConfigError as error:
                said.append(str(error))
    with make() as pipe:
        pipe.step((torch.ones(4, 6, device=place), torch.zeros(4, 6, device=place)))
    return said
