"""The scripts that npu-pipe writes, run by the real launchers: two nodes on loopback."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched, free_port, wait_until

JOB = """
[model]
dim = 16
blocks = 2
heads = 2
hidden = 16
[data]
batch = 4
sequence = 16
validation_fraction = 0.0
[pipeline]
schedule = "1f1b"
ranks = 2
microbatches = 4
[run]
folder = "run"
device = "cpu"
steps = 60
checkpoint_every = 10
measure_every = 1000
"""


def write(folder: Path, launcher: str) -> None:
    (folder / "job.toml").write_text(JOB)
    words = ["script", "job.toml", "--launcher", launcher, "--per-node", "1", "--output", "run.sh"]
    subprocess.run([sys.executable, "-m", "npu_pipe", *words], cwd=folder, check=True, timeout=60)


def checkpoints(folder: Path) -> list[str]:
    """Those that are complete."""
    return sorted(
        path.parent.name
        for path in folder.glob("run/checkpoints/step-*/manifest.json")
        if "." not in path.parent.name
    )


@pytest.mark.msrun
@pytest.mark.timeout(400, func_only=True)
def test_msrun_on_two_nodes_goes_on_after_a_rank_was_killed(job: Launched, mindspore: Path) -> None:
    write(job.folder, "msrun")
    tools = job.folder / "tools"
    tools.mkdir()
    program = shlex.join([sys.executable, str(mindspore / "bin" / "msrun")])
    (tools / "msrun").write_text(f'#!/usr/bin/env bash\nexec {program} "$@"\n')
    (tools / "msrun").chmod(0o755)
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    place = {"PATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for node in range(2):
        job.start(["bash", "run.sh"], NODE_RANK=str(node), **place)
    wait_until(lambda: bool(checkpoints(job.folder)), within_s=PATIENCE_S, otherwise=job.output)
    for pid in job.left(MS_ROLE="MS_WORKER", MS_NODE_ID="1"):
        os.kill(pid, signal.SIGKILL)
    assert job.end(within_s=PATIENCE_S) == [0, 0], job.output()
    assert "msrun ended with status" in job.output()
    assert checkpoints(job.folder)[-1] == "step-000060"
    lines = (job.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 61, "an update each, and one bubble"
