"""StagedLink: transfers between devices that go through the memory of the host.

For ranks between which a device's own backend does not go, as two on one device. It is slow: the
host waits for the device at each transfer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from npu_pipe.comm.team_link import TeamLink
from npu_pipe.device.device import Device
from npu_pipe.ir.action import Action
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.record import Recorder

__all__ = ["StagedLink"]


class StagedLink:
    """See `npu_pipe.runtime.executor.Link`, which this is. inner: sends tensors of the host.

    What it records is when the host waited, which is when things ran.
    """

    copies = True

    def copies_at_once(self, tensors: Sequence[Tensor]) -> bool:
        del tensors
        return True

    def __init__(self, inner: TeamLink, device: Device) -> None:
        self._inner = inner
        self._device = device

    def recorder(self) -> Recorder:
        return self._inner.recorder()

    def start_window(
        self, schedule: Schedule, signatures: Sequence[str], recorder: Recorder
    ) -> None:
        self._inner.start_window(schedule, signatures, recorder)

    def post(self, receive: Action) -> None:
        self._inner.post(receive)

    def take(self, receive: Action) -> Parcel:
        meta, tensors = self._inner.take(receive)
        place = self._device.place
        parcel = meta, [tensor.to(place, copy=True) for tensor in tensors]
        self._inner.release(receive)
        return parcel

    def release(self, receive: Action) -> None:
        """It was released when it was copied."""

    def send(self, send: Action, parcel: Parcel) -> None:
        meta, tensors = parcel
        self._inner.send(send, (meta, [tensor.cpu() for tensor in tensors]))

    def ended(self, send: Action) -> None:
        """The copy that was sent is the inner link's affair."""

    def finish(self) -> None:
        self._inner.finish()

    @property
    def buffers(self) -> int:
        return self._inner.buffers

    @property
    def in_use(self) -> int:
        return self._inner.in_use

    def interrupt(self) -> None:
        self._inner.interrupt()

    def forget(self) -> None:
        self._inner.forget()
