"""Backwards in two halves give the gradients of the whole one, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from split_cases import CASES, ROWS, CountsBackwards, Function, PutsOff, random
from torch import Tensor, nn

from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.stage import Stage

pytestmark = pytest.mark.timeout(60)

Gradients = list[Tensor | None]


def microbatches(value: Any) -> list[Any]:
    """Three of them, the first as it is; ids are only permuted."""

    def change(tensor: Tensor, i: int) -> Tensor:
        return tensor * (1 + i) if tensor.is_floating_point() or tensor.is_complex() else tensor + 0

    if isinstance(value, tuple):
        return [(change(value[0], i), *value[1:]) for i in range(3)]
    return [change(value, i) for i in range(3)]


def seed_like(output: Tensor) -> Tensor:
    line = torch.linspace(-1, 1, output.numel()).to(output.dtype)
    return line.view_as(output)


def arguments(value: Any) -> tuple[Any, ...]:
    """The arguments, the first of them apart from its memory and with a gradient."""
    first, *rest = value if isinstance(value, tuple) else (value,)
    needs_grad = first.is_floating_point() or first.is_complex()
    return (first.clone().requires_grad_(needs_grad), *rest)


def run_whole(module: nn.Module, values: list[Any]) -> Gradients:
    found = []
    for value in values:
        args = arguments(value)
        entered = args[0] * 1 if args[0].requires_grad else args[0]  # may be changed in place
        y = module(entered, *args[1:])
        with torch.autocast("cpu", enabled=False):
            y.backward(seed_like(y))
        found.append(args[0].grad)
    return found


def run_halves(module: nn.Module, values: list[Any]) -> tuple[Gradients, list[int]]:
    """Through a Stage as the executor does it, with W far behind I; also how many layers were
    put off for each microbatch."""
    stage = Stage(0, module)
    seeds, found, put_off = [], [], []
    for i, value in enumerate(values):
        args = arguments(value)
        meta, tensors = flatten_value(args if len(args) > 1 else args[0], "the input")
        y = stage.forward(i, meta, [tensor.detach() for tensor in tensors])
        stage.keep(i, [y])
        seeds.append(seed_like(y))
    del y
    for i, seed in enumerate(seeds):
        found.extend(stage.input_backward(i, [seed]) or [None])
        put_off.append(len(stage._deferred[i]))
    for i in range(len(values)):
        stage.weight_backward(i)
    assert stage.held == 0
    return found, put_off


def compare(ours: Gradients, theirs: Gradients, check: Callable[[Tensor, Tensor], bool]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert (our is None) == (their is None)
        if our is not None and their is not None:
            assert our.layout == their.layout
            assert check(our.to_dense(), their.to_dense())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("autocast", [False, True])
def test_halves_give_the_gradients_of_the_whole(case: str, autocast: bool) -> None:
    build, value, layers = CASES[case]
    torch.manual_seed(0)
    module = build()
    whole = copy.deepcopy(module)
    values = microbatches(value)
    CountsBackwards.calls = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.manual_seed(1)
        our_inputs, put_off = run_halves(module, values)
        calls = CountsBackwards.calls
        torch.manual_seed(1)
        their_inputs = run_whole(whole, values)
    assert autocast or put_off == [layers] * 3
    assert calls == CountsBackwards.calls - calls, "no backward runs twice"
    ours = [parameter.grad for parameter in module.parameters()]
    theirs = [parameter.grad for parameter in whole.parameters()]
    compare([*our_inputs, *ours], [*their_inputs, *theirs], torch.equal)
    for our_buffer, their_buffer in zip(module.buffers(), whole.buffers(), strict=True):
        assert torch.equal(our_buffer, their_buffer), "running statistics count once"


class Half:
    """A stage between the halves of the backward of ROWS."""

    def __init__(self, module: nn.Module, value: Tensor = ROWS) -> None:
        self.stage = Stage(0, module)
        meta, _ = flatten_value(value.clone().requires_grad_(), "the input")
        y = self.stage.forward(0, meta, [value])
        self.stage.keep(0, [y])
        self.found = self.stage.input_backward(0, [torch.ones_like(y)])

    def end(self) -> None:
        self.stage.weight_backward(0)


WIDE = 257
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": nn.functional.linear,
    "product": lambda x, weight: x @ weight.t(),
    "left factor": lambda x, weight: weight @ x.flatten(0, 1).t(),
    "sum with product": lambda x, weight: torch.addmm(weight[:, 0], x.flatten(0, 1), weight.t()),
    "batched": lambda x, weight: torch.bmm(x, weight.t().expand(2, -1, -1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
def test_large_products_are_rounded_as_by_autograd(
    product: str, is_transposed: bool, dtype: torch.dtype
) -> None:
    """In sizes where the order of a product's factors, and their memory, show in the bits."""
    weight = random(129, WIDE).to(dtype)
    module = Function(
        lambda self, x: PRODUCTS[product](x, self.weight),
        weight=weight.t().contiguous().t() if is_transposed else weight,
    )
    whole = copy.deepcopy(module)
    values = [random(2, 77, WIDE, seed=seed).to(dtype) for seed in range(2)]
    our_inputs, _ = run_halves(module, values)
    their_inputs = run_whole(whole, values)
    compare([*our_inputs, module.weight.grad], [*their_inputs, whole.weight.grad], torch.equal)


