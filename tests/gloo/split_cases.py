"""Modules whose backward is cut in two, each with an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from npu_pipe.runtime.weight_half import WeightHalf


class Case(NamedTuple):
    """put_off: how many layers leave weights to W."""

    build: Callable[[], nn.Module]
    value: Any
    put_off: int


class Function(nn.Module):
    """A module of a function and its parameters."""

    def __init__(self, function: Callable[..., Tensor], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Any) -> Tensor:
        return self.function(self, *args)


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


class PutsOff(torch.autograd.Function):
    """A product with a bias that says how its weights can wait."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(weight.dtype)
        ctx.save_for_backward(x, weight)
        ctx.weight_half = WeightHalf(1, 2)
        y = x @ weight.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        CountsBackwards.calls += 1
        x, weight = ctx.saved_tensors
        gradient = gradient.to(weight.dtype)
        _, needs_weight, needs_bias = ctx.needs_input_grad

        def formula(gradient: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
            return (
                gradient.t() @ x if needs_weight else None,
                gradient.sum(0) if needs_bias else None,
            )

        return gradient @ weight, *ctx.weight_half.gradients(formula, gradient, x)


def puts_off(self: Any, x: Tensor) -> Tensor:
    hidden = PutsOff.apply(self.first(x), self.weight, self.bias).tanh()
    y: Tensor = PutsOff.apply(hidden, self.weight, None)
    return y


def half_frozen() -> nn.Module:
    module = Function(
        lambda self, x: PutsOff.apply(x, self.weight, self.bias),
        weight=random(5, 4),
        bias=random(5),
    )
    module.weight.requires_grad_(False)
    return module


def tied(self: Any, ids: Tensor) -> Tensor:
    return F.linear(F.embedding(ids, self.weight) * self.gain, self.weight)


def products(self: Any, x: Tensor) -> Tensor:
    """The weight in every place that a product has, and a bias that is also added by itself."""
    y = x @ self.a + torch.matmul(x, self.a) + torch.einsum("bi,ij->bj", x, self.a)
    z = (self.c @ x.t()).t() + torch.bmm(self.d, x[None]).sum()
    return torch.addmm(self.b, x, self.a) + y + self.b + z


def norm_by_hand(self: Any, x: Tensor) -> Tensor:
    return self.linear(self.gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)))


def through_complex(self: Any, x: Tensor) -> Tensor:
    return self.linear(torch.complex(x, x.flip(0))).angle()


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.first(x.mul_(2))
    y[:, 1:].mul_(self.gain)
    y.add_(1).relu_()
    return self.second(y[:, ::2])


def checkpointed(self: Any, x: Tensor, *, reentrant: bool) -> Tensor:
    y: Tensor = self.second(checkpoint(self.first, x, use_reentrant=reentrant))
    return y


def packed(self: Any, x: Tensor) -> Tensor:
    """Saved tensors that somebody has moved away."""
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        y = self.first(x)
    return self.second(y)


def with_constants(self: Any, x: Tensor, scale: float, shift: None, keep: bool) -> Tensor:
    assert shift is None
    assert keep
    return self.linear(x) * scale


def same_gradient(self: Any, x: Tensor) -> Tensor:
    """What comes back to the layer is, in memory, what becomes the gradient of `shift`."""
    shift = self.shift.view(-1)
    return (self.linear(x).view(-1) + shift).view(3, 5)


def frozen_first() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5))
    module[0].requires_grad_(False)
    return module


def frozen_bias() -> nn.Module:
    module = nn.Linear(4, 5)
    module.bias.requires_grad_(False)
    return module


