"""Jobs about gradients that autograd hands over as they lie, and about those that are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, Pipeline, World, build_schedule
from npu_pipe.comm import links
from npu_pipe.comm.links import poisoned
from npu_pipe.runtime.boundary import arguments
from npu_pipe.runtime.loss import WithLoss

MSE = nn.functional.mse_loss
MICROBATCHES = 4
WIDTH = 6


class Made(nn.Module):
    """A linear layer and two vectors, of which `form` makes the output."""

    def __init__(self, index: int, form: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = stage(index)
        self.a = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.full((1,), 2.0, dtype=torch.float64))
        self.rows = nn.Embedding(9, WIDTH, sparse=True, dtype=torch.float64)
        nn.init.constant_(self.rows.weight, 0.1)
        self.form = form

    def forward(self, *values: Tensor) -> Any:
        return self.form(self, *values)


def ids(x: Tensor) -> Tensor:
    return x[:, 0].abs().long() % 9


FIRST: dict[str, Callable[[Made, Tensor], Any]] = {
    "a position of one row": lambda m, x: x + m.a[None],
    "a position, and a layer beside": lambda m, x: m.linear(x).view(1, -1) + m.a.view(1, -1),
    "one gradient for two parameters": lambda m, x: (
        2 * (m.linear(x) + m.a.view(1, -1) + m.linear[0].bias.view(1, -1))
    ),
    "a sparse embedding": lambda m, x: m.rows(ids(x)),
    "an auxiliary loss that is a parameter": lambda m, x: WithLoss(m.linear(x), m.b.squeeze()),
}

# What the next stage does not use of two or three, and what it makes of them.
UNUSED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "one of two": (lambda m, x, *_: (m.linear(x), x * m.a), lambda m, x, _: m.linear(x)),
    "all": (lambda m, x: m.linear(x), lambda m, x: m.linear(x.detach())),
    "all but an auxiliary loss": (
        lambda m, x: WithLoss(m.linear(x), m.a.sum()),
        lambda m, x: m.linear(x.detach()),
    ),
    "one with an infinite slope": (
        lambda m, x, *_: (m.linear(x), (0 * m.linear(x)).sqrt()),
        lambda m, x, _: m.linear(x),
    ),
    "one that some microbatches use": (
        lambda m, x, *_: (m.linear(x), x * m.a),
        lambda m, x, y: m.linear(x + y if bool(x.detach()[0, 0] > 0) else x),
    ),
    "of each precision": (
        lambda m, x, *_: (m.linear(x), *((x * m.a).to(t) for t in PRECISIONS)),
        lambda m, x, *_: m.linear(x),
    ),
}
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def first(world: World, *, case: str, name: str, link: str) -> list[str]:
    return _compare(world, lambda index, _: Made(index, FIRST[case]), name=name, link=link)


def unused(world: World, *, case: str, name: str, link: str) -> list[str]:
    form, last = UNUSED[case]
    return _compare(
        world,
        lambda index, stages: Made(index, last if index == stages - 1 else form),
        name=name,
        link=link,
    )


def _compare(
    world: World, make: Callable[[int, int], nn.Module], *, name: str, link: str
) -> list[str]:
    """Two steps of one row a microbatch; what differs from the unsplit model, None included."""
    schedule = build_schedule(name, ranks=world.size, microbatches=MICROBATCHES)
    whole = [make(i, schedule.stages) for i in range(schedule.stages)]
    mine = {i: make(i, schedule.stages) for i in schedule.stages_of(world.rank)}
    inputs, targets = data(MICROBATCHES)
    per_microbatch = [
        _unsplit(whole, x, y) for x, y in zip(inputs.split(1), targets.split(1), strict=True)
    ]
    found = []
    open_link = poisoned(getattr(links, link))
    with Pipeline(mine, schedule=schedule, loss=MeanLoss(MSE), world=world, link=open_link) as pipe:
        for step in range(2):
            for module in mine.values():
                module.zero_grad()
            pipe.step((inputs, targets))
            for i, module in mine.items():
                for n, (label, parameter) in enumerate(module.named_parameters()):
                    wanted = [g[i][n] for g in per_microbatch if g[i][n] is not None]
                    if not _same(parameter.grad, wanted):
                        found.append(f"step {step}: {label} of stage {i} is {parameter.grad}")
    return found


def _unsplit(whole: Sequence[nn.Module], x: Tensor, y: Tensor) -> list[list[Tensor | None]]:
    """The gradients of one microbatch, by stage and parameter."""
    value: Any = x
    auxiliary: Any = 0
    for module in whole:
        module.zero_grad()
        value = module(*arguments(value))
        if isinstance(value, WithLoss):
            auxiliary = auxiliary + value.loss
            value = value.value
    ((MSE(value, y) + auxiliary) / MICROBATCHES).backward()
    return [[None if p.grad is None else p.grad.to_dense() for p in m.parameters()] for m in whole]


def _same(found: Tensor | None, wanted: Sequence[Tensor]) -> bool:
    if found is None or not wanted:
        return found is None and not wanted
    return torch.allclose(found.to_dense(), sum(wanted[1:], wanted[0]), rtol=1e-12, atol=1e-15)
