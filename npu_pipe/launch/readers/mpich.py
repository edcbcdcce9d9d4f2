"""Read the environment of MPICH's mpiexec (Hydra), which Intel MPI and MVAPICH have too.

It tells no address, and no number of the job either: on one node the ranks meet on loopback, at
torch's usual port unless MASTER_PORT is set.

Source: seen with Hydra of MPICH 4.0
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.launch.readers.mpi import Names, read_mpi
from npu_pipe.launch.variables import first_set
from npu_pipe.launch.world import Launcher, World

__all__ = ["claim", "read"]

_NAMES = Names(
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    job=None,
)
_CURE = "start the ranks with mpiexec of MPICH, or unset every PMI_ and MPI_LOCAL variable"
_HAND_ON = "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500, HOST being the node of rank 0"


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that Hydra has started this process.

    Slurm's own srun sets PMI_RANK and PMI_SIZE too, with --mpi=pmi2, but not the local ones.
    """
    names = (_NAMES.local_rank, _NAMES.local_size)
    return first_set(environ, names if "SLURM_STEP_NUM_TASKS" in environ else _NAMES.four)


def read(environ: Mapping[str, str]) -> World:
    """The World that mpiexec describes. Raises ConfigError that names the variables."""
    return read_mpi(environ, _NAMES, Launcher.MPICH, cure=_CURE, hand_on=_HAND_ON)
