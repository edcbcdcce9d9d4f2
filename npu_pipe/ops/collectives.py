"""Plain collectives on the ranks of a layer, along the first dimension. None has a gradient.

They are the transfers of the reference, and of layers where no product is near.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.comm.board import Board
from npu_pipe.comm.failure import peer_failures
from npu_pipe.errors import DataError, PeerError
from npu_pipe.ops.ranks import Ranks

__all__ = [
    "all_gather",
    "all_reduce",
    "block_rows",
    "exchanging",
    "reduce_scatter",
    "require_joined",
    "sum_in_order",
]

# Its name from torch 2.13 on, which warns of the old one.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_HALF = (torch.float16, torch.bfloat16)


def all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """(m, ...) of each rank -> (n * m, ...) on all, by rank."""
    if ranks.size == 1:
        return x
    found = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
    if x.numel():
        with exchanging(ranks):
            _ALL_GATHER(found, x.contiguous(), group=ranks.group)
    return found


def reduce_scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """(n * m, ...) of each rank -> (m, ...): this rank's rows, summed over all ranks by rank.

    As an all-to-all and a sum: as many bytes on the wire as a ring, and the same bits on every
    backend. Half precision is summed in float32. Raises DataError where n does not divide.
    """
    if ranks.size == 1:
        return x
    rows = block_rows(x.shape[0], ranks)
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        with exchanging(ranks):
            dist.all_to_all_single(found, x.contiguous(), group=ranks.group)
    return sum_in_order(list(found.view(ranks.size, rows, *x.shape[1:])))


def all_reduce(x: Tensor, ranks: Ranks, *, largest: bool = False) -> Tensor:
    """The sum, or the largest, over all ranks, on all; a new tensor."""
    if ranks.size == 1:
        return x
    found = x.clone(memory_format=torch.contiguous_format)
    operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    if x.numel():
        with exchanging(ranks):
            dist.all_reduce(found, op=operation, group=ranks.group)
    return found


def exchanging(ranks: Ranks) -> AbstractContextManager[None]:
    """Within it, a connection that is lost is a PeerError that says where, and who looks at the
    board of this rank sees that it waits. Raises a PeerError itself where this rank has left."""
    require_joined(ranks)
    what = "rank {} of the {} that share a layer was exchanging rows"
    failures = peer_failures(what, ranks.rank, ranks.size)
    return failures if ranks.board is None else _Noted(ranks.board, failures)


def require_joined(ranks: Ranks) -> None:
    """Raises PeerError where this rank has left: a transfer would connect anew, and wait."""
    if ranks.left.is_set():
        raise PeerError(
            "ranks that share layers end together",
            f"rank {ranks.rank} of {ranks.size} has left, since its pipeline broke off",
            "look for the rank that failed first: its own error tells why",
        )


class _Noted:
    __slots__ = ("_board", "_failures")

    def __init__(self, board: Board, failures: AbstractContextManager[None]) -> None:
        self._board = board
        self._failures = failures

    def __enter__(self) -> None:
        self._board.exchange()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._board.exchange()
        self._failures.__exit__(kind, error, traceback)


def block_rows(rows: int, ranks: Ranks) -> int:
    """How many of `rows` each rank has. Raises DataError where they cannot be shared equally."""
    if rows % ranks.size:
        raise DataError(
            "the rows that tensor-parallel ranks share are a multiple of their number",
            f"{rows} rows on {ranks.size} ranks",
            f"pad the sequence so that the rows are {-(-rows // ranks.size) * ranks.size}",
        )
    return rows // ranks.size


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """Of several tensors, first to last; half precision in float32."""
    first, *others = parts
    total = first.float() if first.dtype in _HALF else first.clone()
    for part in others:
        total += part
    return total.to(first.dtype)
