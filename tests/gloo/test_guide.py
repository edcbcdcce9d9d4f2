"""The code of the README and of the guide trains, and what they say of torch is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cluster import Cluster
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

ROOT = Path(__file__).parents[2]


def python_blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)


@pytest.mark.timeout(120)
def test_the_readmes_script_learns_under_torchrun(tmp_path: Path) -> None:
    """The Chinese README has the same code: tests/pure/test_readme.py."""
    (script,) = (code for code in python_blocks("README.md") if "torch" in code)
    (tmp_path / "sine.py").write_text(script)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "4", "sine.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = re.fullmatch(r"loss (\S+)\n", done.stdout)
    assert printed, done.stdout
    assert float(printed[1]) < 0.01


@pytest.mark.timeout(120)
def test_the_guide_is_one_program(cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    codes = python_blocks("docs/guide.md")
    assert len(codes) == 8
    first, second = cluster(2).values(
        "pages.run_blocks", codes=codes, folder=str(tmp_path), timeout_s=100
    )
    assert "bubble" in first[-1]
    assert "rank 1" in first[-1]
    assert second == [""] * len(codes)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"rank0.pt", "rank1.pt", "timeline.svg", "trace.json"}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Weigh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("alone")
def test_torchs_own_pipelining_divides_as_the_readme_says() -> None:
    """The claim is about torch; mend the README when this fails. Ours: test_training.py."""
    sums, tokens = torch.tensor([16.0, 12.0, 8.0, 6.0]), torch.tensor([8.0, 4.0, 8.0, 2.0])
    module = Weigh()
    stage = PipelineStage(module, 0, 1, torch.device("cpu"))
    mean = lambda output, target: output.sum() / target.sum()  # noqa: E731
    schedule = ScheduleGPipe(stage, 4, loss_fn=mean)
    schedule.step(sums[:, None], target=tokens[:, None])
    assert module.weight.grad.item() == 2.25
    schedule.step(sums[:, None], target=tokens[:, None])
    assert module.weight.grad.item() == 2.25 + 2.25 / 4
