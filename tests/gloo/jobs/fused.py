"""Jobs that run the fused products, and compare with the plain reference in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from npu_pipe import World
from npu_pipe.comm.axes import open_axes
from npu_pipe.device.choose import choose
from npu_pipe.launch.group import join
from npu_pipe.launch.mesh import Axis, Mesh
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.ranks import Ranks, ranks_of
from npu_pipe_kernels.functions import copy_linear, gather_linear, linear_reduce, linear_scatter
from npu_pipe_kernels.portable import Portable
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.sharding import Keep

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@contextmanager
def tensor_ranks(world: World, mesh: Mesh, kind: str) -> Iterator[Ranks]:
    """The ranks that share this one's layers."""
    device = choose(kind, index=world.rank).device
    device.select()
    join(world)
    axes = [each for each in mesh.axes(world.rank) if each[0] == Axis.TP.value]
    groups = open_axes(axes, device=device, timeout_s=60)
    yield ranks_of(groups[Axis.TP.value], device.place)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bound(dtype: torch.dtype, ranks: int) -> float:
    """Of an error, relative to the largest value. float32: 1e-6. bfloat16 has 8 bits: a rounding is
    2**-8 at most, and there are 2 n: of n parts, of their n - 1 sums, and of the result."""
    return 2 * ranks * 2.0**-8 if dtype == torch.bfloat16 else 1e-6