def whole(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    return y[0] if isinstance(y, tuple) else y


def attended(self: Any, x: Tensor) -> Tensor:
    y, weights = self.inner(x, x, x, need_weights=True)
    return y + weights.mean()


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


ROWS, IMAGES, WORDS = random(3, 4), random(2, 4, 8, 8), random(2, 5, 8)
IDS = torch.tensor([[1, 2, 3], [3, 3, 9]])

CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(4, 5), ROWS, 1),
    "linear without bias": Case(lambda: nn.Linear(4, 5, bias=False), ROWS, 1),
    "linear of words": Case(lambda: nn.Linear(8, 5), WORDS, 1),
    "linear of words without bias": Case(lambda: nn.Linear(8, 5, bias=False), WORDS, 1),
    "linear of one row": Case(lambda: nn.Linear(4, 5), ROWS[0], 1),
    "frozen bias": Case(frozen_bias, ROWS, 1),
    "linear in double precision": Case(
        lambda: nn.Linear(4, 5).double(), random(3, 4, dtype=torch.float64), 1
    ),
    "complex linear": Case(
        lambda: Function(through_complex, linear=nn.Linear(4, 5, dtype=torch.complex64)), ROWS, 1
    ),
    "half precision": Case(lambda: nn.Linear(4, 5).half(), ROWS.half(), 1),
    "layers, one of them in place": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(inplace=True), nn.LayerNorm(5), nn.Linear(5, 5)
        ),
        ROWS,
        3,
    ),
    "embedding and rms norm": Case(
        lambda: nn.Sequential(nn.Embedding(10, 4), nn.RMSNorm(4), nn.Linear(4, 3)), IDS, 3
    ),
    "padded embedding": Case(lambda: nn.Embedding(10, 4, padding_idx=3), IDS, 1),
    "embedding by frequency": Case(
        lambda: nn.Embedding(10, 4, scale_grad_by_freq=True, max_norm=1.0), IDS, 1
    ),
    "sparse embedding": Case(
        lambda: nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 3)), IDS, 1
    ),
    "bag of embeddings": Case(
        lambda: nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 3)), IDS, 1
    ),
    "norm by hand": Case(
        lambda: Function(norm_by_hand, gain=torch.randn(4), linear=nn.Linear(4, 4)), ROWS, 2
    ),
    "convolution and norms": Case(
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GroupNorm(2, 4)
        ),
        IMAGES,
        2,  # batch norm needs the same sums for its input
    ),
    "convolutions": Case(
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, stride=2, groups=2, bias=False),
            nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1),
            nn.InstanceNorm2d(6, affine=True),
        ),
        IMAGES,
        2,
    ),
    "convolution of rows": Case(lambda: nn.Conv1d(5, 3, 3, padding="same", dilation=2), WORDS, 1),
    "bilinear": Case(
        lambda: Function(lambda self, x: self.inner(x, x), inner=nn.Bilinear(4, 4, 2)), ROWS, 0
    ),
    "a shared weight": Case(
        lambda: Function(tied, weight=torch.randn(10, 4), gain=torch.ones(4)), IDS, 3
    ),
    "a layer used twice": Case(
        lambda: Function(lambda self, x: self.inner(self.inner(x).tanh()), inner=nn.Linear(4, 4)),
        ROWS,
        2,
    ),
    "a weight that is also added": Case(
        lambda: Function(
            lambda self, x: self.inner(x) + self.inner.weight.sum(), inner=nn.Linear(4, 4)
        ),
        ROWS,
        1,
    ),
    "products": Case(
        lambda: Function(
            products,
            a=torch.randn(4, 5),
            b=torch.randn(5),
            c=torch.randn(5, 4),
            d=torch.randn(1, 3, 3),
        ),
        ROWS,
        6,
    ),
    "a weight by weight norm": Case(
        lambda: nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)), ROWS, 2
    ),
    "a weight by spectral norm": Case(lambda: spectral_norm(nn.Linear(4, 4)), ROWS, 1),
    "a frozen layer": Case(frozen_first, ROWS, 1),
    "checkpointing": Case(
        lambda: Function(
            lambda self, x: checkpointed(self, x, reentrant=False),
            first=nn.Linear(4, 4),
            second=nn.Linear(4, 4),
        ),
        ROWS,
        1,
    ),
    "reentrant checkpointing": Case(
        lambda: Function(
            lambda self, x: checkpointed(self, x, reentrant=True),
            first=nn.Linear(4, 4),
            second=nn.Linear(4, 4),
        ),
        ROWS,
        0,  # autograd does it whole or not at all
    ),
    "saved tensors elsewhere": Case(
        lambda: Function(packed, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), ROWS, 1
    ),
    "a custom function": Case(
        lambda: Function(
            lambda self, x: CountsBackwards.apply(self.linear(x), self.weight),
            weight=torch.randn(3, 4),
            linear=nn.Linear(4, 4),
        ),
        ROWS,
        1,
    ),
    "custom functions that put their weights off": Case(
        lambda: Function(
            puts_off, first=nn.Linear(4, 4), weight=random(4, 4), bias=random(4, seed=2)
        ),
        ROWS,
        3,
    ),
    "a custom function with a frozen weight": Case(half_frozen, ROWS, 1),
    "a custom function whose weight has another use": Case(
        lambda: Function(
            lambda self, x: PutsOff.apply(x, self.weight, None) + self.weight.sum(),
            weight=random(4, 4),
        ),
        ROWS,
        0,
    ),
    "a custom function of a weight that is data": Case(
        lambda: Function(
            lambda self, x: PutsOff.apply(self.linear(x), x[:, :3] * self.gain, None),
            linear=nn.Linear(4, 3),
            gain=random(3, seed=3),
        ),
        ROWS,
        2,  # the linear layer and the product with the gain
    ),
    "a checkpointed custom function": Case(
        lambda: Function(
            lambda self, x: checkpointed(self, x, reentrant=False),
            first=Function(lambda self, x: PutsOff.apply(x, self.w, None), w=random(4, 4)),
            second=nn.Linear(4, 4),
        ),
        ROWS,
        2,
    ),
    "a weight by a custom function": Case(
        lambda: Function(
            lambda self, x: F.linear(x, CountsBackwards.apply(self.weight, self.scale)),
            weight=torch.randn(3, 4),
            scale=torch.randn(3, 4),
        ),
        ROWS,
        1,
    ),
    "attention": Case(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True), WORDS, 6
    ),
    "attention with its weights": Case(
        lambda: Function(attended, inner=nn.MultiheadAttention(8, 2, batch_first=True)), WORDS, 2
    ),
    "lstm": Case(lambda: Function(whole, inner=nn.LSTM(8, 4, batch_first=True)), WORDS, 0),
    "gru": Case(lambda: Function(whole, inner=nn.GRU(8, 4, batch_first=True)), WORDS, 6),
    "in place": Case(
        lambda: Function(
            in_place, first=nn.Linear(4, 5), gain=torch.randn(4), second=nn.Linear(3, 2)
        ),
        ROWS,
        2,
    ),
    "one gradient for two": Case(
        lambda: Function(same_gradient, linear=nn.Linear(4, 5), shift=torch.randn(3, 5)),
        ROWS,
        1,
    ),
    "constants beside a tensor": Case(
        lambda: Function(with_constants, linear=nn.Linear(4, 5)), (ROWS, 0.5, None, True), 1
    ),
    "no parameters": Case(nn.Tanh, ROWS, 0),
}
