"""Read what HCCL and torch_npu will read from the environment, to check it before they do.

Imports no torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.preflight import HcclSettings, check_needs, needs, table
from npu_pipe.device.lanes import LaneOptions, in_vain
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.mesh import Axis, Mesh
from npu_pipe.launch.ports import is_free as is_free_here
from npu_pipe.launch.variables import whole_number
from npu_pipe.runtime.tied import Tied

__all__ = ["hccl_settings", "other_groups", "preflight"]

_FIELDS = {
    "P2P_HCCL_BUFFSIZE": "buffer_mb",
    "HCCL_BUFFSIZE": "group_buffer_mb",
    "STREAMS_PER_DEVICE": "streams",
    "HCCL_IF_BASE_PORT": "base_port",
    "HCCL_CONNECT_TIMEOUT": "connect_s",
    "HCCL_EXEC_TIMEOUT": "exec_s",
    "HCCL_EVENT_TIMEOUT": "event_s",
}
_DEFAULT = LaneOptions()
_ALONE = Mesh()
_CURE = "unset it, or give a whole number as HCCL's manual says"
_MB = 1e6


def hccl_settings(
    lanes: LaneOptions = _DEFAULT, environ: Mapping[str, str] | None = None
) -> HcclSettings:
    """What the job says, else `environ`, or the process's own.

    Raises ConfigError for what is no number, or 0: without P2P_HCCL_BUFFSIZE the transfers of a
    lane share one communicator and one stream. Empty is 0, for torch_npu.
    """
    environ = os.environ if environ is None else environ
    asked = {"buffer_mb": lanes.buffer_mb, "exec_s": lanes.transfer_s}
    found = {field: value for field, value in asked.items() if value is not None}
    for name, field in _FIELDS.items():
        if name in environ and field not in found:
            found[field] = whole_number(environ, name, least=1, cure=_CURE)
    return HcclSettings(**found)


def preflight(
    schedule: Schedule,
    *,
    backend: str,
    local_rank: int,
    mesh: Mesh = _ALONE,
    tied: Sequence[Tied] = (),
    lanes: LaneOptions = _DEFAULT,
    prefetch: int = 2,
    room_bytes: float = math.inf,
    is_free: Callable[[int], bool] = is_free_here,
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """For a person, what the communicators of a job take: a table where the backend has limits to
    run into, and which options it does not have.

    mesh: the ranks along whose other axes each rank is in a group too. room_bytes: of the device,
    free. is_free: whether nobody uses a port.
    Raises ConfigError for what cannot go well.
    """
    vain = [f"lanes.{name}" for name in in_vain(lanes, backend=backend)]
    told = [f"{backend} does not have {', '.join(vain)}: without effect"] if vain else []
    if backend == "hccl":
        settings, groups = hccl_settings(lanes, environ), other_groups(mesh)
        found = needs(
            pairs_used(schedule, tied), settings, ranks=schedule.ranks, groups=len(groups)
        )
        check_needs(
            found,
            settings,
            local_rank=local_rank,
            is_free=is_free,
            room_mb=room_bytes / _MB,
        )
        told.append(table(found, settings, lanes, prefetch=prefetch, groups=groups))
    return "\n".join(told) or None


def other_groups(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which a rank is in a group, beside its pipeline."""
    return tuple(axis.value for axis in Axis if axis is not Axis.PP and mesh.size_along(axis) > 1)
