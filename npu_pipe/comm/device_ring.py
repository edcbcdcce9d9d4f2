"""Receive buffers on a device, used again and again.

A buffer is given back while what reads it may not have run yet. So an event goes with it, and the
stream of the next receive waits for that, not the host. That is all that keeps its memory: no
tensor is recorded with a stream, which would hold memory longer and let it grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from npu_pipe.comm.ring import fill_with_nan
from npu_pipe.device.device import Device, Event, Stream
from npu_pipe.runtime.boundary import TensorMeta

__all__ = ["DeviceRing"]


class DeviceRing:
    """As `npu_pipe.comm.ring.Ring`. stream: of the receives, which the buffers belong to.

    `get` is called under that stream, `put` under the one that computes.
    """

    def __init__(
        self, metas: Sequence[TensorMeta], *, device: Device, stream: Stream, poison: bool
    ) -> None:
        self.nbytes = 0
        self._metas = tuple(metas)
        self._device = device
        self._stream = stream
        self._poison = poison
        self._free: deque[tuple[list[Tensor], Event]] = deque()
        self.made = 0

    def get(self) -> list[Tensor]:
        if self._free:
            buffers, read = self._free.popleft()  # the one that was read first
            self._stream.wait_event(read)
            return buffers
        self.made += 1
        place = self._device.place
        with torch.inference_mode(False):  # an evaluation's buffers are used in training too
            buffers = [torch.empty(m.shape, dtype=m.dtype, device=place) for m in self._metas]
        self.nbytes += sum(buffer.nbytes for buffer in buffers)
        return buffers

    def put(self, buffers: list[Tensor]) -> None:
        if self._poison:
            for buffer in buffers:
                fill_with_nan(buffer)
        self._free.append((buffers, self._device.current_stream().record_event()))
