"""Read what HCCL and torch_npu will read from the environment, to check it before they do.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.preflight import HcclSettings, check_needs, needs, table
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
    environ: Mapping[str, str] | None = None,
) -> str | None:
    """A table of what the lanes of this schedule take, for a person; None for backends that
    have no such limits. Raises ConfigError for what cannot go well."""
    if backend != "hccl":
        return None
    settings = hccl_settings(environ)
    found = needs(pairs_used(schedule, tied), settings, ranks=schedule.ranks)
    check_needs(found, settings, local_rank=local_rank)
    return table(found, settings)
