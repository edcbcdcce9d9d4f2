"""What `npu-pipe script` writes, run by the launcher that it was written for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launched import PATIENCE_S, Launched, free_port

pytestmark = pytest.mark.timeout(400, func_only=True)

CONFIG = Path(__file__).parent.parent.parent / "configs" / "gpt_tiny.toml"
SMALL = [
    *("--pipeline.ranks=2", "--pipeline.microbatches=4", "--run.folder=run", "--run.steps=2"),
    *("--data.batch=8", "--data.sequence=32", "--data.validation-fraction=0"),
]


def write_script(folder: Path, launcher: str) -> Path:
    """For two nodes of one rank."""
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
    assert job.end(within_s=PATIENCE_S) == [0, 0], job.output()
    assert updates(job) == [1, 2]
