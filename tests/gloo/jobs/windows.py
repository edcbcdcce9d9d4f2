"""Jobs about what a window is made of. Each is compared with the unsplit model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, gradients, stage
from npu_pipe import (
    Batch,
    MeanLoss,
    Microbatches,
    Pipeline,
    TokenLoss,
    WithLoss,
    World,
    build_schedule,
)
from npu_pipe.comm import links
from npu_pipe.comm.links import poisoned

MSE = nn.functional.mse_loss


def stages(world: World, name: str, microbatches: int) -> tuple[Any, dict[int, nn.Module]]:
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    return schedule, {i: stage(i) for i in schedule.stages_of(world.rank)}


def close(mine: dict[int, nn.Module], whole: Sequence[nn.Module]) -> float:
    """The largest relative difference of gradients."""
    worst = 0.0
    for index, module in mine.items():
        for a, b in zip(gradients([module]), gradients([whole[index]]), strict=True):
            worst = max(worst, ((a - b).abs().max() / b.abs().max()).item())
    return worst


def uneven(world: World, *, name: str, microbatches: int, rows: int) -> list[float]:
    """Rows that do not divide: the loss and gradients of the whole batch, and all outputs."""
    schedule, mine = stages(world, name, microbatches)
    inputs, targets = data(rows)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    output = whole(inputs)
    loss = MSE(output, targets)
    loss.backward()
    with Pipeline(mine, schedule=schedule, loss=MeanLoss(MSE), world=world) as pipe:
        result = pipe.step((inputs, targets), outputs=True)
        outputs = pipe.predict(inputs)
        held_out = pipe.evaluate((inputs[:3], targets[:3])).loss
    differences = [
        close(mine, whole),
        abs(result.loss - loss.item()),
        abs(held_out - MSE(output[:3], targets[:3]).item()),
    ]
    if outputs is not None:
        assert not outputs.requires_grad
        assert not any(each.requires_grad for each in (*result.outputs, *result.losses))
        differences.append((outputs - output).abs().max().item())
    if len(result.outputs) == microbatches:  # with replicas, some end on another rank
        differences.append((torch.cat(result.outputs) - output).abs().max().item())
        assert len(result.losses) == microbatches
    return differences


def other_lengths(world: World, *, name: str) -> list[float]:
    """Megatron-LM#5100: every microbatch has its own length, and the next step other ones."""
    lengths = [[3, 5, 2, 5], [7, 1, 1, 4], [3, 5, 2, 5]]
    schedule, mine = stages(world, name, 4)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    loss = TokenLoss(lambda out, y: ((out - y) ** 2).mean(-1).sum(), lambda y: y.shape[1])
    found = []
    with Pipeline(mine, schedule=schedule, loss=loss, world=world) as pipe:
        for step, each in enumerate(lengths):
            pieces = [data(n, seed=step * 10 + i) for i, n in enumerate(each)]
            inputs, targets = ([pair[k][None] for pair in pieces] for k in (0, 1))
            result = pipe.step(Microbatches(inputs, targets))
            expected = 0.0
            for x, y in zip(inputs, targets, strict=True):
                part = loss.function(whole(x), y) / sum(each)
                part.backward()
                expected += part.item()
            found += [close(mine, whole), abs(result.loss - expected)]
    return found


class Shifted(nn.Module):
    """y = f(x) + shift * scale, with a keyword tensor and a keyword number."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)

    def forward(self, x: Tensor, *, shift: Tensor, scale: float, tag: object = None) -> Tensor:
        return self.inner(x) + shift * scale


def keywords(world: World, *, name: str) -> list[float]:
    """Keyword arguments on every stage, cut with the batch; each rank gives its own, where
    a stage has one rank only."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    own = 0 if schedule.mirrored else 1
    mine = {i: Shifted(i) for i in schedule.stages_of(world.rank)}
    whole = [Shifted(i) for i in range(schedule.stages)]
    inputs, targets = data(10)
    shifts = [data(10, seed=2000 + rank)[0] for rank in range(world.size)]
    value = inputs
    for index, module in enumerate(whole):
        rank = own * schedule.placement[index]
        value = module(value, shift=shifts[rank], scale=rank + 0.5)
    loss = MSE(value, targets)
    loss.backward()
    rank = own * world.rank
    named = {"shift": shifts[rank], "scale": rank + 0.5, "tag": object()}
    with Pipeline(mine, schedule=schedule, loss=MSE, world=world) as pipe:
        result = pipe.step(Batch(inputs, targets, named))
        again = pipe.evaluate(Batch(inputs, targets, named), microbatches=3)
    return [close(mine, whole), abs(result.loss - loss.item()), abs(again.loss - loss.item())]


class Counting(nn.Module):
    """Sends numbers and texts along that are others for each microbatch."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)
        self.first = index == 0
        self.calls = 0

    def forward(self, x: Tensor, meta: Any = None) -> Any:
        if self.first:
            self.calls += 1
            meta = {"call": self.calls, "scale": 1.0 / self.calls, "name": "n" * self.calls}
            meta |= {"odd": self.calls % 2 == 1, "none": None, "nan": float("nan")}
        assert meta["name"] == "n" * meta["call"]
        assert meta["odd"] is (meta["call"] % 2 == 1)
        assert meta["nan"] != meta["nan"]
        assert meta["none"] is None
        return self.inner(x) * meta["scale"], meta


def metadata(world: World, *, name: str) -> list[float]:
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    mine = {i: Counting(i) for i in schedule.stages_of(world.rank)}
    whole = [Counting(i) for i in range(schedule.stages)]
    inputs, targets = data(8)
    expected = 0.0
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        value: Any = (x,)
        for module in whole:
            value = module(*value)
        part = MSE(value[0], y) / 4
        part.backward()
        expected += part.item()
    loss = MeanLoss(lambda output, target: MSE(output[0], target))
    with Pipeline(mine, schedule=schedule, loss=loss, world=world) as pipe:
        result = pipe.step((inputs, targets))
    return [close(mine, whole), abs(result.loss - expected)]


class Balanced(nn.Module):
    """Has an auxiliary loss, as a router has."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.inner = stage(index)

    def forward(self, x: Tensor) -> WithLoss:
        value = self.inner(x)
        return WithLoss(value, 0.1 * value.square().mean())


