"""Control traffic: small JSON values among all ranks, beside the lanes."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures

__all__ = ["Control"]

_FRAME = 1024  # bytes of the first all-gather: the length in 8, then what fits


class Control:
    """One rank's end of the control channel.

    Collective calls are made by all ranks in the same order; each raises PeerError when a rank
    is lost or does not come within the group's time-out.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group = group
        self._store = group.get_group_store()  # keys in it are the group's own
        self._timeout = timedelta(seconds=timeout_s)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks. JSON in, JSON out."""
        payload = json.dumps(value).encode()
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        frame[:8] = torch.tensor([len(payload)], dtype=torch.int64).view(torch.uint8)
        head = payload[: _FRAME - 8]
        frame[8 : 8 + len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        frames = self._all_gather(frame)
        lengths = [int(each[:8].view(torch.int64)) for each in frames]
        longest = max(lengths)
        if longest > _FRAME - 8:
            body = torch.zeros(longest, dtype=torch.uint8)
            body[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            bodies = self._all_gather(body)
        else:
            bodies = [each[8:] for each in frames]
        return [
            json.loads(body[:length].numpy().tobytes())
            for body, length in zip(bodies, lengths, strict=True)
        ]

    def publish(self, key: str, text: str) -> None:
        """Make a text known under a key that no rank has used before."""
        with peer_failures(f"rank {self.rank} was publishing {key}"):
            self._store.set(key, text)

    def fetch(self, key: str) -> str:
        """Wait for a published text."""
        with peer_failures(f"rank {self.rank} was waiting for {key}"):
            self._store.wait([key], self._timeout)
            return bytes(self._store.get(key)).decode()

    def is_published(self, key: str) -> bool:
        with peer_failures(f"rank {self.rank} was looking for {key}"):
            return bool(self._store.check([key]))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with peer_failures(f"rank {self.rank} was meeting all ranks"):
            self._group.allgather([found], [tensor]).wait()
        return found
