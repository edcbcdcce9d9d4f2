"""A script for torch runs with its import changed; the names and arguments are torch's."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs

from npu_pipe import torch_api
from npu_pipe.torch_api import schedules

SCRIPT = (Path(__file__).parent / "torch_script.py").read_text(encoding="utf-8")
THEIRS = "from torch.distributed.pipelining import PipelineStage, Schedule1F1B\n"
OURS = "from npu_pipe.torch_api import PipelineStage, Schedule1F1B\n"
TRACER = {"Pipe", "SplitPoint", "build_stage", "pipe_split", "pipeline"}


def run_script(folder: Path, import_line: str) -> list[dict[str, Any]]:
    folder.mkdir()
    assert SCRIPT.count(THEIRS) == 1
    (folder / "script.py").write_text(SCRIPT.replace(THEIRS, import_line))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "script.py", str(folder)),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "npu_pipe" not in done.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def unsplit() -> tuple[nn.Sequential, Tensor, list[Tensor]]:
    """The script's model and three updates without a pipeline."""
    torch.manual_seed(0)
    first = [nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh()]
    torch.manual_seed(1)
    whole = nn.Sequential(*first, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs, labels = (torch.randint(17, (8, 5), generator=generator) for _ in range(2))
        optimizer.zero_grad()
        logits = whole(inputs)
        losses = nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        losses.mean().backward()
        optimizer.step()
    return whole, logits.detach(), list(losses.detach().view(4, -1).mean(1))


@pytest.mark.timeout(150)
def test_the_guides_script_trains_alike_with_its_import_changed(tmp_path: Path) -> None:
    before = run_script(tmp_path / "theirs", THEIRS)
    after = run_script(tmp_path / "ours", OURS)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    whole, logits, losses = unsplit()
    torch.testing.assert_close(after[1]["logits"], logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after[1]["losses"], losses, rtol=1e-5, atol=1e-6)
    trained = [p for each in after for p in each["parameters"].values()]
    torch.testing.assert_close(trained, [p.detach() for p in whole.parameters()])
    assert after[0]["logits"] is None


@pytest.mark.timeout(90)
def test_the_other_rank_learns_why_a_script_ended(tmp_path: Path) -> None:
    """Without a launcher that would end it as well."""
    after = "    optimizer.step()\n"
    assert SCRIPT.count(after) == 1
    ends = f"{after}    if rank == step == 1:\n        raise LookupError('no more data')\n"
    (tmp_path / "script.py").write_text(SCRIPT.replace(THEIRS, OURS).replace(after, ends))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py", str(tmp_path)],
            cwd=tmp_path,
            env={
                **os.environ,
                **place,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert errors[1].splitlines()[-1].endswith("LookupError: no more data")
    *_, last = (line for line in errors[0].splitlines() if "PeerError: " in line)
    assert "rank 1" in last
    assert "LookupError: no more data" in last


def test_all_of_torchs_names_but_the_tracers() -> None:
    public = {name for name in pipelining.__all__ if not name.startswith("_")} - TRACER
    public |= {name for name in theirs.__all__ if not name.startswith("_")}
    public |= set(pipelining.microbatch.__all__)
    assert set(torch_api.__all__) == public


@pytest.mark.parametrize(
    ("module", "private"),
    [
        ("microbatch", {"_CustomReducer", "_LossReducer", "_Replicate", "sum_reducer"}),
        ("schedules", {"_PipelineSchedule", "_PipelineScheduleRuntime", "_ScheduleForwardOnly"}),
        ("stage", set()),
    ],
)
def test_torchs_modules_are_here_under_their_names(module: str, private: set[str]) -> None:
    """Only of the package's own import was thought: `TensorChunkSpec` comes from .microbatch."""
    mine = importlib.import_module(f"npu_pipe.torch_api.{module}")
    other = importlib.import_module(f"torch.distributed.pipelining.{module}")
    wanted = (set(other.__all__) - TRACER) | private
    assert wanted <= set(dir(other))
    assert wanted <= set(dir(mine))


@pytest.mark.parametrize("name", [n for n in torch_api.__all__ if n.startswith("Schedule")])
def test_classes_stand_below_each_other_as_torchs_do(name: str) -> None:
    for base in ("_PipelineSchedule", "_PipelineScheduleRuntime", "PipelineScheduleMulti"):
        found = issubclass(getattr(schedules, name), getattr(schedules, base))
        assert found == issubclass(getattr(theirs, name), getattr(theirs, base))
    for verb in ("_load_csv", "_dump_csv"):
        if issubclass(getattr(theirs, name), theirs.PipelineScheduleMulti):
            mine, other = (getattr(getattr(package, name), verb) for package in (schedules, theirs))
            assert argument_names(mine) == argument_names(other)


@pytest.mark.parametrize("name", [n for n in torch_api.__all__ if n.startswith("Schedule")])
def test_schedules_take_torchs_arguments_in_torchs_order(name: str) -> None:
    mine, other = getattr(torch_api, name), getattr(theirs, name)
    assert argument_names(mine) == argument_names(other)
    for verb in ("step", "eval"):
        found = argument_names(getattr(mine, verb))
        wanted = argument_names(getattr(other, verb))
        assert set(wanted) <= set(found)
    single = issubclass(other, theirs.PipelineScheduleSingle)
    assert issubclass(mine, torch_api.PipelineScheduleSingle) == single
    assert issubclass(mine, torch_api.PipelineScheduleMulti) != single


def test_a_stage_takes_torchs_arguments_in_torchs_order() -> None:
    assert argument_names(torch_api.PipelineStage) == argument_names(pipelining.PipelineStage)


def argument_names(of: Any) -> list[str]:
    return list(inspect.signature(of).parameters)


@pytest.mark.parametrize("name", ["1f1b", "GPIPE", "interleaved1f1b", "ZBVZeroBubble", "DualPipeV"])
def test_a_class_is_found_by_torchs_name(name: str) -> None:
    assert torch_api.get_schedule_class(name).__name__ == theirs.get_schedule_class(name).__name__


def test_an_unknown_name_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="'2F2B' was asked for"):
        torch_api.get_schedule_class("2F2B")


def test_the_package_does_not_load_torch_before_it_is_wanted() -> None:
    code = (
        "import sys, npu_pipe; sys.exit('torch' in sys.modules or hasattr(npu_pipe, 'torch_api'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpu", "stage 0 is given cpu, and has parameters on meta; move it there first"),
        ("meta", "stages are on a device of the kinds npu, cuda, cpu; one is on meta"),
        pytest.param(
            "cuda",
            "a CUDA device is used through a CUDA build of torch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_device_that_cannot_be_used_or_is_not_the_modules_is_refused(
    device: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        torch_api.PipelineStage(nn.Linear(2, 2, device="meta"), 0, 1, device)
