"""Portable: the fused products on any backend that sends and receives, gloo included.

A rank exchanges blocks of rows with each other rank directly. What is on the wire while it
computes, for rank 0 of 3:

    all_gather_matmul       wire      own rows to 1, 2; rows of 2, then those of 1, come in
                            compute   own rows    | rows of 2   | rows of 1
    matmul_reduce_scatter   wire                  | part to 1   | part to 2, and theirs come in
                            compute   rows of 1   | rows of 2   | own rows, then the sum by rank
    matmul_all_reduce       wire                  | tile 0      | tile 1  ...
                            compute   tile 0      | tile 1      | tile 2  ...

So with n ranks an n-th of the product at least covers the transfer of the rest. Each block is cut
into tiles of rows again, which start to travel, or to be multiplied, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from npu_pipe.errors import ConfigError
from npu_pipe.ops.collectives import block_rows, exchanging, sum_in_order
from npu_pipe.ops.need import Need
from npu_pipe.ops.provider import Refusal
from npu_pipe.ops.ranks import Ranks

__all__ = ["Portable"]


@dataclass(frozen=True, slots=True)
class Portable:
    """See `Provider`, which this is.

    tiles: of each block of rows. Raises ConfigError for less than one.
    """

    tiles: int = 2

    name: ClassVar[str] = "portable"
    kind: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        if self.tiles < 1:
            raise ConfigError(
                "a block of rows is cut into at least one tile",
                f"{self.tiles} were asked for",
                "take 1 to send it as a whole",
            )

    def refusal(self, need: Need, ranks: Ranks) -> Refusal | None:
        del need, ranks
        return None

    def all_gather_matmul(
        self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks
    ) -> tuple[Tensor, Tensor]:
        own, rows, me = x_mk.contiguous(), x_mk.shape[0], ranks.rank
        gathered = own.new_empty(ranks.size * rows, own.shape[1])
        if not own.numel():
            return gathered.mm(right_kc), gathered
        blocks = gathered.view(ranks.size, rows, -1)
        out = own.new_empty(ranks.size * rows, right_kc.shape[1])
        coming = [
            (sender, tile, _exchange(own[tile], receiver, blocks[sender][tile], sender, ranks))
            for sender, receiver in _steps(ranks)
            for tile in self._cut(own)
        ]
        gathered[me * rows : (me + 1) * rows] = own
        torch.mm(own, right_kc, out=out[me * rows : (me + 1) * rows])
        sent = []
        for sender, tile, works in coming:
            _wait([works.pop()], ranks)  # for the receive, or both in one
            sent += works
            place = slice(sender * rows + tile.start, sender * rows + tile.stop)
            torch.mm(gathered[place], right_kc, out=out[place])
        _wait(sent, ranks)
        return out, gathered

    def matmul_reduce_scatter(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        rows, me = block_rows(x_mk.shape[0], ranks), ranks.rank
        parts = [x_mk.new_empty(rows, right_kc.shape[1]) for _ in range(ranks.size)]
        on_the_way: list[tuple[Tensor, list[Any]]] = []
        for sender, receiver in _steps(ranks):
            theirs = x_mk[receiver * rows : (receiver + 1) * rows]
            for tile in self._cut(parts[sender]):
                part = theirs[tile].mm(right_kc)
                works = _exchange(part, receiver, parts[sender][tile], sender, ranks)
                on_the_way.append((part, works))
        torch.mm(x_mk[me * rows : (me + 1) * rows], right_kc, out=parts[me])
        for _, works in on_the_way:
            _wait(works, ranks)
        return sum_in_order(parts)

    def matmul_all_reduce(self, x_mk: Tensor, right_kc: Tensor, ranks: Ranks) -> Tensor:
        out = x_mk.new_empty(x_mk.shape[0], right_kc.shape[1])
        works = []
        for tile in self._cut(out):
            torch.mm(x_mk[tile], right_kc, out=out[tile])
            with exchanging(ranks):
                works.append(dist.all_reduce(out[tile], group=ranks.group, async_op=True))
        _wait(works, ranks)
        return out

    def _cut(self, block: Tensor) -> Sequence[slice]:
        """Tiles of its rows, the first ones larger where they do not divide; none is empty."""
        if not block.numel():
            return ()
        tiles = min(self.tiles, block.shape[0])
        sizes, rest = divmod(block.shape[0], tiles)
        starts = [i * sizes + min(i, rest) for i in range(tiles + 1)]
        return [slice(*ends) for ends in pairwise(starts)]


def _steps(ranks: Ranks) -> Iterator[tuple[int, int]]:
    """(who sends to us, whom we send to) in each step: in each, every rank does both once."""
    for step in range(1, ranks.size):
        yield (ranks.rank - step) % ranks.size, (ranks.rank + step) % ranks.size


def _exchange(
    out: Tensor, receiver: int, into: Tensor, sender: int, ranks: Ranks
) -> list[dist.Work]:
    """Both in one, as HCCL and NCCL need it; the last of the works is the receive, or all."""
    with exchanging(ranks):
        works: list[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out, group=ranks.group, group_peer=receiver),
                dist.P2POp(dist.irecv, into, group=ranks.group, group_peer=sender),
            ]
        )
    return works


def _wait(works: Iterable[dist.Work], ranks: Ranks) -> None:
    with exchanging(ranks):
        for work in works:
            work.wait()
