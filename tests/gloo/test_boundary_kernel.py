"""matmul_send and recv_matmul against F.linear: what they compute, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as every_module

from npu_pipe.runtime.boundary import flatten_local
from npu_pipe.runtime.stage import Stage
from npu_pipe_kernels.boundary import linear_between, matmul_send, recv_matmul
from npu_pipe_kernels.boundary_layer import ends_of, with_ports

ROWS, INPUTS, OUTPUTS = 12, 5, 7


class Told:
    """A side of tiles that end at `ends`. What comes is written when it is waited for: `whole` into
    `memory`; what leaves is looked at when it is sent."""

    def __init__(self, ends: Sequence[int], memory: Tensor | None = None) -> None:
        self.ends = ends
        self.memory = memory
        self.whole = None if memory is None else memory.clone()
        self.there = 0
        self.made: Tensor | None = None
        self.sent: list[tuple[int, Tensor]] = []
        self.log: list[str] = []
        if memory is not None:
            memory.fill_(float("nan"))

    def arriving(self) -> Sequence[int]:
        return self.ends if self.memory is not None else ()

    def wait(self, end: int) -> None:
        if self.memory is not None and self.whole is not None:
            rows, whole = (x.view(-1, x.shape[-1]) for x in (self.memory, self.whole))
            rows[self.there : end] = whole[self.there : end]
            self.there = max(self.there, end)
            self.log.append(f"wait {end}")

    def leaving(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        if self.memory is not None:
            return ()
        self.made, self.needs_grad = made, needs_grad
        made.fill_(float("nan"))
        return self.ends

    def send(self, end: int) -> None:
        if self.made is not None:
            rows = self.made.view(-1, self.made.shape[-1])
            self.sent.append((end, rows[:end].clone()))
            assert rows[end:].isnan().all(), "nothing was made before its turn"
            self.log.append(f"send {end}")


def inputs(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(*(shape or (ROWS,)), INPUTS, dtype=torch.float64)
    weight = torch.randn(OUTPUTS, INPUTS, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(OUTPUTS, dtype=torch.float64, requires_grad=True)
    return x, weight, bias


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(y, inputs, torch.randn_like(y)))


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(12,), (3, 4), (2, 2, 3)])
@pytest.mark.parametrize("ends", [(12,), (4, 8, 12), (0, 0, 1, 12, 12), (5, 12)])
def test_rows_leave_as_they_are_made(ends: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x, weight, bias = inputs(*shape)
    side = Told(ends)
    y = matmul_send(x.requires_grad_(), weight, bias, side)
    wanted = F.linear(x, weight, bias)
    same([y], [wanted])
    assert [end for end, _ in side.sent] == list(ends)
    for end, rows in side.sent:
        same([rows], [wanted.detach().view(-1, OUTPUTS)[:end]])
    assert side.needs_grad
    side.made = None
    same(gradients(y, x, weight, bias), gradients(wanted, x, weight, bias))


@pytest.mark.parametrize("shape", [(12,), (3, 4)])
@pytest.mark.parametrize("ends", [(12,), (4, 8, 12), (0, 0, 1, 12, 12)])
def test_rows_are_used_as_they_come(ends: tuple[int, ...], shape: tuple[int, ...]) -> None:
    x, weight, bias = inputs(*shape)
    wanted = F.linear(x, weight, bias)
    side = Told(ends, memory=x)
    same([recv_matmul(x, weight, bias, side)], [wanted])
    assert side.log == [f"wait {end}" for end in ends]


def test_a_layer_between_two_boundaries_passes_each_tile_on_at_once() -> None:
    x, weight, bias = inputs()
    wanted = F.linear(x, weight, bias)
    before, after = Told((3, 6, 9, 12), memory=x), Told((6, 12))
    before.log = after.log = log = []
    same([linear_between(x, weight, bias, before=before, after=after)], [wanted])
    assert log == ["wait 6", "send 6", "wait 12", "send 12"]


def test_a_gradient_is_used_as_it_comes_and_passed_on_in_tiles() -> None:
    """Backwards the sides change places; the weight's gradient is made of all rows, at the end."""
    x, weight, bias = inputs()
    x.requires_grad_()
    wanted = F.linear(x, weight, bias)
    gradient = torch.randn_like(wanted)
    theirs = torch.autograd.grad(wanted, (x, weight, bias), gradient)
    before, after = Closed(), Closed()
    y = linear_between(x, weight, bias, before=before, after=after)
    before.side, after.side = Told((4, 12)), Told((4, 8, 12), memory=gradient)
    before.side.log = after.side.log = log = []
    same(torch.autograd.grad(y, (x, weight, bias), gradient), theirs)
    assert log[:4] == ["wait 4", "send 4", "wait 12", "send 12"]


