"""The environment of the ranks that `npu_pipe.launch.local` starts: how it is written and read.

It holds torchrun's variables too, so that any torch program can be a rank.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from npu_pipe.launch.readers.env_init import read_five
from npu_pipe.launch.variables import first_set, is_set, require, whole_number
from npu_pipe.launch.world import Launcher, World

__all__ = ["claim", "own_world", "rank_environment", "read"]

_LISTEN_FD = "NPU_PIPE_LISTEN_FD"
_REPORT_FD = "NPU_PIPE_REPORT_FD"
_LIFELINE_FD = "NPU_PIPE_LIFELINE_FD"
_PARENT = "NPU_PIPE_PARENT"  # the process that gave the rank these descriptors
_VARIABLES = (_REPORT_FD, _LIFELINE_FD)
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # torchrun's, so that other programs know it too
# What an outer torchrun, torch_npu_run or msrun has set is not about this job.
_OUTER = (
    *("TORCHELASTIC_", "TORCH_NPU_USE_PARALLEL_TCPSTORE"),
    *("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_", "MS_NODE_ID", "MS_SIMULATION_LEVEL"),
)

_CURE = "start the job again with npu-pipe, or unset every NPU_PIPE_..._FD variable"


def rank_environment(world: World, environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank of a local launch gets: the user's `environ`, and who it is.

    One thread a rank unless the user has set OMP_NUM_THREADS: the ranks share this machine, and
    more threads than cores make all of them slow. Gloo stays on loopback.
    """
    kept = {name: text for name, text in environ.items() if not name.startswith(_OUTER)}
    descriptors = {
        _LISTEN_FD: world.listen_fd,
        _REPORT_FD: world.report_fd,
        _LIFELINE_FD: world.lifeline_fd,
    }
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return (
        {name: text for name, text in kept.items() if name not in descriptors}
        | {name: text for name, text in defaults.items() if not is_set(kept, name)}
        | {
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "LOCAL_RANK": str(world.local_rank),
            "LOCAL_WORLD_SIZE": str(world.size),
            "MASTER_ADDR": world.address,
            "MASTER_PORT": str(world.port),
            _RESTARTS: str(world.restarts),
            _PARENT: str(os.getpid()),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        | {name: str(fd) for name, fd in descriptors.items() if fd is not None}
    )


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that a local launch has started this process."""
    return first_set(environ, _VARIABLES)


def read(environ: Mapping[str, str]) -> World:
    """The World that `rank_environment` has described. Raises ConfigError."""
    require(environ, _VARIABLES, cure=_CURE)

    def number(name: str) -> int | None:
        return whole_number(environ, name, cure=_CURE) if is_set(environ, name) else None

    return dataclasses.replace(
        read_five(environ, Launcher.LOCAL, cure=_CURE),
        restarts=number(_RESTARTS) or 0,
        listen_fd=number(_LISTEN_FD),
        report_fd=number(_REPORT_FD),
        lifeline_fd=number(_LIFELINE_FD),
    )


def own_world(world: World, environ: Mapping[str, str]) -> World:
    """What `world` is to this very process. One that a rank has started has its environment too,
    but not its descriptors: their numbers are those of other files, or of none."""
    if environ.get(_PARENT) == str(os.getppid()):
        return world
    return dataclasses.replace(world, listen_fd=None, report_fd=None, lifeline_fd=None)
