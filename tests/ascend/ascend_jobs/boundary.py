"""Jobs about what may cross a boundary between NPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from npu_pipe import Pipeline, World, build_schedule

TYPES = (
    *(torch.bfloat16, torch.float16, torch.float32),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.t()


class _Everything(nn.Module):
    """Rank 0 gives one tensor of each type; rank 1 says of which types they are."""

    def __init__(self, types: tuple[torch.dtype, ...], *, first: bool) -> None:
        super().__init__()
        self.types = types
        self.first = first

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        if self.first:
            return tuple(values[0].to(dtype) for dtype in self.types)
        assert tuple(value.dtype for value in values) == self.types
        return tuple(value.cpu().float() for value in values)


def transposed(world: World, *, microbatches: int) -> None:
    place = torch.device("npu", world.rank)
    x = torch.arange(6.0 * microbatches).reshape(2 * microbatches, 3)
    output = _predict(world, _Transposed(), x.to(place), microbatches)
    if output is not None:
        wanted = torch.cat([each.t().t() for each in x.chunk(microbatches)])
        assert torch.equal(output.cpu(), wanted)


def types(world: World, *, microbatches: int) -> None:
    x = torch.tensor([[0.0], [1.0]] * microbatches, device=torch.device("npu", world.rank))
    output = _predict(world, _Everything(TYPES, first=world.rank == 0), x, microbatches)
    if output is not None:
        assert len(output) == len(TYPES)
        assert all(torch.equal(value, x.cpu()) for value in output)


def complex_number(world: World, *, microbatches: int) -> None:
    place = torch.device("npu", world.rank)
    stage = _Everything((torch.complex64,), first=world.rank == 0)
    _predict(world, stage, torch.ones(microbatches, 1, device=place), microbatches)


class _Odd(nn.Module):
    """Rank 0 gives tensors without numbers or without dimensions, and one of doubles; rank 1
    says what it got."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        (x, *others) = values
        if self.first:
            return x, x[:0], x.new_zeros(2, 0, 3), x.sum(), x.double()
        none, empty, total, wide = others
        assert (none.shape, empty.shape, total.shape) == ((0, 1), (2, 0, 3), ())
        assert wide.dtype is torch.float32, "there are no doubles"
        return x + total + wide - wide


def odd(world: World, *, microbatches: int) -> None:
    x = torch.ones(2 * microbatches, 1, device=torch.device("npu", world.rank))
    output = _predict(world, _Odd(first=world.rank == 0), x, microbatches)
    if output is not None:
        assert torch.equal(output.cpu(), torch.full((2 * microbatches, 1), 3.0))


class _OnHost(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cpu()


def on_host(world: World, *, microbatches: int) -> None:
    x = torch.ones(2 * microbatches, 1, device=torch.device("npu", world.rank))
    stage = _OnHost() if world.rank == 0 else nn.Identity()
    _predict(world, stage, x, microbatches)


def _predict(world: World, stage: nn.Module, x: Tensor, microbatches: int) -> object:
    schedule = build_schedule("gpipe", ranks=world.size, microbatches=microbatches)
    stage.register_parameter("anchor", nn.Parameter(torch.zeros((), device=x.device)))
    with Pipeline({world.rank: stage}, schedule=schedule, loss=None, world=world) as pipe:
        return pipe.predict(x)
