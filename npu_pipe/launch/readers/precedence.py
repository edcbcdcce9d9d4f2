"""The launchers whose environment can be read, and how one is chosen.

Launchers are started by launchers, and what the outer one has set is still there:

    srun torchrun train.py        one torchrun a node: the ranks are torchrun's
    srun msrun ... train.py       msrun's
    mpirun train.py               inside a Slurm job: mpirun's, whose daemons srun has started
    srun train.py                 with MASTER_ADDR exported before it: srun's

So a launcher stands above those that start it. Those of one tier never start each other: if two of
them have left their marks, nobody can say whose rank this is, and it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from npu_pipe.errors import ConfigError
from npu_pipe.launch import spawned
from npu_pipe.launch.readers import (
    env_init,
    mpich,
    msrun,
    openmpi,
    slurm,
    torch_npu_run,
    torchrun,
)
from npu_pipe.launch.world import Launcher, World

__all__ = ["TIERS", "Reader", "read_world"]


@dataclass(frozen=True, slots=True)
class Reader:
    """claim: the variable that says that the launcher has started this process, if any does."""

    launcher: Launcher
    claim: Callable[[Mapping[str, str]], str | None]
    read: Callable[[Mapping[str, str]], World]


# The precedence: the first tier with a claim is read.
TIERS: tuple[tuple[Reader, ...], ...] = (
    (
        Reader(Launcher.LOCAL, spawned.claim, spawned.read),
        Reader(Launcher.TORCHRUN, torchrun.claim, torchrun.read),
        Reader(Launcher.TORCH_NPU_RUN, torch_npu_run.claim, torch_npu_run.read),
        Reader(Launcher.MSRUN, msrun.claim, msrun.read),
    ),
    (
        Reader(Launcher.OPEN_MPI, openmpi.claim, openmpi.read),
        Reader(Launcher.MPICH, mpich.claim, mpich.read),
    ),
    (Reader(Launcher.SLURM, slurm.claim, slurm.read),),
    (Reader(Launcher.SLURM, slurm.claim_without_step, slurm.refuse_without_step),),
    (Reader(Launcher.BY_HAND, env_init.claim, env_init.read),),
)


def read_world(environ: Mapping[str, str]) -> World:
    """The World that `environ` describes; one process if no launcher has set anything.

    Raises ConfigError when the launcher's variables cannot be used, or two launchers claim it.
    """
    for tier in TIERS:
        claims = [(name, reader) for reader in tier if (name := reader.claim(environ)) is not None]
        if len(claims) > 1:
            raise _two(*claims[0], *claims[1])
        if claims:
            return claims[0][1].read(environ)
    return World.single()


def _two(name: str, reader: Reader, other_name: str, other: Reader) -> ConfigError:
    return ConfigError(
        "one launcher starts a rank",
        f"{name} says {reader.launcher.value}, {other_name} says {other.launcher.value}",
        "use one of them, or unset what the other one has left behind",
    )
