"""Jobs about what crosses stages. Each trains two stages or more and compares with the unsplit
model, run microbatch by microbatch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, SumLoss, World, build_schedule
from npu_pipe.comm import links

MICROBATCHES = 5


class First(nn.Module):
    """Adds its own linear layer, and returns whatever `form` makes of the result and the input."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = stage(0)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.linear(x), x)


class Last(nn.Module):
    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = stage(1)
        self.form = form

    def forward(self, *values: Any) -> Tensor:
        return self.linear(self.form(*values))


class ReusedBuffer(nn.Module):
    """Returns one and the same buffer each time; its backward is an honest one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(0)
        self.buffer = torch.zeros(0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        result = self.inner(x)
        if self.buffer.shape != result.shape:
            self.buffer = torch.zeros_like(result)
        return Into.apply(result, self.buffer)


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_(result)
        return buffer.view_as(buffer)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Pair(NamedTuple):
    """Arguments to the next stage, as any tuple is."""

    a: Tensor
    b: Tensor


def mutate(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.add_(1)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[..., Tensor]]] = {
    "one tensor": (lambda y, x: y, lambda y: y),
    "two tensors": (lambda y, x: (y, y * x), lambda a, b: a + b),
    "a namedtuple": (lambda y, x: Pair(y, y * x), lambda a, b: a - b),
    "the same tensor twice": (lambda y, x: (y, y), lambda a, b: a * b),
    "a tensor and its view": (lambda y, x: (y, y[:, ::2]), lambda a, b: a + b.sum()),
    "not contiguous": (lambda y, x: y.t(), lambda y: y.t()),
    "a dict": (lambda y, x: {"b": y, "a": x}, lambda d: d["a"] + d["b"]),
    "nested": (lambda y, x: ([y, {"k": (x,)}], None), lambda a, n: a[0] * a[1]["k"][0]),
    "ids and a mask": (
        lambda y, x: (y, (x > 0), (x * 9).long()),
        lambda y, mask, ids: y * mask + ids,
    ),
    "none, a flag and numbers": (
        lambda y, x: (y, None, True, 2, 0.5, "text"),
        lambda y, none, flag, i, f, text: y * i * f if flag and none is None else y[:0],
    ),
    "one that the next stage ignores": (lambda y, x: (y, y * 2), lambda a, b: a),
    "a scalar": (lambda y, x: (y, y.sum()), lambda a, b: a * b),
    "nothing that needs gradient": (lambda y, x: y.detach(), lambda y: y),
    "an empty tensor": (lambda y, x: (y, y[:0]), lambda a, b: a + b.sum()),
    "worked on in place": (lambda y, x: y * 1, mutate),
    "half precision beside double": (lambda y, x: (y, y.bfloat16()), lambda a, b: a + b.double()),
    "the input, passed on": (lambda y, x: (x, y), lambda a, b: a * b),
    "a mask, turned in place": (lambda y, x: (y, x > 0), lambda y, mask: y * mask.t_().t()),
    "data, made part of a graph": (lambda y, x: (y, x * 2), lambda y, x: x.mul_(y)),
    "a mask, changed beside what is kept": (
        lambda y, x: (y, x, x > 0),
        lambda y, x, mask: y * x + mask.logical_not_(),
    ),
    "more tensors than one message tells of": (
        lambda y, x: {f"the tensor of number {i}": y * i for i in range(1500)},
        lambda d: sum(d.values()) / 1e6,
    ),
}


def form_crosses(world: World, *, form: str, name: str = "1f1b") -> float:
    first, last = FORMS[form]

    def build() -> list[nn.Module]:
        middle = [nn.Identity() for _ in range(world.size - 2)]
        return [First(first), *(_Pass() for _ in middle), Last(last)]

    return compare(world, build, name=name)


def reused_buffer(world: World) -> float:
    return compare(world, lambda: [ReusedBuffer(), *(stage(i) for i in range(1, world.size))])


class _Pass(nn.Module):
    """A stage that hands on whatever it gets."""

    def forward(self, *values: Any) -> Any:
        return values if len(values) > 1 else values[0]


def compare(world: World, build: Callable[[], Sequence[nn.Module]], *, name: str = "1f1b") -> float:
    torch.manual_seed(0)
    schedule = build_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
    mine, whole = build()[world.rank], build()
    inputs, targets = data(3 * MICROBATCHES)
    loss = nn.functional.mse_loss
    result = math.nan
    with Pipeline({world.rank: mine}, schedule=schedule, loss=MeanLoss(loss), world=world) as pipe:
        for _ in range(2):
            for module in (mine, *whole):
                module.zero_grad()
            result = pipe.step((inputs, targets)).loss
            evaluated = pipe.evaluate((inputs, targets)).loss
            total = 0.0
            for x, y in zip(inputs.split(3), targets.split(3), strict=True):
                value: Any = (x.clone(),)
                for module in whole:
                    value = module(*value)
                    value = value if isinstance(value, tuple) else (value,)
                part = loss(value[0], y) / MICROBATCHES
                part.backward()
                total += part.item()
            assert math.isclose(result, total, rel_tol=1e-12), (result, total)
            assert math.isclose(evaluated, total, rel_tol=1e-12), (evaluated, total)
            pairs = zip(mine.parameters(), whole[world.rank].parameters(), strict=True)
            for ours, theirs in pairs:
                if theirs.grad is None:
                    assert ours.grad is None
                else:
                    assert ours.grad is not None
                    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
    return result


def shape_changes(world: World) -> list[float]:
    """Rows change from step to step, and go back."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=MICROBATCHES)
    mine = stage(world.rank)
    whole = nn.Sequential(*(stage(i) for i in range(world.size)))
    loss = nn.functional.mse_loss
    losses = []
    with Pipeline({world.rank: mine}, schedule=schedule, loss=MeanLoss(loss), world=world) as pipe:
        for rows in (3, 5, 1, 3):
            inputs, targets = data(rows * MICROBATCHES, seed=rows)
            for module in (mine, whole):
                module.zero_grad()
            losses.append(pipe.step((inputs, targets)).loss)
            want = loss(whole(inputs), targets)
            assert math.isclose(losses[-1], want.item(), rel_tol=1e-12)
            want.backward()
            for ours, theirs in zip(mine.parameters(), whole[world.rank].parameters(), strict=True):
                assert ours.grad is not None
                assert theirs.grad is not None
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-15)
    return losses


