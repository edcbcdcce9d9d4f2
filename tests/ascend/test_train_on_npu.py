"""npu-pipe train on device npu, and where torch_npu is installed without CANN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ascend_cluster import environment

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.toml"
STEPS = 20
SMALL = ("--run.steps", "2", "--pipeline.ranks", "1", "--run.validate-every", "99")


def train(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "npu_pipe", "train", str(CONFIG), "--run.folder", str(folder)]
    return subprocess.run(
        [*command, *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,  # an emulator computes slowly, the more on a busy machine
        check=False,
    )


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [each["loss"] for each in map(json.loads, lines) if each["kind"] == "update"]


@pytest.mark.timeout(1900)
def test_gpt_tiny_trains_with_the_losses_of_the_cpu(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    steps = ("--run.steps", str(STEPS))
    on_cpu = train(tmp_path / "cpu", *steps, "--device", "cpu")
    on_npu = train(tmp_path / "npu", *steps, "--device", "npu", **environment(*emulator, {}))
    for done in (on_cpu, on_npu):
        assert done.returncode == 0, done.stderr
    assert "on npu: it was asked for\nrank  communicators  buffers  streams\n" in on_npu.stdout
    found = losses(tmp_path / "npu")
    assert len(found) == STEPS
    assert found == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


@pytest.mark.timeout(1000)
def test_torch_npu_without_cann_trains_on_the_cpu_and_says_so_when_asked_for_the_npu(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    without_cann = {"PYTHONPATH": str(emulator[1])}
    asked = train(tmp_path / "npu", *SMALL, "--device", "npu", **without_cann)
    assert asked.returncode == 2
    (line,) = [each for each in asked.stderr.splitlines() if "an NPU is used through" in each]
    assert "install CANN and source its set_env.sh, or compute on the CPU" in line
    assert "Traceback" not in asked.stderr
    for device in ("cpu", "auto"):
        done = train(tmp_path / device, *SMALL, "--device", device, **without_cann)
        assert done.returncode == 0, done.stderr
        assert f"on cpu: {'it was asked for' if device == 'cpu' else 'no npu: '}" in done.stdout
        assert len(losses(tmp_path / device)) == 2