def test_weights_have_no_gradient_before_their_half() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))
    half = Half(module)
    assert all(parameter.grad is None for parameter in module.parameters())
    half.end()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_hooks_of_parameters_run_once_in_the_weight_half() -> None:
    module = nn.Linear(4, 5)
    seen: list[str] = []
    module.weight.register_hook(lambda gradient: seen.append("gradient"))
    module.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    accumulator = module.weight.expand_as(module.weight).grad_fn.next_functions[0][0]
    accumulator.register_hook(lambda *gradients: seen.append("node"))  # as Megatron's
    half = Half(module)
    assert seen == []
    half.end()
    assert seen == ["gradient", "accumulated", "node"]


def test_a_hook_that_changes_a_gradient_counts() -> None:
    module = nn.Linear(4, 5)
    whole = copy.deepcopy(module)
    for each in (module, whole):
        each.weight.register_hook(lambda gradient: gradient * 3)
        each.register_forward_hook(
            lambda _, args, y: y.register_hook(lambda gradient: gradient * 2) and None
        )
    half = Half(module)
    half.end()
    x = ROWS.clone().requires_grad_()
    whole(x).sum().backward()
    compare([half.found[0], module.weight.grad], [x.grad, whole.weight.grad], torch.equal)


def test_hooks_of_modules_see_the_gradients_of_the_input_half() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    whole = copy.deepcopy(module)
    seen: dict[nn.Module, list[Tensor]] = {module: [], whole: []}
    for each, gradients in seen.items():
        for layer in each:
            layer.register_full_backward_pre_hook(lambda _, g, to=gradients: to.extend(g))
            layer.register_full_backward_hook(lambda _, g, __, to=gradients: to.extend(g))
    half = Half(module)
    half.end()
    whole(ROWS.clone().requires_grad_()).sum().backward()
    assert len(seen[module]) == 6
    compare(list(seen[module]), list(seen[whole]), torch.equal)
    compare(
        [p.grad for p in module.parameters()], [p.grad for p in whole.parameters()], torch.equal
    )


def test_a_layer_may_be_frozen_between_steps() -> None:
    module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    module[0].requires_grad_(False)
    Half(module).end()
    assert module[0].weight.grad is None
    module[0].requires_grad_(True)
    module[1].requires_grad_(False)
    module.zero_grad()
    Half(module).end()
    assert module[0].weight.grad is not None
    assert module[1].weight.grad is None


def test_a_layer_that_a_microbatch_did_not_use_gets_nothing_of_it() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positive, self.negative = nn.Linear(4, 5), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = (self.positive if x.sum() > 0 else self.negative)(x)
            return y

    module = Either()
    Half(module, ROWS.abs()).end()
    assert module.negative.weight.grad is None
    Half(module, -ROWS.abs()).end()
    assert module.negative.weight.grad is not None
    assert torch.equal(module.positive.weight.grad, -module.negative.weight.grad)


def test_between_the_halves_only_what_w_needs_is_kept() -> None:
    """The input of the nonlinearity, which only I needs, is gone; the layer's input is not."""
    kept: dict[str, weakref.ref[Any]] = {}

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            before = self.first(x)
            after = before.sin()
            kept["before"] = weakref.ref(before.untyped_storage())
            kept["after"] = weakref.ref(after.untyped_storage())
            y: Tensor = self.second(after)
            return y

    half = Half(Layers())
    gc.collect()
    assert kept["before"]() is None
    half.end()


def test_a_buffer_that_is_written_to_before_w_is_told() -> None:
    """Its weight gradients would silently be those of a later microbatch."""

    class Reuses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)
            self.register_buffer("place", torch.zeros(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.place = self.place.detach().copy_(x)
            y: Tensor = self.linear(self.place)
            return y

    module = Reuses()
    half = Half(module)
    module(ROWS)
    with pytest.raises(DataError, match="not written to before its weight gradients"):
        half.end()


def test_a_custom_functions_weights_wait_and_what_it_does_not_need_is_freed() -> None:
    kept: list[weakref.ref[Any]] = []

    def call(self: Any, x: Tensor) -> Tensor:
        y = PutsOff.apply(x * 2, self.weight, None)
        kept.append(weakref.ref(y.untyped_storage()))
        return y.sin()

    module = Function(call, weight=random(4, 4))
    half = Half(module)
    gc.collect()
    assert module.weight.grad is None
    assert kept[0]() is None
    half.end()
    assert module.weight.grad is not None


def test_a_gradient_added_to_a_parameter_elsewhere_does_not_spoil_a_custom_functions() -> None:
    """What comes back to the function becomes `shift.grad` itself, to which I of the next adds."""

    def call(self: Any, x: Tensor) -> Tensor:
        return PutsOff.apply(x, self.weight, None).view(-1) + self.shift.view(-1)

    module = Function(call, weight=random(5, 4), shift=random(3, 5))
    whole = copy.deepcopy(module)
    values = microbatches(ROWS)
    run_halves(module, values)
    run_whole(whole, values)
    assert torch.equal(module.weight.grad, whole.weight.grad)


def test_what_a_custom_function_reads_in_w_is_not_written_to_before() -> None:
    place = torch.zeros(3, 4)

    def call(self: Any, x: Tensor) -> Tensor:
        return PutsOff.apply(place.copy_(x.detach()), self.weight, None)

    half = Half(Function(call, weight=random(4, 4)))
    place.zero_()
    with pytest.raises(DataError, match="not written to before its weight gradients"):
        half.end()


def test_outside_a_stage_layers_are_untouched() -> None:
    module = nn.Linear(4, 5)
    stage = Stage(0, module)
    meta, _ = flatten_value(ROWS, "the input")
    stage.forward(0, meta, [ROWS])
    module(ROWS).sum().backward()
    assert module.weight.grad is not None
