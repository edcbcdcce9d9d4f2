"""Jobs that look at what runs at the same time: stages whose time on the device is known."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch_npu
from torch import Tensor, nn

from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm.device_lanes import Streams, open_lanes
from npu_pipe.comm.device_link import DeviceLink
from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.links import TeamLink, link_for
from npu_pipe.comm.team import Team
from npu_pipe.device.npu import Npu
from npu_pipe.ir.action import Action, Kind
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Parcel
from npu_pipe.timeline.phase import Phase


class _Slow(torch.autograd.Function):
    """Keeps the current stream busy for a time, forward and backward, and no core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _busy(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _busy(ctx.seconds)
        return gradient.clone(), None


class SlowStage(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Slow.apply(x * self.weight, self.seconds)


class LateStage(SlowStage):
    """Reads its input at the end of its time."""

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            _busy(self.seconds)
        return x * self.weight


class InLineLink(DeviceLink):
    """As if there were no side streams: compute waits for each send, and for each receive from
    when it is asked for."""

    def send(self, send: Action, parcel: Parcel) -> None:
        super().send(send, parcel)
        for work in self._sent[send].works:
            work.wait()

    def _post_now(self, receive: Action) -> None:
        super()._post_now(receive)
        for work in self._posted[receive].works:
            work.wait()


class LateLink(DeviceLink):
    """Issues each send after the next action of compute has been given to the device."""

    _late: tuple[Action, Parcel] | None = None

    def send(self, send: Action, parcel: Parcel) -> None:
        self._issue()
        self._late = (send, parcel)

    def take(self, receive: Action) -> Parcel:
        self._issue()
        return super().take(receive)

    def finish(self) -> None:
        self._issue()
        super().finish()

    def _issue(self) -> None:
        if self._late is not None:
            super().send(*self._late)
        self._late = None


def evaluate(world: World, *, microbatches: int, busy_s: float, beside: bool) -> float:
    """How long a forward of a pipeline takes, after one to warm up."""
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=microbatches)
    place = torch.device("npu", world.rank)
    torch_npu.npu._subscribe_report(torch.npu.current_stream())
    stage = SlowStage(busy_s).to(place)

    def in_line(team: Team) -> TeamLink:
        return _link(InLineLink, team, schedule, one_stream=True)

    link = link_for([stage], schedule=schedule) if beside else in_line
    batch = (torch.ones(microbatches, 4, device=place), torch.zeros(microbatches, 4, device=place))
    with Pipeline(
        {world.rank: stage},
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        link=link,
    ) as pipe:
        pipe.evaluate(batch)
        start_s = time.perf_counter()
        pipe.evaluate(batch)
        return time.perf_counter() - start_s


def sends(world: World, *, microbatches: int, busy_s: float, late: bool) -> list[float]:
    """How long after the end of its forward each send but the last starts, by the device's clock,
    in seconds; on rank 0, whose forwards run one after another."""
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=microbatches)
    place = torch.device("npu", world.rank)
    torch_npu.npu._subscribe_report(torch.npu.current_stream())
    stage = SlowStage(busy_s).to(place)
    batch = (torch.ones(microbatches, 4, device=place), torch.zeros(microbatches, 4, device=place))
    kind = LateLink if late else DeviceLink
    with Pipeline(
        {world.rank: stage},
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        link=lambda team: _link(kind, team, schedule),
    ) as pipe:
        pipe.step(batch)
        pipe.step(batch)
        found = pipe.timeline()
    ends = {s.action: s.end_us for s in found.compute}
    return [
        (s.start_us - ends[Action(Kind.F, 0, s.action.microbatch)]) / 1e6
        for s in found.transfers
        if s.action.kind is Kind.SEND_F and s.action.microbatch < microbatches - 1
    ]


def late_reader(world: World, *, microbatches: int, busy_s: float) -> None:
    """Rank 1 reads each input late, when the host has long given its buffer back."""
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=microbatches)
    place = torch.device("npu", world.rank)
    torch_npu.npu._subscribe_report(torch.npu.current_stream())
    stage = LateStage(busy_s if world.rank == 1 else 0.0).to(place)
    inputs = torch.arange(4.0 * microbatches).reshape(microbatches, 4)
    with Pipeline({world.rank: stage}, schedule=schedule, loss=None, world=world) as pipe:
        output = pipe.predict(inputs.to(place))
        assert pipe._link.buffers < microbatches
        if output is not None:
            assert torch.equal(output.cpu(), inputs)


def timeline(world: World, *, microbatches: int, busy_s: float) -> dict[str, Any]:
    """What the timeline of a step shows, in seconds: (action, start, end) of each span."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    place = torch.device("npu", world.rank)
    torch_npu.npu._subscribe_report(torch.npu.current_stream())
    stage = SlowStage(busy_s).to(place)
    batch = (torch.ones(microbatches, 4, device=place), torch.zeros(microbatches, 4, device=place))
    with Pipeline(
        {world.rank: stage},
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
    ) as pipe:
        pipe.step(batch)
        start_s = time.perf_counter()
        pipe.step(batch)
        took_s = time.perf_counter() - start_s
        with pipe.phase(Phase.OPTIMIZER):
            _busy(busy_s)
        found = pipe.timeline()
    return {
        "took": took_s,
        "compute": [(str(s.action), s.start_us / 1e6, s.end_us / 1e6) for s in found.compute],
        "transfers": [(str(s.action), s.start_us / 1e6, s.end_us / 1e6) for s in found.transfers],
        "optimizer": [
            (s.end_us - s.start_us) / 1e6 for s in found.phases if s.phase is Phase.OPTIMIZER
        ],
    }


def _busy(seconds: float) -> None:
    torch_npu.npu._launch_host_func(torch.npu.current_stream(), time.sleep, seconds)


def _link(
    kind: type[DeviceLink], team: Team, schedule: Schedule, *, one_stream: bool = False
) -> DeviceLink:
    """one_stream: all under the stream that computes."""
    device = Npu(team.rank)
    device.select()
    wait = DeviceWait(device, team.board)
    return kind(
        team,
        device,
        connections=open_lanes(team.groups, device, pairs_used(schedule), wait=wait),
        streams=Streams(device.current_stream if one_stream else device.stream),
        wait=wait,
    )