class Closed:
    """Until it is given a side."""

    def __init__(self) -> None:
        self.side = Told(())

    def arriving(self) -> Sequence[int]:
        return self.side.arriving()

    def wait(self, end: int) -> None:
        self.side.wait(end)

    def leaving(self, made: Tensor, *, needs_grad: bool) -> Sequence[int]:
        return self.side.leaving(made, needs_grad=needs_grad)

    def send(self, end: int) -> None:
        self.side.send(end)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_cast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_it_is_f_linear_where_no_side_is_open(
    dtype: torch.dtype, is_cast: bool, has_bias: bool
) -> None:
    """Bit for bit, forward and backward; also under autocast, which leaves float64 as it is."""
    tensors = [t.detach().to(dtype).requires_grad_() for t in inputs(3, 4)]
    given = tensors if has_bias else tensors[:2]
    own = tensors[2] if has_bias else None
    found = []
    for product in (lambda *given: matmul_send(*given, Told(())), F.linear):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            y = product(tensors[0], tensors[1], own)
        found.append([y, *torch.autograd.grad(y.sum(), given)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_the_weight_gradient_waits_for_w() -> None:
    """I makes the input's only, and W the same bits as a whole backward."""
    layer = nn.Linear(INPUTS, OUTPUTS, dtype=torch.float64)
    x, _, _ = inputs()
    found = []
    for split in (False, True):
        side = Told(())
        layer.zero_grad()
        stage = Stage(0, with_ports(layer, before=None, after=side))  # type: ignore[arg-type]
        meta, tensors = flatten_local(x.clone())
        meta = meta._replace(leaves=(meta.leaves[0]._replace(needs_grad=True),))
        stage.keep(0, [stage.forward(0, meta, tensors)])
        seed = torch.ones(ROWS, OUTPUTS, dtype=torch.float64)
        if split:
            (of_x,) = stage.input_backward(0, [seed])
            assert layer.weight.grad is None
            assert layer.bias.grad is None
            stage.weight_backward(0)
        else:
            (of_x,) = stage.backward(0, [seed])
        found.append([of_x.clone(), layer.weight.grad.clone(), layer.bias.grad.clone()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("is_cast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("ends", [(), (5, 12)], ids=["one piece", "tiles"])
def test_a_sum_leaves_as_its_product_is_made(ends: tuple[int, ...], is_cast: bool) -> None:
    """In autocast a sum is wider than its product."""
    x, weight, bias = (tensor.detach().float().requires_grad_() for tensor in inputs(3, 4))
    residual = torch.randn(3, 4, OUTPUTS, requires_grad=True)
    given = (x, weight, bias, residual)
    side, found = Told(ends), []
    for product in (
        lambda x, weight, bias, residual: matmul_send(x, weight, bias, side, residual),
        lambda x, weight, bias, residual: residual + F.linear(x, weight, bias),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_cast):
            y = product(*given)
        seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        side.made = None
        found.append([y, *torch.autograd.grad(y, given, seed)])
    assert [end for end, _ in side.sent] == list(ends or (ROWS,))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5 if not is_cast else 1e-2, atol=1e-6)


class Block(nn.Module):
    """norm, then up(tanh(down)), and the way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"down": nn.Linear(6, 4), "up": nn.Linear(4, 6)})
        self.dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        residual, rows = self.before_last(x)
        made: Tensor = residual + self.inner["up"](rows)
        return made

    def last_linear(self) -> nn.Module | None:
        return self.inner["up"]

    def before_last(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, F.dropout(self.inner["down"](x).tanh(), 0.5, self.training)


def test_a_block_that_says_how_it_ends_is_as_it_was() -> None:
    stage = nn.Sequential(nn.Linear(6, 6), Block()).eval()
    assert ends_of(stage) == (stage[0], stage[1].inner["up"])
    made = with_ports(stage, before=None, after=Told((20, 50)))  # type: ignore[arg-type]
    x = torch.randn(50, 6)
    same([made(x)], [stage(x)])
    assert list(made.state_dict()) == list(stage.state_dict())
    assert all(
        ours is theirs for ours, theirs in zip(made.parameters(), stage.parameters(), strict=True)
    )
    assert not torch.equal(made.train()(x), made(x)), "the mode of what was given follows"
    stage.eval()
    assert torch.equal(made(x), made(x))


def test_a_block_that_ends_otherwise_or_is_hooked_is_left_alone() -> None:
    class Recomputed(Block):
        def last_linear(self) -> None:
            return None

    assert ends_of(nn.Sequential(Recomputed())).after is None
    for place in ("", "inner", "inner.up"):
        block = Block()
        block.get_submodule(place).register_forward_hook(lambda module, given, made: made)
        assert ends_of(nn.Sequential(block)).after is None, place
    block = Block()
    block.inner["down"].register_forward_hook(lambda module, given, made: made)
    assert ends_of(block).after is block.inner["up"], "it sees what it always saw"


def test_a_hook_on_every_module_leaves_all_of_them_whole() -> None:
    """It saw rows that were not there yet, and what it made of them had left."""
    stage = nn.Sequential(nn.Linear(2, 2))
    for register in (
        every_module.register_module_forward_hook,
        every_module.register_module_forward_pre_hook,
        every_module.register_module_full_backward_hook,
        every_module.register_module_full_backward_pre_hook,
    ):
        handle = register(lambda *given: None)
        try:
            assert ends_of(stage) == (None, None)
        finally:
            handle.remove()
    assert ends_of(stage) == (stage[0], stage[0])


def test_a_stage_with_ports_has_the_same_parameters_by_the_same_names() -> None:
    stage = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 3, bias=False)))
    made = with_ports(stage, before=Told(()), after=Told(()))  # type: ignore[arg-type]
    ours, theirs = dict(made.named_parameters()), dict(stage.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in ours)
    assert list(made.state_dict()) == list(stage.state_dict())
    assert type(stage[0]) is nn.Linear, "the one that was given stays as it is"
    stage[0].weight = nn.Parameter(torch.zeros(4, 3))  # as moving it to a device may do
    assert made[0].weight is stage[0].weight
    assert not with_ports(stage.eval(), before=None, after=Told(())).training  # type: ignore[arg-type]


def test_a_layer_that_may_do_more_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    hooked, normed = nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda module, given, made: made * 2)
    for last in (Scaled(2, 2), hooked, normed, nn.Tanh()):
        first = nn.Linear(2, 2)
        assert ends_of(nn.Sequential(first, last)) == (first, None)
        assert ends_of(nn.Sequential(last, first)) == (None, first)
    assert ends_of(nn.Sequential()) == (None, None)