def close(ours: Tensor, theirs: Tensor, limit: float) -> float:
    """The largest error, relative to the largest value; fails beyond the limit."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if not theirs.numel():
        return 0.0
    error = (ours.cpu().double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)
    assert error <= limit, (float(error), limit)
    return float(error)


def as_strided(value: Tensor, form: str) -> Tensor:
    """The same values in other memory."""
    if form == "transposed":
        return value.t().contiguous().t()
    if form == "sliced":
        wide = value.new_full((value.shape[0], 2 * value.shape[1]), float("nan"))
        wide[:, ::2] = value
        return wide[:, ::2]
    return value


def products(
    world: World,
    *,
    provider: str,
    dtype: str,
    sizes: Sequence[Sequence[int]],
    kind: str = "cpu",
    forms: Sequence[str] = ("plain",),
    tiles: int | None = None,
) -> dict[str, Any]:
    """The three products of a provider. sizes: (rows of a rank, k, columns) each."""
    with tensor_ranks(world, Mesh(tp=world.size), kind) as ranks:
        among = (Portable(tiles),) if tiles else providers()
        operators = Operators(ranks, among, wanted=provider)
        worst = 0.0
        for rows, depth, columns in sizes:
            for form in forms:
                worst = max(
                    worst, *_product(operators, ranks, DTYPES[dtype], rows, depth, columns, form)
                )
        return {"worst": worst, "rows": operators.rows()}


def _product(
    operators: Operators,
    ranks: Ranks,
    dtype: torch.dtype,
    rows: int,
    depth: int,
    columns: int,
    form: str,
) -> Iterator[float]:
    n, me, place = ranks.size, ranks.rank, ranks.place
    put = lambda x: as_strided(x.to(dtype).to(place), form)  # noqa: E731
    xs = [drawn(rows, depth, seed=i).to(dtype).double() for i in range(n)]
    rights = [drawn(depth, columns, seed=10 + i).to(dtype).double() for i in range(n)]
    limit = bound(dtype, n)
    out, gathered = operators.all_gather_matmul(put(xs[me]), put(rights[me]))
    yield close(gathered, torch.cat(xs), 0)
    yield close(out, torch.cat(xs) @ rights[me], limit)
    longs = [drawn(n * rows, depth, seed=20 + i).to(dtype).double() for i in range(n)]
    whole = sum(x @ right for x, right in zip(longs, rights, strict=True))
    share = operators.matmul_reduce_scatter(put(longs[me]), put(rights[me]))
    yield close(share, whole.chunk(n)[me] if rows else whole, limit)
    yield close(operators.matmul_all_reduce(put(longs[me]), put(rights[me])), whole, limit)
    for each in (out, gathered, share):
        assert each.is_contiguous()
        assert each.dtype == dtype


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "gather_linear, kept": partial(gather_linear, keep=Keep.GATHERED),
    "gather_linear, gathered again": partial(gather_linear, keep=Keep.OWN_ROWS),
    "linear_scatter, kept": partial(linear_scatter, keep=Keep.GATHERED),
    "linear_scatter, gathered again": partial(linear_scatter, keep=Keep.OWN_ROWS),
    "linear_reduce": linear_reduce,
    "copy_linear": copy_linear,
}


def functions(
    world: World,
    *,
    provider: str,
    dtype: str,
    sizes: Sequence[Sequence[int]],
    kind: str = "cpu",
    frozen: Sequence[str] = (),
) -> dict[str, Any]:
    """Forward and backward of the autograd functions, against those of the whole layer."""
    with tensor_ranks(world, Mesh(tp=world.size), kind) as ranks:
        operators = Operators(ranks, providers(), wanted=provider)
        worst = {}
        for name, function in FUNCTIONS.items():
            worst[name] = max(
                max(_function(function, name, operators, DTYPES[dtype], *size, frozen=frozen))
                for size in sizes
            )
        return {"worst": worst, "rows": operators.rows()}


def _function(
    function: Callable[..., Tensor],
    name: str,
    operators: Operators,
    dtype: torch.dtype,
    rows: int,
    depth: int,
    columns: int,
    *,
    frozen: Sequence[str],
) -> Iterator[float]:
    """rows: of a rank, where they are shared; depth and columns: of the whole layer over n."""
    ranks = operators.ranks
    n, me = ranks.size, ranks.rank
    is_column = name.startswith(("gather", "copy"))
    shares_rows = "reduce" not in name and "copy" not in name
    x = drawn(n * rows, depth if is_column else n * depth, seed=1)
    weight = drawn(n * columns if is_column else columns, x.shape[1], seed=2) / x.shape[1] ** 0.5
    bias = drawn(weight.shape[0], seed=3)
    seed = drawn(n * rows, weight.shape[0], seed=4)
    wholes = [each.to(dtype).double().requires_grad_() for each in (x, weight, bias)]
    seed = seed.to(dtype).double()
    y = torch.nn.functional.linear(*wholes)
    y.backward(seed)

    def part(which: str, whole: Tensor) -> Tensor:
        if which == "x":
            if not is_column:
                return whole.chunk(n, dim=1)[me]
            return whole[me * rows : (me + 1) * rows] if shares_rows else whole
        if which == "y":
            if is_column:
                return whole.chunk(n, dim=1)[me]
            return whole[me * rows : (me + 1) * rows] if shares_rows else whole
        if which == "weight":
            return whole.chunk(n, dim=0 if is_column else 1)[me]
        return whole.chunk(n)[me] if is_column else whole

    names = ("x", "weight", "bias")
    mine = {
        each: part(each, whole.detach())
        .to(dtype)
        .to(ranks.place)
        .requires_grad_(each not in frozen)
        for each, whole in zip(names, wholes, strict=True)
    }
    out = function(*mine.values(), operators=operators)
    limit = bound(dtype, n)
    yield close(out.detach(), part("y", y.detach()), limit)
    out.backward(part("y", seed).to(dtype).to(ranks.place))
    for each, whole in zip(names, wholes, strict=True):
        if each in frozen:
            assert mine[each].grad is None
        else:
            yield close(mine[each].grad, part(each, whole.grad), limit)


def refused(
    world: World, *, provider: str, dtype: str, size: Sequence[int], kind: str = "cpu"
) -> None:
    """Raises what a forced provider says of a product of this size."""
    with tensor_ranks(world, Mesh(tp=world.size), kind) as ranks:
        rows, depth, columns = size
        operators = Operators(ranks, providers(), wanted=provider)
        x = torch.zeros(rows, depth, dtype=DTYPES[dtype], device=ranks.place)
        operators.all_gather_matmul(x, x.new_zeros(depth, columns))


def chosen(world: World, *, dtype: str, size: Sequence[int], kind: str = "cpu") -> list[list[str]]:
    """Who is chosen, and why not the others, for each product of this size."""
    with tensor_ranks(world, Mesh(tp=world.size), kind) as ranks:
        rows, depth, columns = size
        operators = Operators(ranks, providers())
        x = torch.zeros(rows, depth, dtype=DTYPES[dtype], device=ranks.place)
        operators.all_gather_matmul(x, x.new_zeros(depth, columns))
        operators.matmul_reduce_scatter(x, x.new_zeros(depth, columns))
        operators.matmul_all_reduce(x, x.new_zeros(depth, columns))
        return [list(row) for row in operators.rows()]


def uneven(world: World) -> None:
    """Rows that the ranks cannot share."""
    with tensor_ranks(world, Mesh(tp=world.size), "cpu") as ranks:
        x = torch.zeros(world.size + 1, 3)
        Operators(ranks, providers()).matmul_reduce_scatter(x, x.new_zeros(3, 2))
