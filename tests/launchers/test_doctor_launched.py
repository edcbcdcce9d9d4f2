"""npu-pipe doctor in the ranks of real launchers: one answer, and where its values came from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import PATIENCE_S, Launched

pytestmark = pytest.mark.timeout(400, func_only=True)
Start = Callable[..., None]
CONFIG = Path(__file__).parents[2] / "configs" / "gpt_tiny.toml"
NAMES = {"msrun": "msrun", "torchrun": "torchrun", "mpirun": "mpirun of Open MPI"}
RANK_FROM = {"msrun": "MS_NODE_ID", "torchrun": "RANK", "mpirun": "OMPI_COMM_WORLD_RANK"}


def doctor(*flags: str) -> list[str]:
    return [sys.executable, "-m", "npu_pipe", "doctor", *flags]


def only_answer(job: Launched) -> dict[str, Any]:
    """msrun prints the log of rank 0 once more."""
    found = {line for line in job.output().splitlines() if line.startswith('{"format"')}
    assert len(found) == 1, job.output()
    answer: dict[str, Any] = json.loads(found.pop())
    return answer


def test_rank_0_tells_once_for_all_ranks(job: Launched, start: Start, launcher: str) -> None:
    start(doctor(str(CONFIG), "--json"), 4, 1 if launcher == "mpirun" else 2)
    statuses = job.end(within_s=PATIENCE_S)
    assert set(statuses) == {0}, job.output()
    found = only_answer(job)
    assert found["launcher"]["name"] == NAMES[launcher]
    assert found["launcher"]["sources"]["rank"] == RANK_FROM[launcher]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert [(link["low"], link["high"]) for link in found["links"]] == [(0, 1), (1, 2), (2, 3)]
    assert all(link["is_correct"] for link in found["links"])
    assert found["may_start"]


def test_a_mesh_of_two_pipelines_is_tried_along_each(
    job: Launched, start: Start, launcher: str
) -> None:
    if launcher != "torchrun":
        pytest.skip("one launcher tells all there is to tell of meshes")
    text = CONFIG.read_text().replace("ranks = 4", "ranks = 2") + "\n[mesh]\ndp = 2\n"
    (job.folder / "job.toml").write_text(text)
    start(doctor("job.toml", "--json"), 4, 1)
    assert job.end(within_s=PATIENCE_S) == [0], job.output()
    found = only_answer(job)
    assert [(link["low"], link["high"]) for link in found["links"]] == [(0, 1), (2, 3)]
    last = found["mesh"]["ranks"][3]
    assert (last["dp"], last["pp"], last["stages"]) == (1, 1, [1])
    assert last["groups"] == {"dp": [1, 3], "pp": [2, 3], "tp": [3]}


def test_a_job_of_another_size_is_refused_by_every_launcher(
    job: Launched, start: Start, launcher: str
) -> None:
    if launcher != "torchrun":
        pytest.skip("it is the same code")
    start(doctor(str(CONFIG)), 2, 1)
    job.end(within_s=PATIENCE_S)
    text = " ".join(job.output().split())
    assert "= 4 ranks, and 2 were started; start 4, or give another job file" in text
