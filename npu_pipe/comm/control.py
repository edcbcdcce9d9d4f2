"""Control traffic: small JSON values among all ranks, beside the lanes."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.groups import Groups

__all__ = ["Control"]

_FRAME = 1024  # bytes of the first all-gather: the length in 8, then what fits


class Control:
    """One rank's end of the control channel.

    Collective calls are made by all ranks in the same order; each raises PeerError when a rank
    is lost.
    """

    def __init__(self, groups: Groups) -> None:
        self.rank = groups.rank
        self.size = groups.size
        self._groups = groups
        self._told: list[tuple[torch.Tensor, dist.Work]] = []

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks. JSON in, JSON out."""
        payload = _bytes(json.dumps(value))
        frame = _zeros(_FRAME)
        frame[:8] = _number(len(payload)).view(torch.uint8)
        frame[8 : 8 + len(payload)] = payload[: _FRAME - 8]
        frames = self._all_gather(frame)
        lengths = [int(each[:8].view(torch.int64)) for each in frames]
        bodies = [each[8:] for each in frames]
        if max(lengths) > _FRAME - 8:
            body = _zeros(max(lengths))
            body[: len(payload)] = payload
            bodies = self._all_gather(body)
        return [
            json.loads(_text(body[:length])) for body, length in zip(bodies, lengths, strict=True)
        ]

    def tell(self, rank: int, text: str, *, topic: int) -> None:
        """Send a text to one rank, without waiting. Texts of a topic arrive in order."""
        payload = _bytes(text)
        with peer_failures(f"rank {self.rank} was telling rank {rank}"):
            for tensor in (_number(len(payload)), payload):
                self._told.append((tensor, self._groups.control.send([tensor], rank, topic)))

    def hear(self, rank: int, *, topic: int) -> str:
        """Wait for the next text of a topic from a rank."""
        with peer_failures(f"rank {self.rank} was waiting to hear from rank {rank}"):
            length = _number(0)
            self._groups.control.recv([length], rank, topic).wait()
            payload = _zeros(int(length))
            self._groups.control.recv([payload], rank, topic).wait()
        return _text(payload)

    def forget(self) -> None:
        """Drop what is under way: after an error."""
        self._told.clear()

    def finish(self) -> None:
        """Wait until all that was told has gone out."""
        with peer_failures(f"rank {self.rank} was telling other ranks"):
            while self._told:
                self._told.pop()[1].wait()

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with peer_failures(f"rank {self.rank} was meeting all ranks"):
            self._groups.control.allgather([found], [tensor]).wait()
        return found


# On the host, whatever device tensors are made on by default (torch.set_default_device).


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device="cpu")


def _number(value: int) -> torch.Tensor:
    return torch.tensor([value], device="cpu")


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _text(payload: torch.Tensor) -> str:
    return payload.numpy().tobytes().decode()
