"""A rank follows its launcher, and only its launcher: with launchers of a few lines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched import Launched, wait_until

pytestmark = pytest.mark.timeout(60)

# Starts one rank in a process group of its own, with its log in a file, as msrun does; with a
# wrapper between the two if asked, and a `tail -f` of the log; then waits for ever.
LAUNCHER = """
import subprocess, sys, time
rank = [sys.executable, "rank.py", sys.argv[1]]
if sys.argv[2] == "wrapped":
    rank = ["sh", "-c", " ".join(rank) + "; true"]
with open("worker_0.log", "w") as log:
    subprocess.Popen(rank, stdout=log, stderr=log, start_new_session=True)
subprocess.Popen(["/usr/bin/tail", "-f", "worker_0.log"])
time.sleep(600)
"""
RANK = """
import subprocess, sys, threading, time
from pathlib import Path
from npu_pipe.launch.lifeline import end_with_launcher
from npu_pipe.launch.world import Launcher, World
place = dict(rank=0, size=2, local_rank=0, address="127.0.0.1", port=1)
world = World(**place, launcher=Launcher[sys.argv[1]])
end_with_launcher(world)
end_with_launcher(world)
assert threading.active_count() <= 2
subprocess.Popen(["sleep", "600"])
Path("ready").write_text("")
time.sleep(600)
"""


@pytest.fixture
def job(tmp_path: Path) -> Launched:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    return Launched(tmp_path, {})


def kill_launcher(
    job: Launched, launcher: str, *, wrapped: bool = False, options: Sequence[str] = ()
) -> None:
    how = "wrapped" if wrapped else "bare"
    job.start([sys.executable, "launcher.py", launcher, how, *options])
    wait_until((job.folder / "ready").exists, within_s=30, otherwise=job.output)
    job.send(signal.SIGKILL)  # and nobody waits for it yet: a zombie is dead too


def programs(job: Launched) -> list[str]:
    """What is left of the job: the programs' names."""
    names = []
    for pid in job.left():
        try:
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return sorted(names)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("launcher", ["TORCHRUN", "TORCH_NPU_RUN", "OPEN_MPI", "MPICH", "SLURM"])
def test_a_rank_and_its_children_end_with_the_launcher(
    job: Launched, launcher: str, wrapped: bool
) -> None:
    kill_launcher(job, launcher, wrapped=wrapped)
    try:
        wait_until(lambda: programs(job) == ["tail"], within_s=20, otherwise=job.output)
        said = (job.folder / "worker_0.log").read_text()
        assert said.startswith("rank 0: ")
        assert said.endswith(" is gone, and so is this rank\n")
    finally:
        job.close()


@pytest.mark.parametrize("options", [["--join=True"], ["--join", "True"], ["--jo=True"]])
def test_msrun_that_waits_is_followed_and_its_tail_ends_too(
    job: Launched, options: list[str]
) -> None:
    other = subprocess.Popen(  # somebody's who looks at the same log
        ["tail", "-f", job.folder / "launcher.py"], stdout=subprocess.DEVNULL
    )
    try:
        kill_launcher(job, "MSRUN", options=options)
        wait_until(lambda: programs(job) == [], within_s=20, otherwise=lambda: str(programs(job)))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        job.close()


@pytest.mark.parametrize("options", [[], ["--join=False"], ["--join", "False"]])
def test_msrun_that_does_not_wait_is_not_followed(job: Launched, options: list[str]) -> None:
    kill_launcher(job, "MSRUN", options=options)
    try:
        time.sleep(1.5)  # three looks
        assert len([name for name in programs(job) if name != "tail"]) == 2
    finally:
        job.close()


@pytest.mark.parametrize("launcher", ["BY_HAND", "ONE_PROCESS", "PROCESS_GROUP"])
def test_a_shell_that_has_set_the_variables_is_not_followed(job: Launched, launcher: str) -> None:
    kill_launcher(job, launcher)
    try:
        time.sleep(1.5)
        assert len([name for name in programs(job) if name != "tail"]) == 2
    finally:
        job.close()
