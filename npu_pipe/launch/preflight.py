"""Read what HCCL and torch_npu will read from the environment, to check it before they do.

Imports no torch.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.preflight import HcclSettings, check_needs, needs, table
from npu_pipe.device.lanes import LaneOptions, in_vain
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.variables import is_set, whole_number
from npu_pipe.runtime.tied import Tied

__all__ = ["hccl_settings", "preflight"]

_FIELDS = {
    "P2P_HCCL_BUFFSIZE": "buffer_mb",
    "STREAMS_PER_DEVICE": "streams",
    "HCCL_IF_BASE_PORT": "base_port",
    "HCCL_CONNECT_TIMEOUT": "connect_s",
    "HCCL_EXEC_TIMEOUT": "exec_s",
    "HCCL_EVENT_TIMEOUT": "event_s",
}
_DEFAULT = LaneOptions()
_MOST = 2**31 - 1
_CURE = "unset it, or give a whole number as HCCL's manual says"


def hccl_settings(environ: Mapping[str, str] | None = None) -> HcclSettings:
    """From `environ`, or the process's own. Raises ConfigError for what is no number."""
    environ = os.environ if environ is None else environ
    return HcclSettings(
        **{
            field: whole_number(environ, name, most=_MOST, cure=_CURE)
            for name, field in _FIELDS.items()
            if is_set(environ, name)
        }
    )


def preflight(
    schedule: Schedule,
    *,
    backend: str,
    local_rank: int,
    tied: Sequence[Tied] = (),
    lanes: LaneOptions = _DEFAULT,
    prefetch: int = 2,
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """For a person, what the lanes of this schedule take: a table where the backend has limits to
    run into, and which options it does not have. Raises ConfigError for what cannot go well."""
    vain = [f"lanes.{name}" for name in in_vain(lanes, backend=backend)]
    unused = f"{backend} does not have {', '.join(vain)}: without effect" if vain else None
    if backend != "hccl":
        return unused
    settings = hccl_settings(environ)
    asked = {"buffer_mb": lanes.buffer_mb, "exec_s": lanes.transfer_s}
    settings = replace(settings, **{k: value for k, value in asked.items() if value is not None})
    found = needs(pairs_used(schedule, tied), settings, ranks=schedule.ranks)
    check_needs(found, settings, local_rank=local_rank, is_free=_is_free)
    return table(found, settings, lanes, prefetch=prefetch)


def _is_free(port: int) -> bool:
    """Whether this process could use it; it does not listen there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that has just been closed
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
