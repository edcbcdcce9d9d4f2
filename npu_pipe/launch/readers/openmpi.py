"""Read the environment of Open MPI's mpirun.

mpirun tells no address. On one node the ranks meet on loopback, at a port made from the number of
the job; on several MASTER_ADDR, the node of rank 0, has to be handed on with -x.

Source: https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.launch.readers.mpi import Names, read_mpi
from npu_pipe.launch.variables import first_set
from npu_pipe.launch.world import Launcher, World

__all__ = ["claim", "read"]

_NAMES = Names(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job="PMIX_NAMESPACE",
)
_CURE = "start the ranks with mpirun, or unset every OMPI_ variable to do without it"
_HAND_ON = "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, where HOST is the node of rank 0"


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that Open MPI has started this process."""
    return first_set(environ, _NAMES.four)


def read(environ: Mapping[str, str]) -> World:
    """The World that mpirun describes. Raises ConfigError that names the variables."""
    return read_mpi(environ, _NAMES, Launcher.OPEN_MPI, cure=_CURE, hand_on=_HAND_ON)
