"""Read the environment of a Slurm job step, which srun makes.

    size, rank, local rank     SLURM_STEP_NUM_TASKS, SLURM_PROCID, SLURM_LOCALID
    address                    MASTER_ADDR, else the first host of SLURM_STEP_NODELIST or of
                               SLURM_JOB_NODELIST, where rank 0 is
    port                       MASTER_PORT, else one made from SLURM_JOB_ID and SLURM_STEP_ID

A batch script, and a shell that salloc gives, have most of these as well, for the whole job. What
only a step has is SLURM_STEP_NUM_TASKS. A step of one task is taken for one process, as without
Slurm: that is how people get a shell on a node.

Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from npu_pipe.errors import ConfigError
from npu_pipe.launch.variables import (
    check_below,
    check_same,
    derived_port,
    first_set,
    host_name,
    is_set,
    port_number,
    require,
    whole_number,
)
from npu_pipe.launch.world import Launcher, Sources, World

__all__ = ["claim", "claim_without_step", "read", "refuse_without_step"]

_SIZE = "SLURM_STEP_NUM_TASKS"
_VARIABLES = (_SIZE, "SLURM_PROCID", "SLURM_LOCALID")
_HOSTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_MOST_ID = 2**32 - 1  # those of steps like `batch` come near it
_CURE = "start the ranks with srun, or unset every SLURM_ variable to do without it"

# node7 of node7,other; rack1-node01 of rack[1-2]-node[01-04,9]
_HOST = re.compile(r"(?:[\w.-]|\[\w+(?:-\w+)?(?:,\w+(?:-\w+)?)*\])+")
_FIRST_NUMBER = re.compile(r"\[(\w+)[^\]]*\]")
# 4(x2),3: two nodes of four tasks, one of three
_COUNT = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that srun has started this process."""
    return first_set(environ, (_SIZE,))


def read(environ: Mapping[str, str]) -> World:
    """The World of this task of a step. Raises ConfigError that names the variables."""
    require(environ, _VARIABLES, cure=_CURE)
    size = whole_number(environ, _SIZE, least=1, cure=_CURE)
    if size == 1:
        return World.single()
    rank = whole_number(environ, "SLURM_PROCID", cure=_CURE)
    local_rank = whole_number(environ, "SLURM_LOCALID", cure=_CURE)
    check_below(environ, "SLURM_PROCID", _SIZE, cure=_CURE)
    check_below(environ, "SLURM_LOCALID", _SIZE, cure=_CURE)
    for name, other in zip(_VARIABLES, ("WORLD_SIZE", "RANK", "LOCAL_RANK"), strict=True):
        check_same(environ, name, other, cure=f"unset {other}: srun is there")
    address, address_source = _address(environ)
    port, port_source = _port(environ)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=_local_size(environ, size=size, local_rank=local_rank),
        address=address,
        port=port,
        launcher=Launcher.SLURM,
        sources=Sources(
            rank="SLURM_PROCID",
            size=_SIZE,
            local_rank="SLURM_LOCALID",
            address=address_source,
            port=port_source,
        ),
    )


def claim_without_step(environ: Mapping[str, str]) -> str | None:
    """The variable that says that several tasks were asked for, and srun was forgotten; unless
    this process was given a rank by hand."""
    several = (environ.get("SLURM_NTASKS") or "1") != "1"
    is_of_slurm = is_set(environ, "SLURM_JOB_ID") and not is_set(environ, "RANK")
    return "SLURM_NTASKS" if several and is_of_slurm else None


def refuse_without_step(environ: Mapping[str, str]) -> World:
    """Raise ConfigError that says so."""
    raise ConfigError(
        "the tasks of a Slurm job are started by srun",
        f"SLURM_NTASKS is {environ['SLURM_NTASKS']!r:.40}, and {_SIZE} is not set: this is the "
        "batch script itself, or a shell in its place",
        "put srun before the command, or unset SLURM_NTASKS to run on this machine alone",
    )


def _address(environ: Mapping[str, str]) -> tuple[str, str]:
    """Where rank 0 is, and how it was found."""
    if is_set(environ, "MASTER_ADDR"):
        return host_name(environ, "MASTER_ADDR"), "MASTER_ADDR"
    name = first_set(environ, _HOSTS)
    cure = "export MASTER_ADDR, the host of rank 0, before srun"
    if name is None:
        raise ConfigError(
            "the ranks of a Slurm step meet on its first host",
            f"{_HOSTS[0]}, {_HOSTS[1]} and MASTER_ADDR missing",
            cure,
        )
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ConfigError(
            f"rank 0 is on the first host of {name}",
            "SLURM_DISTRIBUTION is 'arbitrary', which puts it anywhere, and MASTER_ADDR is not set",
            cure,
        )
    first = _HOST.match(environ[name])
    if first is None or environ[name][first.end() :][:1] not in ("", ","):
        raise ConfigError(
            f"{name} is a list of hosts such as node[01-04],other",
            f"{name} is {environ[name]!r:.80}",
            cure,
        )
    return _FIRST_NUMBER.sub(r"\1", first[0]), f"first host of {name}"


def _port(environ: Mapping[str, str]) -> tuple[int, str]:
    if is_set(environ, "MASTER_PORT"):
        return port_number(environ, "MASTER_PORT", cure="unset it, or export a port"), "MASTER_PORT"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID")
    cure = "export MASTER_PORT, a free port of the first host, before srun"
    require(environ, names, cure=cure)
    numbers = (whole_number(environ, name, most=_MOST_ID, cure=cure) for name in names)
    return derived_port(".".join(map(str, numbers))), f"made from {' and '.join(names)}"


def _local_size(environ: Mapping[str, str], *, size: int, local_rank: int) -> int | None:
    """Of SLURM_STEP_TASKS_PER_NODE, if that and SLURM_NODEID are set."""
    if not (is_set(environ, _PER_NODE) and is_set(environ, "SLURM_NODEID")):
        return None
    node = whole_number(environ, "SLURM_NODEID", cure=_CURE)
    counts: list[int] = []
    for part in environ[_PER_NODE].split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"{_PER_NODE} is a list of counts such as 4(x2),3",
                f"{_PER_NODE} is {environ[_PER_NODE]!r:.40}",
                _CURE,
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if sum(counts) != size or node >= len(counts) or local_rank >= counts[node]:
        raise ConfigError(
            "SLURM_NODEID and SLURM_LOCALID name a task of the step",
            f"they are {node} and {local_rank}, {_PER_NODE} is {environ[_PER_NODE]}, {_SIZE} is "
            f"{size}",
            _CURE,
        )
    return counts[node]
