"""Jobs with modules, batches and modes as users have them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jobs.boundaries import Into
from jobs.models import data, gradients, stage
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, World, build_schedule
from npu_pipe.comm import links

LOSS = MeanLoss(nn.functional.mse_loss)


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Returns(nn.Module):
    """Gives what `form` makes of its output."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner = stage(0)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


class First(nn.Module):
    """Takes the first of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(1)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        y: Tensor = self.inner(x)
        return y


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "a namedtuple among others": lambda y: (y, Pair(y, y)),
    "a dict by tuples": lambda y: {(1, 2): y},
    "a tensor without data": lambda y: y.to("meta"),
    "complex numbers": lambda y: y.to(torch.complex64),
}


class TakesTurns(nn.Module):
    """Returns one of two buffers in turn; its backward is an honest one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(0)
        self.buffers = [torch.zeros(2, 6, dtype=torch.float64) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        self.buffers.reverse()
        y: Tensor = Into.apply(self.inner(x), self.buffers[0])
        return y


def buffers_take_turns(world: World, *, link: str) -> float:
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=8)
    module = TakesTurns() if world.rank == 0 else stage(world.rank)
    way = getattr(links, link)
    with Pipeline(
        {world.rank: module}, schedule=schedule, loss=LOSS, world=world, link=way
    ) as pipe:
        loss = pipe.step(data(16)).loss
    inputs, targets = data(16)
    return abs(loss - LOSS.function(stage(1)(stage(0)(inputs)), targets).item())


class IntoLast(torch.autograd.Function):
    """Written faster than it is copied."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, buffer: Tensor) -> Tensor:
        buffer[-1] = result
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[-1], None


class LargeTurns(nn.Module):
    """Returns its output and, in one of some buffers of 16 MB in turn, the sum of it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = stage(0)
        self.buffers = [torch.zeros(1 << 21, dtype=torch.float64) for _ in range(count)]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.buffers.append(self.buffers.pop(0))
        y: Tensor = self.inner(x)
        return y, IntoLast.apply(y.sum(), self.buffers[0])


class WithMean(nn.Module):
    """What comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(1)

    def forward(self, y: Tensor, large: Tensor) -> Tensor:
        z: Tensor = self.inner(y) + large[-1]
        return z


def large_buffers_take_turns(world: World, *, count: int) -> float:
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=16)
    module = LargeTurns(count) if world.rank == 0 else WithMean()
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        loss = pipe.step(data(16)).loss
    inputs, targets = data(16)
    whole = [stage(1)(y) + y.sum() for y in stage(0)(inputs).split(1)]
    return abs(loss - LOSS.function(torch.cat(whole), targets).item())


def one_pipeline(world: World, module: nn.Module, *, microbatches: int = 4) -> Pipeline:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    return Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world, timeout_s=10)


def refused_form(world: World, *, form: str) -> float:
    module = Returns(FORMS[form]) if world.rank == 0 else First()
    with one_pipeline(world, module) as pipe:
        return pipe.step(data(8)).loss


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x.add_(1))
        return y


def input_changed_in_place(world: World) -> float:
    """The first stage works in place on the batch itself."""
    inputs, targets = data(8)
    with one_pipeline(world, InPlace() if world.rank == 0 else stage(1)) as pipe:
        loss = pipe.step((inputs.clone(), targets)).loss
    whole = nn.Sequential(stage(0), stage(1))
    assert math.isclose(loss, nn.functional.mse_loss(whole(inputs + 1), targets).item())
    return loss


def shared_parameters(world: World) -> list[float]:
    """Two stages of a rank are one module. The norms before and after clipping, and what they
    are by hand."""
    schedule = build_schedule("interleaved-1f1b", ranks=world.size, microbatches=4)
    module = stage(0)
    modules = dict.fromkeys(schedule.stages_of(world.rank), module)
    with Pipeline(modules, schedule=schedule, loss=LOSS, world=world) as pipe:
        pipe.step(data(8))
        mine = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)
        by_hand = math.sqrt(sum(pipe.gather(mine)))
        return [pipe.clip_gradients(by_hand / 4), pipe.clip_gradients(math.inf) * 4, by_hand]


def shared_in_replicas(world: World) -> list[float]:
    """Two stages, of which each rank has a replica, share a weight: the norm, and the unsplit
    model's."""
    schedule = build_schedule("dualpipe", ranks=world.size, microbatches=4)
    both: list[Any] = [stage(i) for i in range(schedule.stages)]
    both[-1][0].weight = both[0][0].weight
    inputs, targets = data(8)
    nn.functional.mse_loss(nn.Sequential(*both)(inputs), targets).backward()
    wanted = nn.utils.clip_grad_norm_(nn.ModuleList(both).parameters(), math.inf)
    mine = {i: both[i] for i in schedule.stages_of(world.rank)}
    for module in mine.values():
        module.zero_grad()
    with Pipeline(mine, schedule=schedule, loss=LOSS, world=world) as pipe:
        pipe.step((inputs, targets))
        return [pipe.clip_gradients(math.inf), float(wanted)]


