"""Jobs that run the fused products, and compare with the plain reference in float64."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe import World
from npu_pipe.comm.axes import open_axes
from npu_pipe.device.choose import choose
from npu_pipe.errors import ConfigError
from npu_pipe.launch.group import join
from npu_pipe.launch.mesh import Axis, Mesh
from npu_pipe.ops.choose import pick
from npu_pipe.ops.collectives import all_gather, exchanging
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.provider import Refusal
from npu_pipe.ops.ranks import Ranks, ranks_of
from npu_pipe.ops.reference import Reference
from npu_pipe_kernels.functions import copy_linear, gather_linear, linear_reduce, linear_scatter
from npu_pipe_kernels.parity import SIZES, worst_error
from npu_pipe_kernels.parity import rounding as bound
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


def close(ours: Tensor, theirs: Tensor, limit: float) -> float:
    """The largest error, relative to the largest value; fails beyond the limit."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if not theirs.numel():
        return 0.0
    error = (ours.cpu().double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)
    assert error <= limit, (float(error), limit)
    return float(error)


def products(
    world: World,
    *,
    provider: str,
    dtype: str,
    sizes: Sequence[Sequence[int]] = SIZES,
    kind: str = "cpu",
    tiles: int | None = None,
) -> float:
    """The worst error of the three products. sizes: (rows of a rank, k, columns) each."""
    with tensor_ranks(world, Mesh(tp=world.size), kind) as ranks:
        among = (Portable(tiles),) if tiles else providers()
        (found,) = pick(among, provider)
        error = worst_error(found, ranks, dtype=DTYPES[dtype], sizes=sizes)
        assert error <= bound(DTYPES[dtype], ranks.size)
        return error


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


def as_documented(world: World) -> list[str]:
    """The provider of kernels/README.md: how it is chosen, and whether it is right."""
    page = Path(__file__).parents[3] / "kernels" / "README.md"
    code = page.read_text().split("Whole, for any backend:\n")[1].split("\n`npu_pipe")[0]
    with tensor_ranks(world, Mesh(tp=world.size), "cpu") as ranks:
        known = {"torch": torch, "dist": dist, "ranks": ranks, "Refusal": Refusal}
        known |= {"all_gather": all_gather, "exchanging": exchanging, "Operators": Operators}
        known |= {"providers": providers, "worst_error": worst_error, "rounding": bound}
        exec(textwrap.dedent(code), known)
        operators: Any = known["operators"]
        x = torch.ones(2, 3)
        out, _ = operators.all_gather_matmul(x, x.t())
        assert out.shape == (2 * world.size, 2)
        return [row[1] for row in operators.rows()]


class Wrong(Reference):
    """Sums nothing up, or gathers in another order."""

    name = "wrong"

    def __init__(self, how: str) -> None:
        self.how = how

    def all_gather_matmul(
        self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        out, gathered = super().all_gather_matmul(x_mk, right_kc, ranks)
        return out, gathered.flip(0) if self.how == "order" else gathered

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        found = super().matmul_all_reduce(x_mk, right_kc, ranks)
        return x_mk.mm(right_kc) if self.how == "sum" else found


def wrong_ones(world: World) -> list[str]:
    """What is said of providers that are wrong."""
    said = []
    with tensor_ranks(world, Mesh(tp=world.size), "cpu") as ranks:
        for how in ("sum", "order"):
            try:
                error = worst_error(Wrong(how), ranks, dtype=torch.float32)
                said.append(str(error > bound(torch.float32, world.size)))
            except ConfigError as refused:
                said.append(str(refused))
    return said