def auxiliary(world: World, *, name: str, rows: int) -> list[float]:
    """torchtitan#2061, #3000: every stage's auxiliary loss is in the loss once, scaled once."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    mine = {i: Balanced(i) for i in schedule.stages_of(world.rank)}
    whole = [Balanced(i) for i in range(schedule.stages)]
    inputs, targets = data(rows)
    value, loss = inputs, torch.zeros((), dtype=torch.float64)
    for module in whole:
        value, extra = (lambda r: (r.value, r.loss))(module(value))
        loss = loss + extra
    loss = loss + MSE(value, targets)
    loss.backward()
    with Pipeline(mine, schedule=schedule, loss=MSE, world=world) as pipe:
        result = pipe.step((inputs, targets))
        evaluated = pipe.evaluate((inputs, targets), microbatches=2)
    return [close(mine, whole), abs(result.loss - loss.item()), abs(evaluated.loss - loss.item())]


class Carries(nn.Module):
    """A value of the first stage skips the middle and is used in the last."""

    def __init__(self, index: int, last: int) -> None:
        super().__init__()
        self.inner = stage(index)
        self.index, self.last = index, last

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Any:
        value = self.inner(x)
        if self.index == 0:
            return value, value * 2
        assert skip is not None
        return value + skip if self.index == self.last else (value, skip)


def skips(world: World, *, name: str) -> list[float]:
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    last = schedule.stages - 1
    mine = {i: Carries(i, last) for i in schedule.stages_of(world.rank)}
    whole = [Carries(i, last) for i in range(schedule.stages)]
    inputs, targets = data(8)
    value: Any = (inputs,)
    for module in whole:
        value = module(*value) if isinstance(value, tuple) else module(value)
    loss = MSE(value, targets)
    loss.backward()
    with Pipeline(mine, schedule=schedule, loss=MSE, world=world) as pipe:
        result = pipe.step((inputs, targets))
    return [close(mine, whole), abs(result.loss - loss.item())]


def evaluation(world: World, *, name: str) -> list[float]:
    """Evaluations of any size between steps: right, and the steps as if they had not been."""
    schedule, mine = stages(world, name, 4)
    _, alone = stages(world, name, 4)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    found = []
    with (
        Pipeline(mine, schedule=schedule, loss=MSE, world=world) as pipe,
        Pipeline(alone, schedule=schedule, loss=MSE, world=world) as other,
    ):
        for step, (rows, m) in enumerate([(8, None), (5, None), (2, None), (12, 6), (9, 1)]):
            inputs, targets = data(8, seed=step)
            pipe.step((inputs, targets))
            other.step((inputs, targets))
            x, y = data(rows, seed=100 + step)
            expected = MSE(whole(x), y).item()
            found.append(abs(pipe.evaluate((x, y), microbatches=m).loss - expected))
            assert gradients(mine.values())[0].equal(gradients(alone.values())[0])
        for a, b in zip(gradients(mine.values()), gradients(alone.values()), strict=True):
            assert a.equal(b)
    return found


class Detaching(nn.Module):
    """off: of four calls in turn, which of its two values need no gradient."""

    def __init__(self, index: int, off: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.inner = stage(index)
        self.calls = 0
        self.off = off

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        value = self.inner(x) if other is None else self.inner(x) + other
        off = self.off[self.calls % 4]
        self.calls += 1
        return tuple(y.detach() if n in off else y for n, y in enumerate((value, 2 * value)))


def needs_no_gradient(world: World, *, name: str, off: list[list[int]], link: str) -> list[float]:
    """pytorch#152827."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    last = schedule.stages - 1

    def made(index: int) -> nn.Module:
        return Detaching(index, off if index != last else [[]] * 4)

    mine = {i: made(i) for i in schedule.stages_of(world.rank)}
    whole = [made(i) for i in range(schedule.stages)]
    inputs, targets = data(8)
    expected = 0.0
    for x, y in zip(inputs.split(2), targets.split(2), strict=True):
        value: Any = (x,)
        for module in whole:
            value = module(*value)
        part = MSE(value[0] + value[1], y) / 4
        part.backward()
        expected += part.item()
    loss = MeanLoss(lambda output, target: MSE(output[0] + output[1], target))
    open_link = poisoned(getattr(links, link))
    with Pipeline(mine, schedule=schedule, loss=loss, world=world, link=open_link) as pipe:
        for _ in range(2):  # the forms of the second step are known from the first
            for module in mine.values():
                module.zero_grad()
            result = pipe.step((inputs, targets))
    return [close(mine, whole), abs(result.loss - expected)]


def nothing_to_train(world: World) -> list[str]:
    """A step of a frozen model, then one of a model that is not."""
    schedule, mine = stages(world, "1f1b", 4)
    said = []
    with Pipeline(mine, schedule=schedule, loss=MSE, world=world) as pipe:
        for trained in (False, True):
            for module in mine.values():
                module.requires_grad_(trained)
            try:
                said.append(f"loss {pipe.step(data(8)).loss:.6f}")
            except ValueError as error:
                said.append(str(error))
    return said
