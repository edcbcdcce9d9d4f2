"""Linear layers of which each rank has a part of the weight.

    ColumnParallelLinear   w is cut along its outputs   x: own or all rows    y: a part of each row
    RowParallelLinear      w is cut along its inputs    x: a part of each row y: own or all rows

Shapes: T sequence; S the part of it on this rank, T / n, or T where each rank has it whole. There
may be any dimensions between the sequence and the last one.
"""

from __future__ import annotations

from collections.abc import Sequence as Parts

import torch
from torch import Tensor, nn

from npu_pipe.errors import ConfigError
from npu_pipe.ops.collectives import block_rows
from npu_pipe_kernels.functions import copy_linear, gather_linear, linear_reduce, linear_scatter
from npu_pipe_kernels.sharding import Sequence, Sharding, share

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class ColumnParallelLinear(nn.Module):
    """(S, ..., inputs) -> (T, ..., outputs / n), sequence first.

    parts: where the outputs are several matrices behind each other, as query, key and value are,
        their sizes: each is cut by itself. Raises ConfigError where n does not divide one.
    The weights are not initialised.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        parts: Parts[int] | None = None,
    ) -> None:
        super().__init__()
        self.sharding = sharding
        self.parts = tuple(parts or (outputs,))
        if sum(self.parts) != outputs:
            raise ConfigError(
                "the parts of a layer's outputs are all of them",
                f"{' + '.join(map(str, self.parts))} is not {outputs}",
                "name the size of each",
            )
        own = sum(share("outputs of a layer", part, sharding) for part in self.parts)
        self.weight = nn.Parameter(torch.empty(own, inputs))
        self.bias = nn.Parameter(torch.empty(own)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        operators, rows = self.sharding.operators, x.flatten(0, -2)
        if self.sharding.sequence is Sequence.SHARDED:
            y = gather_linear(rows, self.weight, self.bias, operators, self.sharding.keep)
            return y.view(x.shape[0] * operators.ranks.size, *x.shape[1:-1], y.shape[1])
        y = copy_linear(rows, self.weight, self.bias, operators)
        return y.view(*x.shape[:-1], y.shape[1])

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the unsplit layer's `weight` or `bias`."""
        del name
        ranks = self.sharding.operators.ranks
        pieces = [
            part.chunk(ranks.size)[ranks.rank] for part in torch.split(whole, list(self.parts))
        ]
        return torch.cat(pieces)


class RowParallelLinear(nn.Module):
    """(T, ..., inputs / n) -> (S, ..., outputs), sequence first.

    Raises ConfigError where n does not divide the inputs; its forward DataError where n does not
    divide the length of the sequence. The weights are not initialised.
    """

    def __init__(
        self, inputs: int, outputs: int, sharding: Sharding, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.sharding = sharding
        own = share("inputs of a layer", inputs, sharding)
        self.weight = nn.Parameter(torch.empty(outputs, own))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        operators, rows = self.sharding.operators, x.flatten(0, -2)
        if self.sharding.sequence is Sequence.SHARDED:
            length = block_rows(x.shape[0], operators.ranks)
            y = linear_scatter(rows, self.weight, self.bias, operators, self.sharding.keep)
            return y.view(length, *x.shape[1:-1], y.shape[1])
        y = linear_reduce(rows, self.weight, self.bias, operators)
        return y.view(*x.shape[:-1], y.shape[1])

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of the unsplit layer's `weight` or `bias`."""
        ranks = self.sharding.operators.ranks
        return whole if name == "bias" else whole.chunk(ranks.size, dim=1)[ranks.rank]
