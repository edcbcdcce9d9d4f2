"""What is on the wire while a rank computes: the order in which portable products ask for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from npu_pipe.ops.ranks import Ranks
from npu_pipe_kernels.portable import Portable

N, ROWS = 3, 4
RANKS = Ranks(group=None, rank=0, size=N, place=torch.device("cpu"))


class Products(TorchDispatchMode):
    """Logs each product, with its rows."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call._schema.name == "aten::mm":
            self.log.append(f"multiply {args[0].shape[0]}")
        return call(*args, **(kwargs or {}))


class Work:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait(self) -> None:
        self.log.append(f"wait for {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of transfers that are asked for and waited for; none takes place."""
    found: list[str] = []

    def exchange(operations: list[Any]) -> list[Work]:
        send, receive = operations
        assert (send.op, receive.op) == (dist.isend, dist.irecv)
        assert (send.group_peer - 0) % N == (0 - receive.group_peer) % N, "one step of the circle"
        found.append(f"send to {send.group_peer}")
        return [Work("the send", found), Work(f"rank {receive.group_peer}", found)]

    class Transfer:
        def __init__(self, op: Any, tensor: Any, *, group: Any, group_peer: int) -> None:
            self.op, self.group_peer = op, group_peer

    def all_reduce(tensor: torch.Tensor, *, group: Any, async_op: bool) -> Work:
        assert async_op
        found.append(f"sum {tensor.shape[0]}")
        return Work("a sum", found)

    monkeypatch.setattr(dist, "batch_isend_irecv", exchange)
    monkeypatch.setattr(dist, "P2POp", Transfer)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return found


def test_own_rows_are_multiplied_while_all_others_are_on_their_way(log: list[str]) -> None:
    with Products(log):
        Portable(1).all_gather_matmul(torch.zeros(ROWS, 2), torch.zeros(2, 5), RANKS)
    assert log[:3] == ["send to 1", "send to 2", "multiply 4"]
    assert log[3:7] == ["wait for rank 2", "multiply 4", "wait for rank 1", "multiply 4"]
    assert log[7:] == ["wait for the send"] * 2


def test_parts_for_others_leave_while_the_next_is_multiplied_and_own_comes_last(
    log: list[str],
) -> None:
    with Products(log):
        Portable(2).matmul_reduce_scatter(torch.zeros(N * ROWS, 2), torch.zeros(2, 5), RANKS)
    assert log[:4] == ["multiply 2", "send to 1"] * 2
    assert log[4:8] == ["multiply 2", "send to 2"] * 2
    assert log[8] == "multiply 4"
    assert all(each.startswith("wait") for each in log[9:])
    assert len(log) == 9 + 8


def test_tiles_are_summed_while_the_next_is_multiplied(log: list[str]) -> None:
    with Products(log):
        Portable(3).matmul_all_reduce(torch.zeros(7, 2), torch.zeros(2, 5), RANKS)
    tiles = [f"{what} {rows}" for rows in (3, 2, 2) for what in ("multiply", "sum")]
    assert log == [*tiles, *["wait for a sum"] * 3]
