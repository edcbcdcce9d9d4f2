"""The precision of a job: its key, what it refuses, and what it saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from npu_pipe.cli.job_command import read_command
from npu_pipe.cli.main import main
from npu_pipe.cli.train import TrainCommand
from npu_pipe.errors import ConfigError
from npu_pipe.train.dry_run import dry_run
from npu_pipe.train.estimate import STATE_BYTES, copy_bytes, layer_bytes, workload_of
from npu_pipe.train.job import Job, settings_of
from npu_pipe.train.model_config import ModelConfig, layer_parameters
from npu_pipe.train.precision import Precision
from npu_pipe.train.toml import flatten, read_toml, to_toml

GPT_TINY = Path(__file__).parents[2] / "configs" / "gpt_tiny.toml"
ROUNDED = ModelConfig(precision=Precision.BFLOAT16)


def written(folder: Path, value: str) -> Path:
    path = folder / "job.toml"
    path.write_text(f"[model]\nprecision = {value}\n", encoding="utf-8")
    return path


def test_a_job_says_it_by_torchs_name_in_its_file_and_as_a_flag(tmp_path: Path) -> None:
    assert Job().model.precision is Precision.FLOAT32
    path = written(tmp_path, '"bfloat16"')
    job = read_toml(Job, path)
    assert job.model.precision is Precision.BFLOAT16
    flags = [str(path), "--model.precision", "float32"]
    assert read_command(TrainCommand, flags, verb="train").job == Job()
    again = tmp_path / "again.toml"
    again.write_text(to_toml(job))
    assert 'precision = "bfloat16"' in again.read_text()
    assert read_toml(Job, again) == job


@pytest.mark.parametrize(
    ("value", "cure"),
    [
        ('"bf16"', "did you mean 'bfloat16'?"),
        ('"BFLOAT16"', "give model.precision one of them"),
        ('"float16"', "did you mean 'bfloat16'?"),
        ("16", "give model.precision one of them"),
        ("true", "give model.precision one of them"),
        ('["bfloat16"]', "give model.precision one of them"),
    ],
)
def test_another_value_is_refused_with_rule_facts_and_cure(
    tmp_path: Path, value: str, cure: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_toml(Job, written(tmp_path, value))
    assert caught.value.rule == "model.precision is 'float32' or 'bfloat16'"
    assert caught.value.facts.startswith(f"{tmp_path / 'job.toml'} gives ")
    assert caught.value.cure == cure


def test_in_a_file_it_ends_with_status_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(written(tmp_path, '"bf16"'))]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("npu-pipe: error: model.precision is 'float32' or 'bfloat16'; ")
    assert err.count("\n") == 1


def test_as_a_flag_it_ends_with_status_2_and_names_the_choices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", str(GPT_TINY), "--model.precision", "bf16"]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "invalid choice 'bf16' for argument '--model.precision'" in words
    assert "('float32', 'bfloat16')" in words


def test_a_checkpoint_belongs_to_one_precision() -> None:
    """It is among what a run that goes on has to agree on, as text."""
    assert settings_of(Job())["model.precision"] == "float32"
    assert flatten(Job(model=ROUNDED))["model.precision"] == "bfloat16"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_keep_half_the_bytes_and_boundaries_carry_half(tp: int, recompute: bool) -> None:
    plain = Job(model=ModelConfig(recompute=recompute))
    plain = replace(plain, mesh=replace(plain.mesh, tp=tp))
    rounded = replace(plain, model=replace(plain.model, precision=Precision.BFLOAT16))
    wide, half = (layer_bytes(each.model, tokens=64, tp=tp) for each in (plain, rounded))
    for mine, theirs in zip(half[1:-1], wide[1:-1], strict=True):
        assert mine.kept == theirs.kept / 2
        assert mine.for_weights == theirs.for_weights / 2
    boundaries = [workload_of(each).boundary_bytes for each in (rounded, plain)]
    assert list(boundaries[0]) == [each / 2 for each in boundaries[1]]


def test_the_head_keeps_its_loss_in_float32() -> None:
    dim, vocabulary = ROUNDED.dim, ROUNDED.vocabulary
    assert layer_bytes(ROUNDED, tokens=1)[-1].kept == 2 * dim + 4 * vocabulary


def test_state_stays_and_the_copies_of_matrices_come_to_it() -> None:
    numbers, copies = layer_parameters(ROUNDED), copy_bytes(ROUNDED)
    norms = 2 * ROUNDED.dim
    assert copies[0] == 0, "an embedding is looked up"
    assert copies[1] == 2 * (numbers[1] - norms)
    assert copies[-1] == 2 * (numbers[-1] - ROUNDED.dim)
    held = workload_of(Job(model=ROUNDED)).parameter_bytes
    assert list(held) == [
        STATE_BYTES * number + copy for number, copy in zip(numbers, copies, strict=True)
    ]
    assert not any(copy_bytes(ModelConfig()))


def test_where_ranks_share_a_layer_a_copy_passes_and_takes_time() -> None:
    assert not any(copy_bytes(ROUNDED, tp=2))
    plain, rounded = Job(), Job(model=ROUNDED)
    shared = [replace(each, mesh=replace(each.mesh, tp=2)) for each in (plain, rounded)]
    wide, half = (layer_bytes(each.model, tokens=1, tp=2)[1].working for each in shared)
    of_copy = 2 * ROUNDED.dim * 2 * ROUNDED.hidden // 2
    assert half == pytest.approx(wide / 2 + of_copy)
    # Each product of a block reads its weights in float32 and writes them, beside the product.
    memory = rounded.cluster.memory_gb_s * 1e3
    slow = replace(shared[1], cluster=replace(rounded.cluster, memory_gb_s=1200 / 2))
    more = workload_of(slow).forward[1] - workload_of(shared[1]).forward[1]
    assert more >= 6 * layer_parameters(ROUNDED, tp=2)[1] / memory


def test_a_dry_run_tells_the_precision_and_the_copies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = {}
    for precision in ("float32", "bfloat16"):
        assert main(["train", str(GPT_TINY), "--dry-run", "--model.precision", precision]) == 0
        said[precision] = capsys.readouterr().out
        assert f"hidden 352, in {precision}\n" in said[precision]
    assert "AdamW in float32\n" in said["float32"]
    assert "AdamW in float32, copies in bfloat16\n" in said["bfloat16"]
    shared = ["--dry-run", "--model.precision", "bfloat16", "--mesh.tp", "2"]
    assert main(["train", str(GPT_TINY), *shared]) == 0
    assert "AdamW in float32\n" in capsys.readouterr().out


def test_the_activations_of_a_rank_are_about_half() -> None:
    job = read_toml(Job, GPT_TINY)
    rounded = replace(job, model=replace(job.model, precision=Precision.BFLOAT16))
    for mine, theirs in zip(dry_run(rounded).memory, dry_run(job).memory, strict=True):
        assert 0.5 <= mine.activations / theirs.activations < 0.75
        assert mine.state > theirs.state
