"""Backwards in two halves give the gradients of the whole one, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.stage import Stage


class Tied(nn.Module):
    """One weight as embedding and as head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 4))
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(F.embedding(ids, self.weight) * self.gain, self.weight)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(checkpoint(self.first, x, use_reentrant=self.reentrant))
        return y


class Products(nn.Module):
    """The weight in every place that a product has."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a
        y = y + torch.matmul(x, self.a) + torch.einsum("bi,ij->bj", x, self.a)
        return torch.addmm(self.b, x, self.a) + y + self.b


class CountsBackwards(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        CountsBackwards.calls += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = CountsBackwards.apply(self.linear(x), self.weight)
        return y


def frozen_first() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5))
    module[0].requires_grad_(False)
    return module


ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[1, 2, 3], [3, 3, 9]])
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
WORDS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, int]] = {
    # module, input, how many layers have their weights put off
    "linear": (lambda: nn.Linear(4, 5), ROWS, 1),
    "linear without bias": (lambda: nn.Linear(4, 5, bias=False), ROWS, 1),
    "layers, one of them in place": (
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(inplace=True), nn.LayerNorm(5), nn.Linear(5, 5)
        ),
        ROWS,
        3,
    ),
    "embedding and rms norm": (
        lambda: nn.Sequential(nn.Embedding(10, 4), nn.RMSNorm(4), nn.Linear(4, 3)),
        IDS,
        3,
    ),
    "convolution and norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GroupNorm(2, 4)
        ),
        IMAGES,
        3,
    ),
    "transposed convolution": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), IMAGES, 1),
    "a shared weight": (Tied, IDS, 2),
    "products": (Products, ROWS, 4),
    "a frozen layer": (frozen_first, ROWS, 1),
    "checkpointing": (lambda: Checkpointed(reentrant=False), ROWS, 1),
    "reentrant checkpointing": (lambda: Checkpointed(reentrant=True), ROWS, 1),
    "a custom function": (Custom, ROWS, 1),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
        WORDS,
        4,
    ),
    "no parameters": (nn.Tanh, ROWS, 0),
}


def backward_whole(module: nn.Module, x: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    y = module(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return x.grad, [parameter.grad for parameter in module.parameters()]


def backward_in_halves(
    module: nn.Module, x: Tensor
) -> tuple[Tensor | None, list[Tensor | None], int]:
    """Through a Stage, as the executor does it; also how many layers were put off."""
    stage = Stage(0, module)
    value = x.clone().requires_grad_() if x.is_floating_point() else x
    meta, _ = flatten_value(value, "the input")
    y = stage.forward(0, meta, [value.detach()])
    stage.keep(0, [y])
    found = stage.input_backward(0, [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)])
    put_off = len(stage._deferred[0])
    stage.weight_backward(0)
    assert stage.held == 0
    return found[0] if found else None, [p.grad for p in module.parameters()], put_off


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_halves_give_the_gradients_of_the_whole(case: str, autocast: bool) -> None:
    build, x, layers = CASES[case]
    torch.manual_seed(0)
    module = build()
    whole = copy.deepcopy(module)
    CountsBackwards.calls = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, our_gradients, put_off = backward_in_halves(module, x)
        calls = CountsBackwards.calls
        theirs, their_gradients = backward_whole(whole, x)
    assert put_off == layers
    assert calls == CountsBackwards.calls - calls, "no backward runs twice"
    for our, their in zip((ours, *our_gradients), (theirs, *their_gradients), strict=True):
        assert (our is None) == (their is None)
        if our is not None and their is not None and autocast:
            # Autocast casts an input once for all its uses: the sum of their gradients is then
            # rounded to bfloat16 in between, here it is not.
            assert torch.allclose(our, their, rtol=1e-2)
        elif our is not None and their is not None:
            assert torch.equal(our, their)
    for our_buffer, their_buffer in zip(module.buffers(), whole.buffers(), strict=True):
        assert torch.equal(our_buffer, their_buffer), "running statistics count once"


def test_weights_have_no_gradient_before_their_half() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    stage = Stage(0, module)
    meta, _ = flatten_value(ROWS, "the input")
    y = stage.forward(0, meta, [ROWS])
    stage.keep(0, [y])
    stage.input_backward(0, [torch.ones_like(y)])
    assert all(parameter.grad is None for parameter in module.parameters())
    stage.weight_backward(0)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_hooks_of_parameters_run_once_in_the_weight_half() -> None:
    module = nn.Linear(4, 5)
    seen: list[str] = []
    module.weight.register_hook(lambda gradient: seen.append("gradient"))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    stage = Stage(0, module)
    meta, _ = flatten_value(ROWS, "the input")
    y = stage.forward(0, meta, [ROWS])
    stage.keep(0, [y])
    stage.input_backward(0, [torch.ones_like(y)])
    assert seen == []
    stage.weight_backward(0)
    assert seen == ["gradient", "accumulated"]


def test_outside_a_stage_layers_are_untouched() -> None:
    module = nn.Linear(4, 5)
    stage = Stage(0, module)
    meta, _ = flatten_value(ROWS, "the input")
    stage.forward(0, meta, [ROWS])
    module(ROWS).sum().backward()
    assert module.weight.grad is not None