def made_on_another_device(world: World, *, link: str) -> list[float]:
    """The loss of a step and of an evaluation, where tensors are made elsewhere by default, and
    of the unsplit model."""
    inputs, targets = data(8)
    expected = nn.functional.mse_loss(nn.Sequential(stage(0), stage(1))(inputs), targets).item()
    module = stage(world.rank)
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    open_link = getattr(links, link)
    with (
        torch.device("meta"),
        Pipeline(
            {world.rank: module}, schedule=schedule, loss=LOSS, world=world, link=open_link
        ) as pipe,
    ):
        losses = [pipe.step((inputs, targets)).loss, pipe.evaluate((inputs, targets)).loss]
        pipe.gather("some words" * 1000)
        return [*losses, expected]


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex128) * (1 + 2j))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).abs()


def complex_parameters(world: World) -> list[float]:
    module = Rotated() if world.rank == 0 else stage(world.rank)
    with one_pipeline(world, module) as pipe:
        pipe.step(data(8))
        whole = nn.Sequential(Rotated(), stage(1))
        inputs, targets = data(8)
        nn.functional.mse_loss(whole(inputs), targets).backward()
        wanted = nn.utils.clip_grad_norm_(whole.parameters(), math.inf)
        return [pipe.clip_gradients(math.inf), float(wanted)]


def first_stage_is_unfrozen(world: World) -> list[bool]:
    """Whether the first stage has gradients, while it is frozen and then."""
    module = stage(world.rank)
    found = []
    with one_pipeline(world, module) as pipe:
        for frozen in (True, False, True):
            module.zero_grad()
            module.requires_grad_(not frozen or world.rank > 0)
            pipe.step(data(8))
            found.append(all(p.grad is not None for p in module.parameters()))
    return found


class TwoInTraining(nn.Module):
    """Returns one value more in training, as models with an auxiliary loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(0)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return (y, y * 2) if self.training else y


def mode_changes(world: World) -> list[float]:
    module = TwoInTraining() if world.rank == 0 else First()
    losses = []
    with one_pipeline(world, module) as pipe:
        for training in (True, False, True):
            module.train(training)
            losses += [pipe.evaluate(data(8)).loss, pipe.step(data(8)).loss]
    return sorted({round(loss, 12) for loss in losses})


def statistics(world: World) -> list[int]:
    """How many batches a BatchNorm has counted: after connecting, a step, an evaluation."""
    norm = nn.BatchNorm1d(6, dtype=torch.float64)
    counted = []
    with one_pipeline(world, nn.Sequential(stage(world.rank), norm)) as pipe:
        counted.append(int(norm.num_batches_tracked))
        pipe.step(data(8))
        counted.append(int(norm.num_batches_tracked))
        norm.eval()
        pipe.evaluate(data(8))
        counted.append(int(norm.num_batches_tracked))
    return counted


class Mixed(nn.Module):
    """Leaves autocast in the middle."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.low, self.full = stage(2 * index).float(), stage(2 * index + 1).float()

    def forward(self, x: Tensor) -> Tensor:
        low = self.low(x)
        with torch.autocast("cpu", enabled=False):
            return self.full(low.float())


def within_autocast(world: World, *, name: str, chunks: int) -> float:
    """Whole steps are; backwards are not, as in a script that ends autocast before its own."""
    schedule = build_schedule(name, ranks=world.size, microbatches=2, chunks=chunks)
    mine = {index: Mixed(index) for index in schedule.stages_of(world.rank)}
    whole = nn.Sequential(*(Mixed(index) for index in range(schedule.stages)))
    inputs, targets = (each.float() for each in data(8))
    with (
        Pipeline(mine, schedule=schedule, loss=LOSS, world=world) as pipe,
        torch.autocast("cpu", torch.bfloat16),
    ):
        pipe.step((inputs, targets))
    for x, y in zip(inputs.split(4), targets.split(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = LOSS.function(whole(x), y) / 2
        loss.backward()
    pairs = [
        (ours, theirs)
        for index, module in mine.items()
        for ours, theirs in zip(gradients([module]), gradients([whole[index]]), strict=True)
    ]
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def every_batch_has_a_new_shape(world: World) -> int:
    """How many forms are remembered after 70 of them."""
    with one_pipeline(world, stage(world.rank), microbatches=2) as pipe:
        for rows in range(1, 71):
            pipe.evaluate(data(2 * rows))
        pipe.evaluate(data(2))
        return len(pipe._link._ways._known)


def bad_time_out(world: World, *, seconds: float) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=2)
    try:
        Pipeline({}, schedule=schedule, loss=LOSS, world=world, timeout_s=seconds)
    except NpuPipeError as error:
        return str(error)
    raise AssertionError("it was taken")


class HasMore(nn.Module):
    """Two parameters beside: one that is never used, and one only for rows that begin with 0."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)
        self.never = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.seldom = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + self.seldom if bool(y[0, 0] > 0) else y


def unused_in_two_replicas(world: World) -> list[list[bool]]:
    """Per stage, whether each of the two has a gradient; and whether the unsplit model has."""
    schedule = build_schedule("dualpipe", ranks=world.size, microbatches=4)
    mine = {i: HasMore(i) for i in schedule.stages_of(world.rank)}
    inputs, targets = data(8)
    with Pipeline(mine, schedule=schedule, loss=LOSS, world=world) as pipe:
        pipe.step((inputs, targets))
    whole = nn.Sequential(*(HasMore(i) for i in range(schedule.stages)))
    for rows, wanted in zip(inputs.split(2), targets.split(2), strict=True):
        torch.autograd.backward(LOSS.function(whole(rows), wanted))
    found = []
    for i, module in mine.items():
        one: Any = whole[i]
        for name in ("never", "seldom"):
            found.append([getattr(m, name).grad is not None for m in (module, one)])
    return found
