"""The environment of the ranks that `npu_pipe.launch.local` starts: how it is written and read.

It holds torchrun's variables too, so that any torch program can be a rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from npu_pipe.errors import ConfigError
from npu_pipe.launch import torchrun
from npu_pipe.launch.variables import is_set, require, whole_number
from npu_pipe.launch.world import Launcher, World

__all__ = ["VARIABLES", "rank_environment", "read"]

_LISTEN_FD = "NPU_PIPE_LISTEN_FD"
_REPORT_FD = "NPU_PIPE_REPORT_FD"
_LIFELINE_FD = "NPU_PIPE_LIFELINE_FD"
VARIABLES = (_REPORT_FD, _LIFELINE_FD)

_CURE = "start the job again with npu-pipe, or unset every NPU_PIPE_..._FD variable"
_MOST_FD = 2**31 - 1


def rank_environment(world: World, environ: Mapping[str, str]) -> dict[str, str]:
    """What a rank of a local launch gets: the user's `environ`, and who it is.

    One thread a rank unless the user has set OMP_NUM_THREADS: the ranks share this machine, and
    more threads than cores make all of them slow. Gloo stays on loopback.
    """
    # What an outer torchrun has set is not about this job.
    kept = {name: text for name, text in environ.items() if not name.startswith("TORCHELASTIC_")}
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
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        | {name: str(fd) for name, fd in descriptors.items() if fd is not None}
    )


def read(environ: Mapping[str, str]) -> World:
    """The World that `rank_environment` has described. Raises ConfigError."""
    if is_set(environ, torchrun.MARK):
        raise ConfigError(
            "one launcher starts a rank",
            f"{_REPORT_FD} says npu-pipe, {torchrun.MARK} says torchrun",
            "use one of them; do not start torchrun from a rank of npu-pipe",
        )
    require(environ, VARIABLES, cure=_CURE)

    def descriptor(name: str) -> int | None:
        if not is_set(environ, name):
            return None
        return whole_number(environ, name, most=_MOST_FD, cure=_CURE)

    return dataclasses.replace(
        torchrun.read(environ),
        launcher=Launcher.LOCAL,
        listen_fd=descriptor(_LISTEN_FD),
        report_fd=descriptor(_REPORT_FD),
        lifeline_fd=descriptor(_LIFELINE_FD),
    )
