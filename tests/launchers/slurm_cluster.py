"""A Slurm of one node, on loopback and of a test's own: munged, slurmctld and slurmd."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from launched import free_port, wait_until

__all__ = ["PROGRAMS", "slurm_cluster"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")

_CONF = """
ClusterName=npu-pipe-test
SlurmctldHost={host}(127.0.0.1)
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
SchedulerParameters=sched_interval=1,bf_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000
PartitionName=test Nodes=ALL Default=YES State=UP OverSubscribe=FORCE:8
"""


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which srun and sbatch find it. folder: short, for a socket lies in it."""
    host = socket.gethostname().split(".")[0]
    (folder / "state").mkdir()
    (folder / "spool").mkdir()
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    ports = {"ctld_port": free_port(), "slurmd_port": free_port()}
    cpus = os.cpu_count() or 1
    conf.write_text(_CONF.format(host=host, folder=folder, cpus=cpus, **ports))
    environ = {"SLURM_CONF": str(conf)}
    munged = ["--force", "--foreground", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "seed", "log")]
    with ExitStack() as daemons:
        for program, arguments in (("munged", munged), ("slurmctld", ["-D"]), ("slurmd", ["-D"])):
            log = daemons.enter_context((folder / f"{program}.log").open("wb"))
            path = shutil.which(program)
            assert path is not None
            process = subprocess.Popen(
                [path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environ},
            )
            daemons.callback(_end, process)
            if program == "munged":
                wait_until((folder / "munge.socket").exists, within_s=20)
        wait_until(
            lambda: _is_idle(environ),
            within_s=40,
            otherwise=lambda: "".join(log.read_text() for log in folder.glob("slurm*.log")),
        )
        yield environ


def _is_idle(environ: dict[str, str]) -> bool:
    command = ["sinfo", "--noheader", "--format=%T"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environ}
    )
    return done.stdout.strip() == "idle"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
