"""The launch script of a job for a cluster: bash, to be read before it is run.

torchrun    once on each node: MASTER_ADDR=node0 bash run.sh
msrun       once on each node, with its number: MASTER_ADDR=node0 NODE_RANK=1 bash run.sh
slurm       once: sbatch run.sh
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from npu_pipe.launch.cluster_settings import Target, interface_variables, settings_for
from npu_pipe.launch.mesh import Mesh

__all__ = ["ClusterJob", "ClusterLauncher", "cluster_script"]

_WIDTH = 98


class ClusterLauncher(Enum):
    """What starts the ranks on all nodes."""

    MSRUN = "msrun"
    TORCHRUN = "torchrun"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """train: the words after `npu-pipe train`. folder: of the run. per_node: ranks of a node.
    port: where all ranks meet, on the first node. restarts: how often to start anew by itself."""

    train: Sequence[str]
    folder: Path
    mesh: Mesh
    per_node: int
    target: Target
    port: int
    restarts: int

    @property
    def nodes(self) -> int:
        return max(1, self.mesh.size // self.per_node)


def cluster_script(job: ClusterJob, launcher: ClusterLauncher) -> str:
    """The text of the script."""
    head, start = _WRITERS[launcher](job)
    parts = [
        "#!/usr/bin/env bash",
        *head,
        "",
        "set -euo pipefail",
        *_cann(job.target),
        *(
            line
            for each in settings_for(job.target)
            for line in _export(each.name, each.value, each.why)
        ),
        *_interfaces(job),
        "",
        *start,
    ]
    return "\n".join(parts) + "\n"


def _torchrun(job: ClusterJob) -> tuple[list[str], list[str]]:
    head = _comment(
        f"{_what(job)}, by torchrun. In the folder that the job's paths start from"
        f"{f', on each of the {job.nodes} nodes, in any order' if job.nodes > 1 else ''}:",
        "",
        f"    {'MASTER_ADDR=<name of one of them> ' if job.nodes > 1 else ''}bash run.sh",
    )
    place = '"$MASTER_ADDR:$MASTER_PORT"'
    start = [
        *_meeting(job),
        *_resume(job),
        *_comment(
            "c10d: the agents of all nodes meet again after a failure. Then they start all ranks "
            "anew, and training goes on from its last checkpoint by itself."
        ),
        "exec torchrun \\",
        f"  --nnodes={job.nodes} --nproc-per-node={job.per_node} \\",
        f'  --rdzv-backend=c10d --rdzv-endpoint={place} --rdzv-id="${{JOB_ID:-npu-pipe}}" \\',
        f"  --max-restarts={job.restarts} \\",
        f"  -m npu_pipe train {_train(job)}",
    ]
    return head, start


def _msrun(job: ClusterJob) -> tuple[list[str], list[str]]:
    head = _comment(
        f"{_what(job)}, by msrun. In the folder that the job's paths start from"
        f"{f', on node K of 0 to {job.nodes - 1}' if job.nodes > 1 else ''}:",
        "",
        "    "
        + ("MASTER_ADDR=<address of node 0> NODE_RANK=K " if job.nodes > 1 else "")
        + "bash run.sh",
    )
    start = [
        *_meeting(job),
        *_comment("The number of this node. msrun cannot find it out, and numbers ranks by it."),
        'NODE_RANK="${NODE_RANK:-0}"'
        if job.nodes == 1
        else ': "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}"',
        "",
        *_comment(
            f"msrun starts nothing anew: this does, up to {job.restarts} times, on every node, for "
            "ranks of all nodes end with the one that failed."
        ),
        f"for ((attempt = 0; attempt <= {job.restarts}; attempt++)); do",
        *_indented(_resume(job)),
        *_indented(
            _comment(
                "--join=True: wait for the ranks, end them all with one that fails, and tell how "
                "it went. Without it msrun returns 0 at once, and leaves ranks behind.",
                "--node_rank: without it ranks of several nodes have the same numbers.",
                width=_WIDTH - 2,
            )
        ),
        "  status=0",
        "  msrun \\",
        f"    --worker_num={job.mesh.size} --local_worker_num={job.per_node} \\",
        '    --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" \\',
        '    --node_rank="$NODE_RANK" --join=True --log_dir=msrun_log \\',
        f"    python -m npu_pipe train {_train(job)} || status=$?",
        '  if [ "$status" -eq 0 ]; then',
        "    exit 0",
        "  fi",
        '  echo "msrun ended with status $status: see msrun_log/worker_*.log" >&2',
        "done",
        'exit "$status"',
    ]
    return head, start


def _slurm(job: ClusterJob) -> tuple[list[str], list[str]]:
    head = [
        *_comment(
            f"{_what(job)}, by Slurm. In the folder that the job's paths start from:",
            "",
            "    sbatch run.sh",
        ),
        "#",
        f"#SBATCH --nodes={job.nodes}",
        f"#SBATCH --ntasks-per-node={job.per_node}",
        *_comment("No other job on these nodes: HCCL's ports and the cores are this job's."),
        "#SBATCH --exclusive",
        *_comment("Devices, as your cluster names them; take one # away."),
        f"##SBATCH --gres={'npu' if job.target is Target.NPU else 'gpu'}:{job.per_node}",
        *_comment("Started anew after a failure or a lost node, and the log goes on."),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
    ]
    start = [
        *_resume(job),
        *_comment(
            "Where ranks meet, npu-pipe reads from Slurm: on the first host of the list, at a port "
            "made from the numbers of the job and the step.",
            "--kill-on-bad-exit: one rank that fails ends all, on all nodes.",
            "--cpu-bind=none: else each rank, with all its threads, may get one core."
            + (" CPU_AFFINITY_CONF binds it." if job.target is Target.NPU else ""),
        ),
        "status=0",
        "srun --kill-on-bad-exit=1 --cpu-bind=none \\",
        f"  python -m npu_pipe train {_train(job)} || status=$?",
        "",
        *_comment(
            f"A failure is tried again up to {job.restarts} times; 2 is a mistake in the job, "
            "which comes again."
        ),
        'if [ "$status" -ne 0 ] && [ "$status" -ne 2 ] && '
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]
    return head, start


_WRITERS: dict[ClusterLauncher, Callable[[ClusterJob], tuple[list[str], list[str]]]] = {
    ClusterLauncher.MSRUN: _msrun,
    ClusterLauncher.TORCHRUN: _torchrun,
    ClusterLauncher.SLURM: _slurm,
}


def _what(job: ClusterJob) -> str:
    nodes = f"{job.nodes} nodes" if job.nodes > 1 else "1 node"
    return f"{job.train[0]}: {job.mesh} on {nodes} of {job.per_node}"


def _train(job: ClusterJob) -> str:
    return f'{shlex.join(job.train)} ${{resume:+"$resume"}}'


def _meeting(job: ClusterJob) -> list[str]:
    address = (
        'MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"'
        if job.nodes == 1
        else ': "${MASTER_ADDR:?set MASTER_ADDR to the address of the first node}"'
    )
    return [
        *_comment(
            "Where all ranks meet: an address that every node reaches, and a free port there."
        ),
        address,
        f'MASTER_PORT="${{MASTER_PORT:-{job.port}}}"',
        "",
    ]


def _resume(job: ClusterJob) -> list[str]:
    return [
        *_comment("A run that was begun goes on, from its last checkpoint."),
        "resume=",
        f"if [ -f {shlex.quote(str(job.folder / 'config.toml'))} ]; then",
        "  resume=--resume",
        "fi",
        "",
    ]


def _cann(target: Target) -> list[str]:
    if target is not Target.NPU:
        return []
    return [
        "",
        *_comment("CANN's own settings, unless they are there already."),
        'if [ -z "${ASCEND_TOOLKIT_HOME:-}" ]; then',
        "  set +u # it reads variables that may not be set",
        "  # shellcheck source=/dev/null",
        '  source "${CANN_SET_ENV:-/usr/local/Ascend/ascend-toolkit/set_env.sh}"',
        "  set -u",
        "fi",
    ]


def _export(name: str, value: str, why: str) -> list[str]:
    return ["", *_comment(why), f'export {name}="${{{name}:-{value}}}"']


def _interfaces(job: ClusterJob) -> list[str]:
    if job.nodes == 1:
        return []
    return [
        "",
        *_comment(
            "The network between nodes, where a node has several: `ip -brief address` tells their "
            "names. Take the # away."
        ),
        *(f"#export {name}=eth0" for name in interface_variables(job.target)),
    ]


def _comment(*paragraphs: str, width: int = _WIDTH) -> list[str]:
    lines = []
    for text in paragraphs:
        indent = "    " if text.startswith("    ") else ""
        wrapped = textwrap.wrap(text.strip(), width - len(indent), break_long_words=False)
        lines += [f"# {indent}{line}" for line in wrapped] or ["#"]
    return lines


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" if line else "" for line in lines]
