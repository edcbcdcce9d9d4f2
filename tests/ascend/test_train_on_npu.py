"""npu-pipe train on device npu, and where torch_npu is installed without CANN."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ascend_cluster import environment
from cluster import Cluster

CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.toml"
STEPS = 20
TINY = (
    *("--model.dim", "32", "--model.blocks", "2", "--model.heads", "2", "--model.hidden", "64"),
    *("--data.batch", "4", "--data.sequence", "16", "--pipeline.microbatches", "4"),
)
SMALL = (*TINY, "--run.steps", "2", "--pipeline.ranks", "1", "--run.validate-every", "99")


def train(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return npu_pipe("train", str(CONFIG), "--run.folder", str(folder), *flags, **variables)


def npu_pipe(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "npu_pipe", *arguments],
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


@pytest.mark.timeout(900)
def test_two_npus_that_share_each_stage_train_with_the_losses_of_the_cpu(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    """In float32, which the fused operators do not take: that is told once, with the reason."""
    shared = ("--pipeline.ranks", "2", "--mesh.tp", "2", "--data.validation-fraction", "0")
    flags = (*TINY, *shared, "--run.steps", "2")
    on_cpu = train(tmp_path / "cpu", *flags, "--device", "cpu")
    on_npu = train(tmp_path / "npu", *flags, "--device", "npu", **environment(*emulator, {}))
    for done in (on_cpu, on_npu):
        assert done.returncode == 0, done.stderr
        assert "each stage is shared by 2 ranks; " in done.stdout
    assert on_npu.stderr.count("not npu: fused operators take float16 and bfloat16") == 1
    assert losses(tmp_path / "npu") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)


@pytest.mark.timeout(1000)
def test_torch_npu_without_cann_trains_on_the_cpu_and_says_so_when_asked_for_the_npu(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    without_cann = {"PYTHONPATH": str(emulator[1])}
    asked = train(tmp_path / "npu", *SMALL, "--device", "npu", **without_cann)
    assert asked.returncode == 2
    (line,) = [each for each in asked.stderr.splitlines() if "an NPU is used through" in each]
    assert line.startswith("npu-pipe: error: ")
    assert "install CANN and source its set_env.sh, or compute on the CPU" in line
    assert "Traceback" not in asked.stderr
    assert not (tmp_path / "npu").exists()
    for device in ("cpu", "auto"):
        done = train(tmp_path / device, *SMALL, "--device", device, **without_cann)
        assert done.returncode == 0, done.stderr
        assert f"on cpu: {'it was asked for' if device == 'cpu' else 'no npu: '}" in done.stdout
        assert len(losses(tmp_path / device)) == 2


@pytest.mark.timeout(600)
def test_verify_compares_on_the_npu_over_lanes_with_the_options_of_the_job(
    emulator: tuple[Path, Path], tmp_path: Path
) -> None:
    """In single precision only: an NPU has no doubles."""
    options = {"buffer-mb": 7, "traffic-class": 132, "service-level": 4, "expansion-mode": 1}
    flags = [f"--lanes.{name}={value}" for name, value in options.items()]
    flags.append("--lanes.transfer-s=900")
    variables = environment(*emulator, {"trace_dir": tmp_path})
    done = npu_pipe(
        *("verify", str(CONFIG), *TINY, "--pipeline.ranks", "2", "--device", "npu", *flags),
        **variables,
    )
    assert done.returncode == 0, done.stderr
    assert "   0              2    28 MB  12 of 32\n" in done.stdout
    assert "exec 900 s, event 1868 s\n" in done.stdout
    assert (
        "lanes: prefetch 2, traffic class 132, service level 4, expansion mode 1\n" in done.stdout
    )
    assert "float32  m = 4" in done.stdout
    assert "float64" not in done.stdout
    for rank in range(2):
        lines = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()
        made = [each for each in map(json.loads, lines) if each["event"] == "init"]
        assert made
        assert {each["buffer_mb"] for each in made} == {7}


@pytest.mark.timeout(120)
def test_a_checkpoint_holds_the_random_state_of_the_device_too(
    npus: Callable[..., Cluster], tmp_path: Path
) -> None:
    """And goes on elsewhere without it."""
    (found,) = npus(1).values("checkpoints.random_numbers", folder=str(tmp_path))
    assert found["npu"] == found["again"]
    assert found["npu"][0] != found["cpu"][0]
    assert found["npu"][1] == found["cpu"][1]
