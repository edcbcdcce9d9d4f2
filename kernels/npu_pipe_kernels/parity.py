"""Parity: how far a provider's products are from those of the whole matrices, in float64.

    error = worst_error(MyProvider(), ranks, dtype=torch.bfloat16)
    assert error <= rounding(torch.bfloat16, ranks.size)

For who writes a provider; and every one here is held to it by the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from npu_pipe.errors import ConfigError
from npu_pipe.ops.need import Need, Operator
from npu_pipe.ops.provider import Provider
from npu_pipe.ops.ranks import Ranks

__all__ = ["FORMS", "SIZES", "rounding", "worst_error"]

SIZES = ((4, 8, 6), (7, 33, 5), (1, 1, 1), (0, 5, 3), (3, 4, 0), (64, 257, 31))
"""(rows of a rank, depth, columns): odd ones, no rows, no columns."""


def _plain(value: Tensor) -> Tensor:
    return value


def _transposed(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def _with_gaps(value: Tensor) -> Tensor:
    return torch.stack((value, torch.full_like(value, float("nan"))), -1)[..., 0]


FORMS: tuple[Callable[[Tensor], Tensor], ...] = (_plain, _transposed, _with_gaps)
"""The same values in other memory."""


def rounding(dtype: torch.dtype, ranks: int) -> float:
    """What an error may be of the largest value. float32: 1e-6. bfloat16 has 8 bits: a rounding is
    2**-8 at most, and there are 2 n: of n parts, of their n - 1 sums, and of the result."""
    return 2 * ranks * 2.0**-8 if dtype == torch.bfloat16 else 1e-6


def worst_error(
    provider: Provider,
    ranks: Ranks,
    *,
    dtype: torch.dtype,
    sizes: Sequence[Sequence[int]] = SIZES,
    forms: Sequence[Callable[[Tensor], Tensor]] = FORMS,
) -> float:
    """Of all three products, relative to the largest value of each; collective.

    Raises ConfigError for a size that the provider refuses, and for a result that is of another
    shape or dtype, is not contiguous, or has other rows than were to be gathered.
    """
    errors = (
        error
        for size in sizes
        for form in forms
        for error in _errors(provider, ranks, dtype, form, *size)
    )
    return max(errors)


def _errors(
    provider: Provider,
    ranks: Ranks,
    dtype: torch.dtype,
    form: Callable[[Tensor], Tensor],
    rows: int,
    depth: int,
    columns: int,
) -> Iterator[float]:
    n, me = ranks.size, ranks.rank
    generator = torch.Generator().manual_seed(rows + depth + columns)  # all know what all have

    def drawn(*shape: int) -> list[Tensor]:
        return [torch.randn(*shape, generator=generator).to(dtype) for _ in range(n)]

    def placed(value: Tensor) -> Tensor:
        return form(value.to(ranks.place))

    parts, rights, longs = drawn(rows, depth), drawn(depth, columns), drawn(n * rows, depth)
    every = torch.cat(parts).double()
    whole = sum(
        (x.double() @ right.double() for x, right in zip(longs, rights, strict=True)),
        start=torch.zeros(n * rows, columns, dtype=torch.float64),
    )
    for operator, height in zip(Operator, (rows, n * rows, n * rows), strict=True):
        refusal = provider.refusal(Need(operator, height, depth, columns, dtype), ranks)
        if refusal is not None:
            raise refusal.error()
    x, right, long = placed(parts[me]), placed(rights[me]), placed(longs[me])
    out, gathered = provider.all_gather_matmul(x, right, ranks)
    share = provider.matmul_reduce_scatter(long, right, ranks)
    reduced = provider.matmul_all_reduce(long, right, ranks)
    name = f"{provider.name}, all_gather_matmul"
    if _error(f"{name}: gathered rows", gathered, every, dtype):
        raise _wrong(f"{name}: gathered rows", "they are not those of the ranks, by rank")
    yield _error(name, out, every @ rights[me].double(), dtype)
    own = whole[me * rows : (me + 1) * rows]
    yield _error(f"{provider.name}, matmul_reduce_scatter", share, own, dtype)
    yield _error(f"{provider.name}, matmul_all_reduce", reduced, whole, dtype)


def _error(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    if found.shape != wanted.shape or found.dtype != dtype or not found.is_contiguous():
        facts = f"{tuple(found.shape)} {found.dtype} with strides {found.stride()}"
        raise _wrong(what, f"{facts}, for {tuple(wanted.shape)} {dtype}")
    if not wanted.numel():
        return 0.0
    largest = wanted.abs().max().clamp_min(1e-12)
    return float((found.cpu().double() - wanted).abs().max() / largest)


def _wrong(what: str, facts: str) -> ConfigError:
    return ConfigError(
        "a provider gives what the reference gives, in contiguous memory",
        f"{what}: {facts}",
        "see npu_pipe.ops.provider.Provider for the shapes",
    )
