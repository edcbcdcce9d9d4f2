"""What a Pipeline that is made by a program of one's own is held to: as a job, by preflight."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from npu_pipe.device.device import Device
from npu_pipe.device.inventory import room_on
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.preflight import preflight
from npu_pipe.runtime.tied import Tied

__all__ = ["limits_of"]


def limits_of(
    schedule: Schedule, *, local_rank: int, tied: Sequence[Tied] = ()
) -> Callable[[Device], None]:
    """Gives what raises ConfigError where the communicators of a pipeline cannot go well on a
    device.

    Whether ports are free is not looked at: an earlier pipeline of the process may hold them.
    """

    def check(device: Device) -> None:
        device.select()
        preflight(
            schedule,
            backend=device.backend,
            local_rank=local_rank,
            tied=tied,
            room_bytes=room_on(device),
            is_free=lambda _: True,
        )

    return check
