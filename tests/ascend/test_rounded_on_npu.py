"""npu-pipe train in bfloat16 with tensor parallelism: the operators that float32 cannot have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ascend_cluster import ascend_cluster
from cluster import Cluster
from jobs import curve
from safetensors.torch import load_file

from npu_pipe.train.job import Job
from npu_pipe.train.manifest import latest
from npu_pipe.train.mesh import MeshConfig
from npu_pipe.train.model_config import ModelConfig
from npu_pipe.train.precision import Precision
from npu_pipe.train.toml import to_toml

SIZES = {"dim": 512, "blocks": 1, "heads": 4, "hidden": 512, "vocabulary": 512}
PRODUCTS = {"all_gather_matmul", "matmul_reduce_scatter"}


@pytest.fixture
def four(emulator: tuple[Path, Path]) -> Iterator[Cluster]:
    """Ranks that have not used a fused operator yet."""
    made = ascend_cluster(4, *emulator, {})
    yield made
    made.close()


@pytest.mark.timeout(120)
def test_two_by_two_npus_train_through_the_fused_operators(four: Cluster, tmp_path: Path) -> None:
    """All products of all layers, forward and backward, on matrices in bfloat16; what is saved
    is float32, and losses are those of the unsplit model on the CPU within a rounding."""
    model = ModelConfig(**SIZES, precision=Precision.BFLOAT16)
    job = Job(
        model=model,
        data=replace(curve.JOB.data, batch=4, sequence=8, validation_fraction=0.0),
        pipeline=replace(curve.JOB.pipeline, ranks=2, microbatches=2),
        mesh=MeshConfig(tp=2),
        run=replace(curve.JOB.run, steps=2, folder=tmp_path / "run"),
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    answers = four.values(
        "rounded.trains", config=str(tmp_path / "job.toml"), folder=str(tmp_path / "run")
    )
    said = answers[0]["said"]
    assert "each stage is shared by 2 ranks; who does its products:\n" in said
    table = said.split("who does its products:\n")[1].splitlines()
    shown = [line for line in table if line.split()[:1] and line.split()[0] in PRODUCTS]
    assert len(shown) == 6
    assert table[: 1 + len(shown)] == ["npu:", *shown]  # and no other provider
    assert all(line.endswith(" bfloat16") for line in shown)
    for answer in answers:
        assert answer["seen"] == {name: ["torch.bfloat16"] for name in PRODUCTS}
    expected = curve.unsplit_of(job, steps=2)
    assert answers[0]["losses"] == pytest.approx([loss for loss, _ in expected], rel=2.0**-8)
    newest = latest(tmp_path / "run" / "checkpoints")
    assert newest is not None
    files = list(newest.glob("stage-*.safetensors"))
    assert len(files) == 4
    found = {str(each.dtype) for path in files for each in load_file(path).values()}
    assert found == {"torch.float32"}
