"""Need: a fused product that a layer asks for; what a provider decides by.

Shapes, with x the left factor as this rank has it, n ranks, and the right factor (k, c):

    all_gather_matmul       x (m, k)   the rows of all ranks: (n*m, k) @ (k, c)       -> (n*m, c)
    matmul_reduce_scatter   x (m, k)   the sum over the ranks of (m, k) @ (k, c), cut -> (m/n, c)
    matmul_all_reduce       x (m, k)   the same, but each rank gets all rows          -> (m, c)

The backward of each is made of the others: see `npu_pipe_kernels.functions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

__all__ = ["Need", "Operator"]


class Operator(Enum):
    """The text is the field's name."""

    ALL_GATHER_MATMUL = "all_gather_matmul"
    MATMUL_REDUCE_SCATTER = "matmul_reduce_scatter"
    MATMUL_ALL_REDUCE = "matmul_all_reduce"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Need:
    """rows, depth: m and k of the left factor on this rank. columns: c of the right one."""

    operator: Operator
    rows: int
    depth: int
    columns: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.operator} ({self.rows}, {self.depth}) @ ({self.depth}, {self.columns}) {kind}"
        )
