"""What is saved is what is loaded, and a save that dies leaves the earlier ones as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from npu_pipe.errors import CheckpointError
from npu_pipe.train.adamw import build_adamw
from npu_pipe.train.checkpoint import RankState, load_checkpoint, save_checkpoint
from npu_pipe.train.job import Identity
from npu_pipe.train.manifest import describe_shard, latest, read_manifest
from npu_pipe.train.model import build_stage
from npu_pipe.train.model_config import ModelConfig
from npu_pipe.train.optimizer import OptimizerConfig

MODEL = ModelConfig(dim=8, blocks=2, heads=1, hidden=8)
JOB: Identity = {"model.dim": 8}


def rank_state(seed: int) -> RankState:
    """Rank 0 with two of three stages, as an interleaved schedule places them."""
    stages = {
        s: build_stage(MODEL, layers, seed=seed) for s, layers in {0: (0, 1), 2: (3,)}.items()
    }
    return RankState(0, stages, build_adamw(OptimizerConfig(), stages.values()), list(stages))


def update(state: RankState) -> None:
    """An update from the global random generator, so that it matters too."""
    for stage in state.stages.values():
        for parameter in stage.parameters():
            parameter.grad = torch.randn_like(parameter)
    state.optimizer.step()


def numbers(state: RankState) -> list[torch.Tensor]:
    parameters = [p for stage in state.stages.values() for p in stage.parameters()]
    moments = [v for p in parameters for _, v in sorted(state.optimizer.state[p].items())]
    return [*parameters, *moments, torch.get_rng_state()]


def alone(value: Any) -> list[Any]:
    return [value]


def save(folder: Path, state: RankState, step: int, gather: Any = alone) -> None:
    save_checkpoint(folder, state, step=step, job=JOB, keep=2, gather=gather)


def test_parameters_of_one_name_in_two_stages_are_told_apart(tmp_path: Path) -> None:
    def build() -> RankState:
        stages: dict[int, nn.Module] = {0: nn.Linear(3, 3), 2: nn.Linear(3, 3)}
        return RankState(0, stages, build_adamw(OptimizerConfig(), stages.values()), [0, 2])

    state, other = build(), build()
    update(state)
    save(tmp_path, state, 1)
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    update(other)
    load_checkpoint(checkpoint, read_manifest(checkpoint), other)
    for ours, theirs in zip(numbers(other), numbers(state), strict=True):
        assert torch.equal(ours, theirs)


def test_of_two_replicas_one_writes_and_both_read(tmp_path: Path) -> None:
    """Both used to write the same file, and hash it, at the same time."""
    first = rank_state(0)
    update(first)
    second = RankState(1, first.stages, first.optimizer, [])

    def both(mine: Any) -> list[Any]:
        theirs: list[Any] = []

        def keep(value: Any) -> list[Any]:
            theirs.append(value)
            return [value]

        save_checkpoint(tmp_path, second, step=1, job=JOB, keep=2, gather=keep)
        return [mine, *theirs]

    save(tmp_path, first, 1, both)
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    files = sorted(path.name for path in checkpoint.glob("*.safetensors"))
    assert files == [f"{kind}-{i}.safetensors" for kind, i in (("rank", 0), ("rank", 1))] + [
        "stage-0.safetensors",
        "stage-2.safetensors",
    ]
    load_checkpoint(checkpoint, read_manifest(checkpoint), second)


def test_a_loaded_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    state = rank_state(0)
    torch.manual_seed(7)
    update(state)
    save(tmp_path, state, 1)
    update(state)
    wanted = numbers(state)

    loaded = rank_state(1)
    torch.manual_seed(8)
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    load_checkpoint(checkpoint, read_manifest(checkpoint), loaded)
    assert not torch.equal(numbers(loaded)[0], wanted[0])
    update(loaded)
    found = numbers(loaded)
    assert len(found) == len(wanted) > 20
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_checkpoint_before_the_first_update_is_one_too(tmp_path: Path) -> None:
    save(tmp_path, rank_state(0), 0)
    loaded = rank_state(1)
    load_checkpoint(tmp_path / "step-000000", read_manifest(tmp_path / "step-000000"), loaded)
    fresh = rank_state(0)
    assert torch.equal(loaded.stages[2][0].norm.weight, fresh.stages[2][0].norm.weight)
    update(loaded)


def test_a_killed_save_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    state = rank_state(0)
    save(tmp_path, state, 1)
    before = {path: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()}
    update(state)

    def killed(_: Any) -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, state, 2, killed)
    assert latest(tmp_path) == tmp_path / "step-000001"
    assert {path: path.read_bytes() for path in (tmp_path / "step-000001").iterdir()} == before
    save(tmp_path, state, 2)  # over what the killed one left
    assert latest(tmp_path) == tmp_path / "step-000002"


def test_nothing_is_complete_before_every_rank_has_reported(tmp_path: Path) -> None:
    def gather(value: Any) -> list[Any]:
        assert latest(tmp_path) is None
        return [value, {"rank-1.safetensors": {"bytes": 3, "sha256": "abc"}}]

    save(tmp_path, rank_state(0), 1, gather)
    shards = read_manifest(tmp_path / "step-000001").shards
    assert sorted(shards) == [
        "rank-0.safetensors",
        "rank-1.safetensors",
        "stage-0.safetensors",
        "stage-2.safetensors",
    ]
    assert shards["rank-1.safetensors"].bytes == 3


def test_only_rank_0_completes_a_checkpoint(tmp_path: Path) -> None:
    state = rank_state(0)
    save(tmp_path, RankState(1, state.stages, state.optimizer, [0, 2]), 1)
    assert latest(tmp_path) is None


def test_a_damaged_shard_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    state = rank_state(0)
    save(tmp_path, state, 1)
    shard = tmp_path / "step-000001" / "stage-0.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="not the file that was saved"):
        load_checkpoint(shard.parent, read_manifest(shard.parent), state)


def test_a_shard_with_the_tensors_of_another_stage_is_refused(tmp_path: Path) -> None:
    """Its manifest may have been mended by hand to say so."""
    state = rank_state(0)
    save(tmp_path, state, 1)
    checkpoint = tmp_path / "step-000001"
    manifest = read_manifest(checkpoint)
    shards = dict(manifest.shards)
    for content in ((checkpoint / "stage-2.safetensors").read_bytes(), b"no safetensors"):
        (checkpoint / "stage-0.safetensors").write_bytes(content)
        shards["stage-0.safetensors"] = describe_shard(checkpoint / "stage-0.safetensors")
        with pytest.raises(CheckpointError, match="holds the tensors of the job's stages"):
            load_checkpoint(checkpoint, replace(manifest, shards=shards), state)


def test_a_shard_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """As on a full disk: safetensors has an error of its own for it."""
    (tmp_path / "step-000001.partial" / "stage-0.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="a checkpoint is written into the run folder"):
        save(tmp_path, rank_state(0), 1)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(tmp_path / "file" / "checkpoints", rank_state(0), 1)


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer = rank_state(0).optimizer
    decay = {g["weight_decay"]: {p.ndim for p in g["params"]} for g in optimizer.param_groups}
    assert decay == {0.1: {2}, 0.0: {1}}
