"""Jobs with DeviceLink on a device that is made up: its streams are logged, its tensors are the
CPU's, and its backend is gloo."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jobs.any_schedule import run
from npu_pipe import MeanLoss, Pipeline, Schedule, World, build_schedule
from npu_pipe.comm.device_lanes import Streams, open_lanes
from npu_pipe.comm.device_link import DeviceLink
from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.links import OpenLink, TeamLink, staged_link
from npu_pipe.comm.team import Team
from npu_pipe.device.cpu import Cpu
from npu_pipe.device.device import Event, Stream
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.runtime.record import Recorder


class _Event:
    def __init__(self) -> None:
        self.asked = 0
        self.recorded = ""

    def query(self) -> bool:
        """It takes a while."""
        self.asked += 1
        return self.asked % 3 == 0

    def elapsed_time(self, end: Event, /) -> float:
        return 0.0


class _Stream:
    def __init__(self, name: str, log: list[tuple[str, str, str]]) -> None:
        self.name = name
        self.log = log

    def record_event(self, event: Any = None, /) -> Any:
        event = event or _Event()
        event.recorded = self.name
        self.log.append((self.name, "record", self.name))
        return event

    def wait_event(self, event: Any, /) -> None:
        self.log.append((self.name, "wait", event.recorded))

    def synchronize(self) -> None:
        """Everything has been done."""


class LoggedDevice(Cpu):
    """log: (stream, what it does, of which stream)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str, str]] = []
        self.current: Any = _Stream("compute", self.log)
        self.made = 0

    def stream(self) -> Stream:
        self.made += 1
        return _Stream(f"side {self.made}", self.log)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        self.log.append((stream.name, "issue", stream.name))
        try:
            yield
        finally:
            self.current = before

    def event(self, *, timing: bool = False) -> Event:
        return _Event()

    def add_backend(
        self, group: dist.ProcessGroup, store: dist.Store, *, name: str, options: LaneOptions
    ) -> None:
        """Its tensors are the CPU's, which the group sends already."""


class _HostTimed(DeviceLink):
    """A wait for gloo holds the host up, so nobody may watch the ends of transfers."""

    def recorder(self) -> Recorder:
        return Recorder()


def open_device(schedule: Schedule, device: LoggedDevice) -> OpenLink:
    def open_link(team: Team, *, poison: bool = False) -> TeamLink:
        wait = DeviceWait(device, team.board)
        pairs = pairs_used(schedule)
        return _HostTimed(
            team,
            device,
            connections=open_lanes(team.groups, device, pairs, wait=wait),
            streams=Streams(device.stream),
            wait=wait,
            poison=poison,
        )

    return open_link


def train_named(world: World, *, name: str, microbatches: int) -> None:
    """Bit for bit the unsplit model, with free buffers full of NaN."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    run(world, schedule, None, 2, open_device(schedule, LoggedDevice()))


def train_staged(world: World, *, name: str, microbatches: int) -> None:
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    run(world, schedule, None, 2, staged_link(Cpu(), schedule=schedule))


class _Counting(nn.Module):
    """Gives a number along with its tensor, and takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, number: int = 0, text: str = "") -> tuple[Tensor, int, str]:
        return self.linear(x) * (1 + number), number + 1, text + "ab"


def numbers(world: World, *, name: str, microbatches: int) -> list[Any]:
    """Numbers and texts cross boundaries beside tensors."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    torch.manual_seed(0)
    whole = [_Counting() for _ in range(schedule.stages)]
    mine = {i: whole[i] for i in schedule.stages_of(world.rank)}
    found: list[Any] = []

    def loss(output: tuple[Tensor, int, str], target: Tensor) -> Tensor:
        found.append(list(output[1:]))
        return nn.functional.mse_loss(output[0], target)

    batch = (torch.ones(microbatches, 4), torch.zeros(microbatches, 4))
    with Pipeline(
        mine,
        schedule=schedule,
        loss=MeanLoss(loss),
        world=world,
        link=open_device(schedule, LoggedDevice()),
    ) as pipe:
        ours = pipe.step(batch).loss
    value: Any = (batch[0],)
    for stage in whole:
        value = stage(*value)
    theirs = nn.functional.mse_loss(value[0], batch[1]).item()
    assert math.isclose(ours, theirs, rel_tol=1e-5)
    return found


def order_of_streams(world: World, *, microbatches: int) -> list[tuple[str, str, str]]:
    """What the streams of a rank do in the second step of a schedule."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    device = LoggedDevice()
    stage = nn.Linear(4, 4)
    batch = (torch.ones(microbatches, 4), torch.zeros(microbatches, 4))
    with Pipeline(
        {world.rank: stage},
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        link=open_device(schedule, device),
    ) as pipe:
        pipe.step(batch)
        device.log.clear()
        pipe.step(batch)
        return device.log


def trains_after_inference(world: World, *, microbatches: int) -> None:
    """An evaluation in inference mode makes the buffers that training uses: what crosses has the
    same form in both, since the first stage is frozen."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    batch = (torch.ones(microbatches, 4), torch.zeros(microbatches, 4))
    with Pipeline(
        {world.rank: nn.Linear(4, 4).requires_grad_(world.rank > 0)},
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        link=open_device(schedule, LoggedDevice()),
    ) as pipe:
        with torch.inference_mode():
            wanted = pipe.evaluate(batch).loss
        assert pipe.step(batch).loss == wanted
