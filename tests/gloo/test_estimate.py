"""What a model is estimated to take, from its shape, is what its training is measured to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from npu_pipe.cli.main import main
from npu_pipe.device.cpu import Cpu
from npu_pipe.runtime.memory import AllocatedBytes
from npu_pipe.train.computing import computing, dtype_of
from npu_pipe.train.estimate import copy_bytes, layer_bytes, tokens_of
from npu_pipe.train.job import Job, plan_of
from npu_pipe.train.model import build_stage
from npu_pipe.train.model_config import ModelConfig, layer_parameters
from npu_pipe.train.precision import Precision
from npu_pipe.train.toml import read_toml, to_toml
from npu_pipe.train.window import read_window

SMALL = ModelConfig(dim=64, blocks=4, heads=4, hidden=176)
SHAPES = {
    "plain": SMALL,
    "wide": replace(SMALL, hidden=500),
    "few keys": replace(SMALL, kv_heads=1),
    "recomputed": replace(SMALL, recompute=True),
    "one of 4 experts": replace(SMALL, experts=4),
    "two of 4 experts": replace(SMALL, experts=4, experts_per_token=2),
}


@pytest.mark.parametrize("precision", Precision, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_what_a_block_keeps_for_its_backward(name: str, precision: Precision) -> None:
    """Of a microbatch: the copies of weights in bfloat16 are there from the first one on."""
    config, rows, sequence = replace(SHAPES[name], precision=precision), 2, 128
    block = build_stage(config, [1], seed=0)
    dtype = dtype_of(precision)
    inputs = torch.randn(rows, sequence, config.dim, dtype=dtype, requires_grad=True)
    with computing(precision, Cpu()):
        block(inputs)
        with AllocatedBytes() as counter:
            counter.counts = True
            output = block(inputs)
            kept = counter.live
    assert output.requires_grad
    assert output.dtype == dtype
    estimated = layer_bytes(config, tokens=rows * sequence)[1].kept
    assert estimated == pytest.approx(kept, rel=0.03)


@pytest.mark.parametrize("name", SHAPES)
def test_the_numbers_of_a_layer_are_those_of_the_model(name: str) -> None:
    config = SHAPES[name]
    for layer, numbers in enumerate(layer_parameters(config)):
        parameters = build_stage(config, [layer], seed=0).parameters()
        assert sum(each.numel() for each in parameters) == numbers, layer
    assert config.parameters == sum(layer_parameters(config))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "tp", "precision"),
    [
        ("plain", 1, Precision.FLOAT32),
        ("plain", 1, Precision.BFLOAT16),
        ("recomputed", 1, Precision.FLOAT32),
        ("wide", 2, Precision.FLOAT32),
        ("wide", 2, Precision.BFLOAT16),
    ],
    ids=str,
)
def test_a_run_measures_what_was_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tp: int, precision: Precision
) -> None:
    """Per stage: what an F keeps, what an I keeps, and parameters with gradients and copies."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # main sets it; this puts it back
    job = read_toml(Job, Path(__file__).parents[2] / "configs" / "gpt_tiny.toml")
    job = replace(
        job,
        model=replace(SHAPES[name], precision=precision),
        data=replace(job.data, batch=8, sequence=64, validation_fraction=0.0),
        pipeline=replace(job.pipeline, schedule="zb-h1", ranks=2, microbatches=4),
        mesh=replace(job.mesh, tp=tp),
        run=replace(job.run, folder=tmp_path / "run", steps=2),
    )
    (tmp_path / "job.toml").write_text(to_toml(job))
    assert main(["train", str(tmp_path / "job.toml")]) == 0
    footprint = read_window(tmp_path / "run" / "window.json").footprint
    assert footprint is not None
    sizes = layer_bytes(job.model, tokens=tokens_of(job), tp=tp)
    for stage, part in enumerate(plan_of(job).layers):
        kept = sum(sizes[layer].kept for layer in part)
        for_weights = sum(sizes[layer].for_weights for layer in part)
        measured = footprint.memory
        block_input = (
            precision.size_bytes * tokens_of(job) * job.model.dim
        )  # of the boundary, which one side counts
        low, high = 0.99 * measured.activation[stage], measured.activation[stage] + block_input
        assert low <= kept <= high + 2000
        low, high = 0.99 * measured.weight_inputs[stage], measured.weight_inputs[stage]
        assert low <= for_weights <= high + 2 * block_input + 1000
        numbers = sum(layer_parameters(job.model, tp=tp)[layer] for layer in part)
        copies = sum(copy_bytes(job.model, tp=tp)[layer] for layer in part)
        assert bool(copies) == (precision is Precision.BFLOAT16 and tp == 1)
        assert measured.parameters[stage] == 2 * 4 * numbers + copies
