"""Cuda: torch's fused products on symmetric memory; what they do not serve goes on side streams.

Not yet run on a GPU: written to the signatures and rules of torch 2.10 to 2.13.

    symmetric memory   every rank reads its peers' rows over NVLink, in steps, on a second stream,
                       while the rows that are there are multiplied
    side streams       as `npu_pipe_kernels.portable` draws it: NCCL has a stream of its own
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.ops.need import Need, Operator
from npu_pipe.ops.provider import Refusal
from npu_pipe.ops.ranks import Ranks
from npu_pipe_kernels.portable import Portable

__all__ = ["SideStreams", "SymmetricMemory"]

_FUSED = {
    Operator.ALL_GATHER_MATMUL: "fused_all_gather_matmul",
    Operator.MATMUL_REDUCE_SCATTER: "fused_matmul_reduce_scatter",
}


class SymmetricMemory:
    """See `Provider`, which this is."""

    name = "cuda-symmetric-memory"
    kind = "cuda"

    def refusal(self, need: Need, ranks: Ranks) -> Refusal | None:
        if need.operator not in _FUSED:
            return Refusal(
                f"on symmetric memory torch fuses {' and '.join(map(str, _FUSED))}",
                f"this is {need.operator}",
                "cut the sequence over the ranks, or take provider cuda-side-streams",
            )
        if not _has(_FUSED[need.operator]):
            return Refusal(
                f"torch.ops.symm_mem.{_FUSED[need.operator]} is in builds with symmetric memory",
                f"torch {torch.__version__} has none of it",
                "install a CUDA build of torch 2.10 or newer for Linux",
            )
        if ranks.hosts > 1:
            return Refusal(
                "symmetric memory joins the ranks of one host",
                f"these are on {ranks.hosts}",
                "let tensor parallelism vary fastest in the mesh, and within a host",
            )
        if need.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return Refusal(
                "torch's fused operators take float16, bfloat16 and float32",
                f"the matrices are {str(need.dtype).removeprefix('torch.')}",
                "take provider cuda-side-streams",
            )
        if not need.rows or not need.columns or not need.depth:
            return Refusal(
                "torch's fused operators multiply matrices that hold something",
                f"they are ({need.rows}, {need.depth}) and ({need.depth}, {need.columns})",
                "leave empty microbatches out",
            )
        return None

    def all_gather_matmul(
        self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        gathered, (out,) = torch.ops.symm_mem.fused_all_gather_matmul(
            x_mk.contiguous(), [right_kc], 0, _name(ranks)
        )
        return out, gathered

    def matmul_reduce_scatter(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        out: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x_mk.contiguous(), right_kc, "sum", 0, _name(ranks)
        )
        return out

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        raise AssertionError(f"refused: {x_mk.shape} @ {right_kc.shape} on {ranks.size} ranks")


class SideStreams(Portable):
    """See `Provider`, which this is: direct exchange, under NCCL's own stream."""

    name = "cuda-side-streams"
    kind = "cuda"


def _has(name: str) -> bool:
    """Importing the module registers the operators."""
    importlib.import_module("torch.distributed._symmetric_memory")
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")


def _name(ranks: Ranks) -> Any:
    assert isinstance(ranks.group, dist.ProcessGroup)
    return ranks.group.group_name