def batch_needs_gradient(world: World) -> float:
    """A batch with requires_grad is data all the same: no gradient of it is computed."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=MICROBATCHES)
    inputs, targets = data(3 * MICROBATCHES)
    inputs.requires_grad_()
    loss = SumLoss(nn.functional.mse_loss)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world) as p:
        result = p.step((inputs, targets))
    assert inputs.grad is None
    return result.loss


def buffers_in_flight(world: World, *, microbatches: int, link: str) -> dict[str, Any]:
    """How many buffers were made, and what a window leaves behind."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    loss = MeanLoss(nn.functional.mse_loss)
    with Pipeline(
        {world.rank: stage(world.rank)},
        schedule=schedule,
        loss=loss,
        world=world,
        link=getattr(links, link),
    ) as pipe:
        for _ in range(3):
            pipe.step(data(2 * microbatches))
        made, left = pipe._link.buffers, pipe._link.in_use
        held = sum(each.held for each in pipe._stages.values())
    return {"made": made, "left": left, "held": held}


class Late(nn.Module):
    """Is late once, so that everything is sent before anything is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = stage(1)
        self.calls = 0

    def forward(self, x: Tensor, note: Any = None) -> Any:
        if self.calls == 0:
            time.sleep(1.5)
        self.calls += 1
        return self.inner(x)


def more_than_a_socket_holds(world: World, *, microbatches: int) -> float:
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=microbatches)
    module = Late() if world.rank == 1 else stage(0)
    whole = nn.Sequential(stage(0), stage(1))
    inputs, targets = data(microbatches)
    loss = nn.functional.mse_loss(whole(inputs), targets)
    loss.backward()
    with Pipeline(
        {world.rank: module}, schedule=schedule, loss=nn.functional.mse_loss, world=world
    ) as pipe:
        for _ in range(2):
            module.zero_grad()
            result = pipe.step((inputs, targets))
    for ours, theirs in zip(module.parameters(), whole[world.rank].parameters(), strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-9, atol=1e-14)
    return abs(result.loss - loss.item())


class Large(nn.Module):
    """Megabytes cross here, some of them untouched; every other time into one buffer."""

    def __init__(self, index: int, last: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0 + index / 10, dtype=torch.float64))
        self.index, self.last = index, last
        self.buffer = torch.zeros(0, dtype=torch.float64)

    def forward(self, x: Tensor, passed: Tensor | None = None) -> Any:
        y = x * self.scale
        if self.index % 2:
            if self.buffer.shape != y.shape:
                self.buffer = torch.zeros_like(y)
            y = Into.apply(y, self.buffer)
        if passed is None:
            return y, x * self.scale
        return y.sum(1) + passed.mean(1) if self.index == self.last else (y, passed)


def megabytes(world: World, *, name: str, rows: int, width: int) -> float:
    """The copier works beside: nothing is sent from what has been written to since."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    last = schedule.stages - 1
    mine = {i: Large(i, last) for i in schedule.stages_of(world.rank)}
    whole = [Large(i, last) for i in range(schedule.stages)]
    inputs = data(4 * rows, width)[0]
    targets = inputs[:, 0].clone()
    loss = nn.functional.mse_loss
    for x, y in zip(inputs.split(rows), targets.split(rows), strict=True):
        value: Any = (x,)
        for module in whole:
            value = module(*value)
        (loss(value, y) / 4).backward()
    with Pipeline(
        mine, schedule=schedule, loss=loss, world=world, link=links.poisoned(), timeout_s=30
    ) as pipe:
        for _ in range(3):
            for module in mine.values():
                module.zero_grad()
            pipe.step((inputs, targets))
        assert pipe._link.in_use == 0
    pairs = [(module.scale.grad, whole[index].scale.grad) for index, module in mine.items()]
    return max(abs(ours - theirs).item() / abs(theirs).item() for ours, theirs in pairs)
