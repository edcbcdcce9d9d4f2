"""Parallel layers as people use them, drawn at random, against nn.Linear in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jobs.fused import DTYPES, bound, close, drawn, tensor_ranks
from npu_pipe import World
from npu_pipe.launch.mesh import Mesh
from npu_pipe.ops.operators import Operators
from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.stage import Stage
from npu_pipe_kernels.linear import ColumnParallelLinear, RowParallelLinear
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.sharding import Keep, Sequence, Sharding

HABITS: Mapping[str, tuple[Any, ...]] = {
    "layer": (ColumnParallelLinear, RowParallelLinear),
    "sequence": tuple(Sequence),
    "keep": tuple(Keep),
    "shape": ((3,), (0,), (1,), (2, 3), (0, 2), (2, 3, 2)),  # rows of a rank, and what is between
    "bias": (True, False),
    "x_form": ("plain", "transposed", "sliced", "expanded"),
    "dy_form": ("plain", "transposed", "sliced", "expanded"),
    "around": ("nothing", "checkpoint", "reentrant", "hooks"),
    "is_split": (False, True),
    "frozen": ((), ("weight",), ("x",), ("weight", "bias"), ("bias",), ("x", "bias")),
    "collects": ("grad", "main_grad", "float32 grad"),
    "uses": (1, 2),  # of the layer, in one stage
    "tied": (False, True),  # with another layer of the stage
}
INPUTS, OUTPUTS = 5, 3  # of a rank


def as_formed(value: Tensor, form: str) -> Tensor:
    """The same values in other memory."""
    if form == "transposed":
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    if form == "sliced":
        return torch.stack((value, torch.full_like(value, float("nan"))), -1)[..., 0]
    return value.clone()


class Layered(nn.Module):
    """Its layers one after the other, each as often as it is used, summed up."""

    def __init__(self, layers: list[nn.Module], uses: int, around: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.uses = uses
        self.around = around
        if around == "hooks":
            for layer in layers:
                layer.register_forward_pre_hook(lambda module, given: (given[0] * 1,))
                layer.register_full_backward_hook(lambda module, of_x, of_y: None)

    def forward(self, x: Tensor) -> Tensor:
        if self.around in ("checkpoint", "reentrant"):
            again: Tensor = checkpoint(self._run, x, use_reentrant=self.around == "reentrant")
            return again
        return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        total: Tensor = sum(
            layer(x * (use + 1)) for use in range(self.uses) for layer in self.layers
        )
        return total


def habits(world: World, *, provider: str, dtype: str, seed: int, count: int) -> list[str]:
    """What went wrong, with the habits."""
    rng, wrong = Random(seed), []
    with tensor_ranks(world, Mesh(tp=world.size), "cpu") as ranks:
        operators = Operators(ranks, providers(), wanted=provider)
        for _ in range(count):
            habit = {name: rng.choice(values) for name, values in HABITS.items()}
            if habit["around"] in ("reentrant", "hooks") and "x" in habit["frozen"]:
                continue  # torch itself makes no gradients then, or warns
            try:
                _try(operators, DTYPES[dtype], **habit)
            except (AssertionError, RuntimeError, TypeError) as error:
                wrong.append(f"{habit}: {type(error).__name__}: {error}")
        return wrong


def _try(
    operators: Operators,
    dtype: torch.dtype,
    *,
    layer: Callable[..., Any],
    sequence: Sequence,
    keep: Keep,
    shape: tuple[int, ...],
    bias: bool,
    x_form: str,
    dy_form: str,
    around: str,
    is_split: bool,
    frozen: tuple[str, ...],
    collects: str,
    uses: int,
    tied: bool,
) -> None:
    ranks = operators.ranks
    n, me, rows = ranks.size, ranks.rank, shape[0]
    is_column = layer is ColumnParallelLinear
    whole = nn.Linear(n * INPUTS, n * OUTPUTS, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(whole.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=number).to(dtype) / 4)
    every = drawn(n * rows, *shape[1:], n * INPUTS, seed=2).to(dtype).double()
    of_every = drawn(n * rows, *shape[1:], n * OUTPUTS, seed=3).to(dtype).double()
    if x_form == "expanded":
        every = every[..., :1].expand_as(every)
    if dy_form == "expanded":
        of_every = torch.ones_like(of_every)
    every.requires_grad_()
    Layered([whole] * (1 + tied), uses, "nothing")(every).backward(of_every)

    own_rows = (lambda t: t[me * rows : (me + 1) * rows]) if sequence is Sequence.SHARDED else _all
    own_columns = lambda t: t.chunk(n, -1)[me]  # noqa: E731
    of_x, of_y = (own_rows, own_columns) if is_column else (own_columns, own_rows)
    make = partial(layer, n * INPUTS, n * OUTPUTS, Sharding(operators, sequence, keep), bias=bias)
    cut = make().to(dtype)
    with torch.no_grad():
        for name, parameter in cut.named_parameters():
            parameter.copy_(cut.cut(name, whole.get_parameter(name)))
            parameter.requires_grad_(name not in frozen)
    layers = [cut]
    if tied:
        layers.append(make().to(dtype))
        for name, parameter in cut.named_parameters():
            setattr(layers[1], name, parameter)
    if collects == "main_grad":
        cut.weight.main_grad = torch.zeros(cut.weight.shape)
    elif collects == "float32 grad":
        cut.weight.grad_dtype = torch.float32
    x = of_x(every.detach()).to(dtype)
    x = x[..., :1].clone().expand_as(x) if x_form == "expanded" else as_formed(x, x_form)
    dy = of_y(of_every).to(dtype)
    dy = dy.new_ones(1).expand_as(dy) if dy_form == "expanded" else as_formed(dy, dy_form)

    stage = Stage(0, Layered(layers, uses, around))
    meta, _ = flatten_value(x.detach().clone().requires_grad_("x" not in frozen), "the input")
    out = stage.forward(0, meta, [x])
    if not out.requires_grad:
        return
    stage.keep(0, [out])
    found = stage.input_backward(0, [dy]) if is_split else stage.backward(0, [dy])
    if is_split:
        stage.weight_backward(0)
    assert stage.held == 0
    limit = bound(dtype, n) * 2 * uses * (1 + tied)
    if "x" not in frozen:
        close(found[0], of_x(every.grad), limit)
    for name, parameter in cut.named_parameters():
        grad = parameter.grad
        if name == "weight" and collects == "main_grad":
            assert grad is None, "it is collected in main_grad"
            grad = parameter.main_grad
            assert name not in frozen or not grad.any()
        if name not in frozen:
            assert grad is not None, name
            close(grad, cut.cut(name, whole.get_parameter(name).grad), limit)
        elif collects != "main_grad":
            assert grad is None, name


def _all(value: Tensor) -> Tensor:
    return value
