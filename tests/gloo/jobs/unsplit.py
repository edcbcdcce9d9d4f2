"""What a pipeline is compared with: the unsplit model, on the CPU, microbatch by microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from npu_pipe import Pipeline, Schedule
from npu_pipe.ir.action import Kind, flatten

LOSS = nn.functional.mse_loss


class Unsplit(NamedTuple):
    """gradients: by stage and microbatch. loss: the mean over the microbatches."""

    model: nn.Sequential
    gradients: dict[int, dict[int, list[Tensor]]]
    loss: float


def unsplit(
    stages: Sequence[nn.Module], batch: tuple[Tensor, Tensor], *, microbatches: int
) -> Unsplit:
    """stages: all of them; what is trained has others of the same values."""
    m, (inputs, targets), whole = microbatches, batch, nn.Sequential(*stages)
    found: dict[int, dict[int, list[Tensor]]] = {i: {} for i in range(len(stages))}
    total = 0.0
    for i, (x, y) in enumerate(zip(inputs.chunk(m), targets.chunk(m), strict=True)):
        whole.zero_grad()
        part = LOSS(whole(x), y)
        (part / m).backward()
        total += part.item() / m
        for index, module in enumerate(whole):
            found[index][i] = [p.grad.clone() for p in module.parameters()]
    return Unsplit(whole, found, total)


def expected(
    schedule: Schedule, per_microbatch: Mapping[int, Sequence[Tensor]], index: int
) -> Sequence[Tensor]:
    """The sum of a stage's gradients in the order in which its ranks accumulate them."""
    sums: dict[int, Sequence[Tensor]] = {}
    for rank, order in enumerate(schedule.orders):
        for step in order:
            for action in flatten(step):
                if action.stage != index or action.kind not in (Kind.B, Kind.W):
                    continue
                gradients = per_microbatch[action.microbatch]
                if rank in sums:
                    sums[rank] = [a + b for a, b in zip(sums[rank], gradients, strict=True)]
                else:
                    sums[rank] = gradients
    replicas = [sums[rank] for rank in sorted(sums)]
    return [sum(parts[1:], start=parts[0]) for parts in zip(*replicas, strict=True)]


def two_steps(
    pipe: Pipeline,
    modules: Mapping[int, nn.Module],
    batch: tuple[Tensor, Tensor],
    wanted: Unsplit,
    *,
    same: Callable[[Tensor, Tensor], bool],
    rel_tol: float = 1e-12,
) -> None:
    """Two steps, and an evaluation after each: all is as in the unsplit model, and nothing is left
    behind. modules: of this rank. same: of two gradients."""
    schedule = pipe.schedule
    for _ in range(2):
        for module in modules.values():
            module.zero_grad()
        loss = pipe.step(batch).loss
        assert math.isclose(loss, wanted.loss, rel_tol=rel_tol), (loss, wanted.loss)
        assert math.isclose(pipe.evaluate(batch).loss, wanted.loss, rel_tol=rel_tol)
        for index, module in modules.items():
            sums = expected(schedule, wanted.gradients[index], index)
            for ours, theirs in zip(module.parameters(), sums, strict=True):
                assert ours.grad is not None
                assert ours.grad.device == ours.device
                assert same(ours.grad.cpu(), theirs), (schedule, index)
    assert all(each.held == 0 for each in pipe._stages.values())
    assert pipe._link.in_use == 0


def in_order(pipe: Pipeline) -> None:
    """Law 10, and one span a transfer; collective."""
    timeline = pipe.timeline()
    for rank, order in enumerate(pipe.schedule.orders):
        measured = [span.action for span in timeline.compute if span.rank == rank]
        assert measured == [action for step in order for action in flatten(step)], "law 10"
        moved = [span.action for span in timeline.transfers if span.rank == rank]
        assert len(set(moved)) == len(moved), "one span a transfer"
