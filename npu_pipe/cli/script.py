"""npu-pipe script CONFIG --launcher torchrun: write the launch script of a job for a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from npu_pipe.cli.common import Count, Output, optional, parse_flags
from npu_pipe.cli.job_command import JobCommand, read_command
from npu_pipe.errors import ConfigError
from npu_pipe.files import write_whole
from npu_pipe.launch.cluster_script import ClusterJob, ClusterLauncher, cluster_script
from npu_pipe.launch.cluster_settings import Target, target_of
from npu_pipe.launch.mesh import check_nodes
from npu_pipe.train.job import check_settings, mesh_of

__all__ = ["ScriptFlags", "run"]

_HIGHEST_PORT = 65535
_MOST_RESTARTS = 1000


_TARGETS = f"{{{','.join(target.value for target in Target)}}}"


def _target(word: str) -> Target:
    kinds = {target.value: target for target in Target}
    if word not in kinds:
        raise ValueError(f"{word!r} is none of {', '.join(kinds)}")
    return kinds[word]


@dataclass(frozen=True, slots=True)
class ScriptFlags:
    """Write a bash script that starts a job on a cluster, with every setting explained. What
    follows -- are flags of train, which the script hands on.

    npu-pipe script job.toml --launcher torchrun --per-node 8 --output run.sh

    npu-pipe script job.toml --launcher msrun --per-node 8 -- --mesh.dp 2
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG")]
    """The job's TOML file, at the path that it has on the cluster."""
    launcher: Annotated[ClusterLauncher, tyro.conf.EnumChoicesFromValues]
    """What starts the ranks."""
    per_node: Count = None
    """Ranks of a node, one a device; the job's cluster.ranks_per_node if left out."""
    target: Annotated[Target | None, optional(_target, _TARGETS)] = None
    """Kind of device to set the environment for; the job's own, npu where that is auto."""
    port: int = 29500
    """Where all ranks meet on the first node; Slurm needs none."""
    max_restarts: int = 3
    """How often to start all ranks anew after a failure."""
    output: Output = None
    """Where to write it; to the screen if left out."""


def run(args: Sequence[str]) -> int:
    """The verb. Raises UsageError for a job that cannot run on such nodes."""
    at = list(args).index("--") if "--" in args else len(args)
    ours, theirs = args[:at], args[at + 1 :]
    flags = parse_flags(ScriptFlags, ours, verb="script")
    train = (_word(flags.config), *theirs)
    job = read_command(JobCommand, train, verb="train").job
    check_settings(job)  # its text may be on the cluster only
    mesh = mesh_of(job)
    _check(flags)
    per_node = job.cluster.ranks_per_node if flags.per_node is None else flags.per_node
    for word in check_nodes(mesh, per_node=per_node):
        print(f"npu-pipe: {word}", file=sys.stderr)
    text = cluster_script(
        ClusterJob(
            train=train,
            folder=job.run.folder,
            mesh=mesh,
            per_node=min(per_node, mesh.size),
            target=flags.target or target_of(job.run.device),
            port=flags.port,
            restarts=flags.max_restarts,
        ),
        flags.launcher,
    )
    if flags.output is None:
        print(text, end="")
    else:
        write_whole(text, flags.output)
    return 0


def _word(config: Path) -> str:
    """As train takes it, and no flag."""
    word = f"./{config}" if str(config).startswith("-") else str(config)
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            "a script is UTF-8 text, and so is the path of its job file",
            f"it is {word!r:.80}",
            "give the file another name",
        ) from error
    return word


def _check(flags: ScriptFlags) -> None:
    for name, value, least, most in (
        ("port", flags.port, 1, _HIGHEST_PORT),
        ("max-restarts", flags.max_restarts, 0, _MOST_RESTARTS),
    ):
        if not least <= value <= most:
            raise ConfigError(
                f"{name} is from {least} to {most}",
                f"it is {value}",
                f"give {name} in these bounds",
            )
