"""What `npu-pipe script` writes, run by the launcher that it was written for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import Launched, free_port, wait_until

pytestmark = pytest.mark.timeout(150, func_only=True)

CONFIG = Path(__file__).parent.parent.parent / "configs" / "gpt_tiny.toml"
SMALL = [
    *("--pipeline.ranks=2", "--pipeline.microbatches=4", "--run.folder=run", "--run.steps=2"),
    *("--data.batch=8", "--data.sequence=32", "--data.validation-fraction=0"),
]


def write_script(folder: Path, launcher: str, *flags: str) -> Path:
    """For two nodes of one rank. flags: more of train's."""
    script = folder / "run.sh"
    options = ["--launcher", launcher, "--per-node", "1", "--target", "cpu", "--output", script]
    command = [
        sys.executable,
        "-m",
        "npu_pipe",
        "script",
        str(CONFIG),
        *options,
        "--",
        *SMALL,
        *flags,
    ]
    subprocess.run(command, check=True)
    return script


def updates(job: Launched) -> list[int]:
    lines = (job.folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "update"]


def test_the_script_for_torchrun_trains_on_two_nodes(job: Launched) -> None:
    script = write_script(job.folder, "torchrun")
    port = str(free_port())
    for _ in range(2):
        job.start(["bash", str(script)], MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert job.end(within_s=120) == [0, 0], job.output()
    assert updates(job) == [1, 2]


@pytest.mark.msrun
def test_the_script_for_msrun_goes_on_by_itself_after_a_rank_was_killed(
    job: Launched, mindspore: Path
) -> None:
    on_path = job.folder / "bin" / "msrun"
    on_path.parent.mkdir()
    on_path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{mindspore}/bin/msrun" "$@"\n')
    on_path.chmod(0o755)
    job.environ["PATH"] = f"{on_path.parent}:{job.environ['PATH']}"
    script = write_script(job.folder, "msrun", "--run.steps=60", "--run.checkpoint-every=10")
    port = str(free_port())
    for node in range(2):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NODE_RANK": str(node)}
        job.start(["bash", str(script)], **place)
    checkpoints = job.folder / "run" / "checkpoints"
    wait_until(lambda: any(checkpoints.glob("*")), within_s=90, otherwise=job.output)
    for pid in job.left(MS_ROLE="MS_WORKER", RANK_ID="1"):
        if b"npu_pipe" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    assert job.end(within_s=120) == [0, 0], job.output()
    assert updates(job) == list(range(1, 61))
    assert job.output().count("msrun ended with status 1") >= 2  # on both nodes
