"""The real srun and sbatch, where Debian's Slurm is installed and a test may start it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched, wait_until
from slurm_cluster import PROGRAMS, slurm_cluster

pytestmark = pytest.mark.timeout(400, func_only=True)

WORKER = [sys.executable, str(Path(__file__).parent / "worker.py")]
SRUN = ["srun", "--overcommit", "--mem=0", "--chdir=."]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = "slurmctld, slurmd, slurm-client and munge"
        pytest.skip(f"Slurm: {', '.join(missing)} not installed; Debian has it in {packages}")
    if os.geteuid() != 0:
        pytest.skip("Slurm: slurmd is started by root")
    with tempfile.TemporaryDirectory() as folder, slurm_cluster(Path(folder)) as environ:
        yield environ


@pytest.fixture
def slurm(job: Launched, cluster: dict[str, str]) -> Launched:
    job.environ |= cluster
    return job


def test_the_ranks_of_a_step_meet_without_a_word_from_the_user(slurm: Launched) -> None:
    slurm.start([*SRUN, "-n", "4", *WORKER, "step"])
    assert slurm.end(within_s=PATIENCE_S) == [0], slurm.output()
    lines = slurm.said()
    assert [line.split(":")[0] for line in lines] == [f"rank {r} of 4 by srun" for r in range(4)]
    assert len({line.split(": ")[1] for line in lines}) == 1


def test_a_batch_script_starts_ranks_by_srun_torchrun_and_not_by_itself(slurm: Launched) -> None:
    python, worker = WORKER
    srun = " ".join([*SRUN, "-n"])
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc-per-node=2"
    script = slurm.folder / "batch.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --ntasks=4 --overcommit --output=output_batch\n"
        f"{python} {worker} step\n"
        f"{srun} 2 {python} {worker} step\n"
        f"{srun} 1 {torchrun} {worker} step\n"
        f"{srun} 1 {python} -c 'import npu_pipe as n; print(n.World.from_environment().launcher)'\n"
    )
    slurm.start(["sbatch", "--wait", str(script)])
    assert slurm.end(within_s=PATIENCE_S) == [0], slurm.output()
    assert "SLURM_NTASKS is '4', and SLURM_STEP_NUM_TASKS is not set" in slurm.output()
    assert [line.split(":")[0] for line in slurm.said()] == [
        "rank 0 of 2 by srun",
        "rank 0 of 2 by torchrun",
        "rank 1 of 2 by srun",
        "rank 1 of 2 by torchrun",
    ]
    assert "Launcher.ONE_PROCESS" in slurm.output()


def test_the_script_that_npu_pipe_writes_trains(slurm: Launched) -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("the script asks for a core a rank")
    config = Path(__file__).parent.parent.parent / "configs" / "gpt_tiny.toml"
    options = ["--launcher=slurm", "--per-node=2", "--target=cpu", "--output=run.sh", "--"]
    options += ["--pipeline.ranks=2", "--pipeline.microbatches=4", "--run.folder=run"]
    options += ["--run.steps=2", "--data.batch=8", "--data.sequence=32"]
    options += ["--data.validation-fraction=0"]
    slurm.start([WORKER[0], "-m", "npu_pipe", "script", str(config), *options])
    assert slurm.end(within_s=PATIENCE_S) == [0], slurm.output()
    slurm.start(["sbatch", "--wait", "--output=output_batch", "run.sh"])
    assert slurm.end(within_s=PATIENCE_S) == [0, 0], slurm.output()
    assert (slurm.folder / "run" / "metrics.jsonl").read_text().count('"update"') == 2


def test_a_killed_rank_ends_the_step_and_is_named(slurm: Launched) -> None:
    slurm.start([*SRUN, "-n", "3", *WORKER, "on"])
    os.kill(slurm.ranks(3)[1], signal.SIGKILL)
    assert all(slurm.end(within_s=30))
    # Within a step it "was killed"; between two of them it may have ended by itself.
    assert re.search(r"rank 1 (ended or )?was killed", slurm.output()), slurm.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_srun(slurm: Launched, number: signal.Signals) -> None:
    slurm.start([*SRUN, "-n", "2", *WORKER, "build"])
    slurm.ranks(2)
    slurm.send(number)
    slurm.end(within_s=30)


def test_nothing_outlives_the_daemon_that_watches_a_step(slurm: Launched) -> None:
    slurm.start([*SRUN, "-n", "2", *WORKER, "on"])
    (pid,) = {_parent(pid) for pid in slurm.ranks(2)}
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "slurmstepd"
    os.kill(pid, signal.SIGKILL)
    ranks = [int((slurm.folder / f"ready{rank}").read_text()) for rank in range(2)]
    wait_until(lambda: not set(ranks) & set(slurm.left()), within_s=30)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
