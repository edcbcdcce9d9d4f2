"""The reference: a product, and a plain collective before or after it. Nothing overlaps.

What every provider must equal. It serves every need, and is taken where it is asked for or where
nobody else serves.
"""

from __future__ import annotations

from torch import Tensor

from npu_pipe.ops.collectives import all_gather, reduce_scatter, sum_in_order
from npu_pipe.ops.need import Need
from npu_pipe.ops.provider import Refusal
from npu_pipe.ops.ranks import Ranks

__all__ = ["Reference"]


class Reference:
    """See `Provider`, which this is."""

    name = "reference"
    kind = None

    def refusal(self, need: Need, ranks: Ranks) -> Refusal | None:
        del need, ranks
        return None

    def all_gather_matmul(
        self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        gathered = all_gather(x_mk.contiguous(), ranks)
        return gathered.mm(right_kc), gathered

    def matmul_reduce_scatter(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        return reduce_scatter(x_mk.mm(right_kc), ranks)

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        partial = x_mk.mm(right_kc)
        parts = all_gather(partial, ranks).view(ranks.size, *partial.shape)
        return sum_in_order(list(parts))
