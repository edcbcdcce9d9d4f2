"""npu-pipe train: one command makes a run folder; a mistake makes one message and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_pipe.cli.main import main
from npu_pipe.train.job import Job
from npu_pipe.train.manifest import latest
from npu_pipe.train.metrics import read_metrics
from npu_pipe.train.toml import read_toml

SMALL = """
[model]
dim = 16
blocks = 2
heads = 2
hidden = 16
[data]
batch = 4
sequence = 16
validation_fraction = 0.001
[pipeline]
schedule = "1f1b"
ranks = 2
microbatches = 4
[run]
folder = "run"
steps = 3
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(SMALL)
    return tmp_path


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "npu_pipe", "train", "job.toml", *flags]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.timeout(240)
def test_a_run_leaves_its_folder_and_a_table_and_goes_on(here: Path) -> None:
    done = command("--run.seed", "7")
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 3: validation loss" in done.stdout
    assert "tokens/s" in done.stdout
    assert "\x1b" not in done.stdout, "no moving line where there is no terminal"
    run = here / "run"
    assert read_toml(Job, run / "config.toml").run.seed == 7
    assert [line["kind"] for line in read_metrics(run / "metrics.jsonl")] == [
        *["update"] * 3,
        "bubble",
        "validation",
    ]
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert (run / "timeline.svg").read_text().startswith("<svg")
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert latest(run / "checkpoints") == run / "checkpoints" / "step-000003"

    again = command()
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
    assert "never overwritten" in again.stderr
    longer = command(
        *("--run.seed", "7", "--resume", "--run.steps", "4"),
        *("--run.profile", "4", "--lanes.traffic-class", "132"),
    )
    assert longer.returncode == 0, longer.stderr
    assert "gloo does not have lanes.traffic_class: without effect" in longer.stdout
    for rank in range(2):
        profile = json.loads((run / "profile" / f"rank-{rank}.json").read_text())
        assert f"action {rank}F3" in {event["name"] for event in profile["traceEvents"]}
    assert latest(run / "checkpoints") == run / "checkpoints" / "step-000004"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pipeline.schedule", "1f1"], "did you mean '1f1b'?"),
        (["--pipeline.schedule", "interleaved-1f1b", "--pipeline.microbatches", "5"], "use 4 or 6"),
        (["--nproc", "0"], "ranks is a whole number of at least 1; it is 0"),
        (["--nproc", "5"], "4 layers were given for 5 stages"),
        (["--data.batch", "6"], "use data.batch = 4 or 8"),
        (["--data.path", "missing.txt"], "missing.txt: No such file or directory"),
        (["--resume"], "holds none"),
        (["--port", "70000"], "port 70000"),
        (["--device", "tpu"], "npu-pipe: error: devices are auto, npu, cuda, cpu; 'tpu' was"),
        (["--lanes.service-level", "9"], "lanes.service_level is from 0 to 7; it is 9"),
        (["--run.profile", "4"], "run.profile is from 1 to 3; it is 4"),
        pytest.param(
            ["--device", "cuda"],
            "npu-pipe: error: a CUDA device is used through a CUDA build of torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_mistake_gives_one_message_with_status_2_and_leaves_nothing(
    here: Path, capfd: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["train", "job.toml", *flags]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert [path.name for path in here.iterdir()] == ["job.toml"]


def test_a_wrong_file_gives_one_message_with_status_2(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "job.toml").write_text(SMALL.replace("steps = 3", 'steps = "3"'))
    assert main(["train", "job.toml"]) == 2
    assert capfd.readouterr().err == (
        "npu-pipe: error: run.steps is a whole number; job.toml gives '3', a string; "
        "give run.steps a whole number\n"
    )
