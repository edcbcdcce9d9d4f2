"""Npu: the fused products as operators of torch_npu ("MC2"), which cut and overlap on the chip.

    wire      | tile 0 | tile 1 | tile 2 |           one operator a product: CANN cuts it into tiles
    compute            | tile 0 | tile 1 | tile 2    and moves one while the cubes multiply another

Their rules are in `Npu.refusal`, with the part of torch_npu's documentation that each is from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.ops.need import Need, Operator
from npu_pipe.ops.provider import Refusal
from npu_pipe.ops.ranks import Ranks

__all__ = ["Npu"]

_DEPTHS = range(256, 65535)
_DTYPES = (torch.float16, torch.bfloat16)
_NAMES = {
    Operator.ALL_GATHER_MATMUL: "npu_all_gather_base_mm",
    Operator.MATMUL_REDUCE_SCATTER: "npu_mm_reduce_scatter_base",
    Operator.MATMUL_ALL_REDUCE: "npu_mm_all_reduce_base",
}


class _Generation(NamedTuple):
    """What the documentation says of one generation of chips."""

    name: str
    sizes: tuple[int, ...]  # of a communicator
    hosts: int | None  # that it may span; None: as many as the interconnect joins
    communicators: int | None  # that the fused operators of a process may use
    operators: tuple[Operator, ...]


_ALL = tuple(Operator)
_WITHOUT_ALL_REDUCE = (Operator.ALL_GATHER_MATMUL, Operator.MATMUL_REDUCE_SCATTER)
_GENERATIONS = {
    "Ascend910B": _Generation("Atlas A2", (2, 4, 8), 1, 1, _ALL),
    "Ascend910_93": _Generation("Atlas A3", (2, 4, 8, 16, 32), None, None, _WITHOUT_ALL_REDUCE),
}


class Npu:
    """See `Provider`, which this is. One for a process: it knows the communicator that its fused
    operators use, and on A2 there is only one."""

    name = "npu"
    kind = "npu"

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None

    def refusal(self, need: Need, ranks: Ranks) -> Refusal | None:
        """In the order: the chip, its communicators, the operator, the shapes. The first group that
        is served has the communicator from then on."""
        name = _NAMES[need.operator]
        chip = next(
            (each for start, each in _GENERATIONS.items() if ranks.chip.startswith(start)), None
        )
        if chip is None:
            return Refusal(
                f"fused operators run on chips {', '.join(_GENERATIONS)}...",
                f"this is {ranks.chip or 'none'}",
                "take provider portable",
            )
        found = self._communicator_refusal(chip, ranks)
        if found is not None:
            return found
        if need.operator not in chip.operators or not hasattr(torch.ops.npu, name):
            return Refusal(
                f"{need.operator} is {name} of torch_npu, documented for "
                + ", ".join(g.name for g in _GENERATIONS.values() if need.operator in g.operators),
                f"this is {chip.name}, and torch_npu "
                + ("has it" if hasattr(torch.ops.npu, name) else "does not have it"),
                "cut the sequence over the ranks, or take provider portable",
            )
        found = _shape_refusal(need)
        if found is None:  # it will be used, maybe after another group has asked
            self._group = self._group or ranks.group
        return found

    def _communicator_refusal(self, chip: _Generation, ranks: Ranks) -> Refusal | None:
        if ranks.size not in chip.sizes:
            return Refusal(
                f"on {chip.name} fused operators join {', '.join(map(str, chip.sizes))} ranks",
                f"these are {ranks.size}",
                "choose a tensor-parallel size of those",
            )
        if chip.hosts is not None and ranks.hosts > chip.hosts:
            return Refusal(
                f"on {chip.name} the ranks of a fused operator are on one host",
                f"these are on {ranks.hosts}",
                "let tensor parallelism vary fastest in the mesh, and within a host",
            )
        if chip.communicators == 1 and self._group not in (None, ranks.group):
            return Refusal(
                f"on {chip.name} all fused operators of a process use one communicator",
                "another group has it already",
                "use fused operators in one group only",
            )
        return None

    def all_gather_matmul(
        self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        out, gathered = torch.ops.npu.npu_all_gather_base_mm(
            x_mk.contiguous(), _matrix(right_kc), self._communicator(ranks), ranks.size
        )
        return out, gathered

    def matmul_reduce_scatter(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        out: Tensor = torch.ops.npu.npu_mm_reduce_scatter_base(
            x_mk.contiguous(), _matrix(right_kc), self._communicator(ranks), ranks.size
        )
        return out

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        out: Tensor = torch.ops.npu.npu_mm_all_reduce_base(
            x_mk.contiguous(), _matrix(right_kc), self._communicator(ranks)
        )
        return out

    def _communicator(self, ranks: Ranks) -> str:
        """By name, as the operators want it."""
        assert ranks.group is not None
        backend: Any = ranks.group._get_backend(ranks.place)
        name: str = backend.get_hccl_comm_name(dist.get_global_rank(ranks.group, ranks.rank))
        return name


def _shape_refusal(need: Need) -> Refusal | None:
    """The rules of the operators' own pages; m % n is refused for every provider before."""
    if need.dtype not in _DTYPES:
        return Refusal(
            "fused operators take float16 and bfloat16",
            f"the matrices are {str(need.dtype).removeprefix('torch.')}",
            "train in bfloat16, with gradients in float32",
        )
    if need.depth not in _DEPTHS:
        return Refusal(
            f"fused operators have k from {_DEPTHS.start} to {_DEPTHS.stop - 1}",
            f"k is {need.depth}",
            "use fewer tensor-parallel ranks, or a wider layer",
        )
    if not need.rows or not need.columns:
        return Refusal(
            "fused operators multiply matrices that hold something",
            f"they are ({need.rows}, {need.depth}) and ({need.depth}, {need.columns})",
            "leave empty microbatches out",
        )
    return None


def _matrix(right_kc: Tensor) -> Tensor:
    """The right factor may be transposed, but not have other strides."""
    is_plain = right_kc.is_contiguous() or right_kc.t().is_contiguous()
    return right_kc if is_plain else right_kc.contiguous()
