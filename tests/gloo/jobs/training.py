"""Jobs that train, and compare with the unsplit model on the spot."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, gradients, stage
from npu_pipe import MeanLoss, Pipeline, Schedule, SumLoss, TokenLoss, World, build_schedule
from npu_pipe.ir.action import Kind, flatten


def backward_order(schedule: Schedule) -> list[int]:
    """The microbatches in the order in which the last stage runs their backwards."""
    last = schedule.stages - 1
    order = schedule.orders[schedule.placement[last]]
    return [
        action.microbatch
        for step in order
        for action in flatten(step)
        if action.kind in (Kind.B, Kind.I) and action.stage == last
    ]


def gradients_equal_unsplit(
    world: World, *, name: str, microbatches: int, chunks: int | None = None, rows: int = 3
) -> dict[str, Any]:
    """Bit for bit, in float64, over two steps and an evaluation between them."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches, chunks=chunks)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}
    loss = nn.functional.mse_loss
    losses = []
    with Pipeline(mine, schedule=schedule, loss=MeanLoss(loss), world=world) as pipe:
        for step in range(2):
            inputs, targets = data(rows * microbatches, seed=step)
            for module in (whole, *mine.values()):
                module.zero_grad()
            result = pipe.step((inputs, targets))
            assert math.isclose(pipe.evaluate((inputs, targets)).loss, result.loss, rel_tol=1e-12)
            output = pipe.predict(inputs)
            total = 0.0
            for i in backward_order(schedule):
                rows_i = slice(rows * i, rows * (i + 1))
                part = loss(whole(inputs[rows_i]), targets[rows_i])
                (part / microbatches).backward()
                total += part.item()
            assert math.isclose(result.loss, total / microbatches, rel_tol=1e-12)
            for index, module in mine.items():
                for ours, theirs in zip(
                    gradients([module]), gradients([whole[index]]), strict=True
                ):
                    assert torch.equal(ours, theirs), (index, (ours - theirs).abs().max())
            if output is not None:
                assert torch.allclose(output, whole(inputs), rtol=1e-12, atol=0)
            norm = pipe.clip_gradients(1e-3)
            assert math.isclose(norm, nn.utils.clip_grad_norm_(whole.parameters(), 1e-3))
            for ours, theirs in zip(
                gradients(list(mine.values())),
                gradients([whole[i] for i in mine]),
                strict=True,
            ):
                assert torch.allclose(ours, theirs, rtol=1e-9, atol=0)
            losses.append(result.loss)
        timeline = pipe.timeline()
    measured = [[str(s.action) for s in timeline.compute if s.rank == r] for r in range(world.size)]
    return {
        "losses": losses,
        "measured": measured,
        "wanted": [[str(a) for s in order for a in flatten(s)] for order in schedule.orders],
        "peaks": timeline.peak_activations,
    }


def token_losses(world: World, *, tokens: list[int], sums: list[float]) -> dict[str, float]:
    """The third seed's exercise: the stages pass a weight through, and the loss of microbatch i
    is weight * sums[i] over tokens[i] valid tokens. Gives the loss and gradient of each rule."""
    microbatches = len(tokens)
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=microbatches)
    found = {}
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    class Weigh(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def mean(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() / target.sum()

    def total(output: Tensor, target: Tensor) -> Tensor:
        del target
        return output.sum()

    rules: dict[str, Any] = {
        "mean": MeanLoss(mean),
        "tokens": TokenLoss(total, lambda target: int(target.sum())),
        "sum": SumLoss(total),
        "a bare function": mean,
    }
    inputs = torch.tensor(sums, dtype=torch.float64)[:, None]
    targets = torch.tensor(tokens)[:, None]
    for rule, loss in rules.items():
        module = Weigh() if world.rank == 0 else nn.Identity()
        weight.grad = None
        with Pipeline({world.rank: module}, schedule=schedule, loss=loss, world=world) as pipe:
            found[rule] = pipe.step((inputs, targets)).loss
        if world.rank == 0:
            assert weight.grad is not None
            found[f"{rule} gradient"] = float(weight.grad)
    return found


def windows_join(world: World, *, name: str, windows: int) -> float:
    """k windows in one step give the gradient of the joined batch."""
    microbatches = 2 * world.size
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    whole = nn.Sequential(*(stage(i) for i in range(schedule.stages)))
    mine = {i: stage(i) for i in schedule.stages_of(world.rank)}

    def total(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2 * (target > 0)).sum()

    def count(target: Tensor) -> int:
        return int((target > 0).sum())

    batches = [data(2 * microbatches, seed=k) for k in range(windows)]
    with Pipeline(mine, schedule=schedule, loss=TokenLoss(total, count), world=world) as pipe:
        result = pipe.step(*batches)
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = total(whole(inputs), targets) / count(targets)
    loss.backward()
    for index, module in mine.items():
        for ours, theirs in zip(gradients([module]), gradients([whole[index]]), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-15)
    assert math.isclose(result.loss, loss.item(), rel_tol=1e-12)
    return result.loss
