"""Provider: who can do the fused products, and the reason where one cannot."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from npu_pipe.errors import ConfigError
from npu_pipe.ops.need import Need
from npu_pipe.ops.ranks import Ranks

__all__ = ["Provider", "Refusal"]


class Refusal(NamedTuple):
    """Why a provider does not serve a need, in the three parts of a message."""

    rule: str
    facts: str
    cure: str

    def error(self) -> ConfigError:
        return ConfigError(*self)


class Provider(Protocol):
    """The three products on matrices, each a collective of the ranks. None of them has a gradient:
    `npu_pipe_kernels.functions` makes that of them.

    x_mk may have any strides and no rows; right_kc any strides. Results are contiguous. All are
    given the same shapes on every rank, and ranks of more than one. What waits for other ranks
    stands in `npu_pipe.ops.collectives.exchanging`. `npu_pipe_kernels.parity` tells how close one
    is to the whole product.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str | None:
        """The kind of device that it is for; None for any."""
        ...

    def refusal(self, need: Need, ranks: Ranks) -> Refusal | None:
        """The first of its documented rules that the need breaks; None if it serves. Depends on
        nothing that may differ between the ranks, so that all choose alike."""
        ...

    def all_gather_matmul(
        self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        """((n*m, c), and the rows of all ranks: (n*m, k))"""
        ...

    def matmul_reduce_scatter(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        """(m / n, c)"""
        ...

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        """(m, c)"""
        ...
