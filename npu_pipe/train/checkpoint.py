"""Save and load the state of a training run: safetensors, one file a stage, or a part of one that
ranks share, and one a rank.

torch.distributed.checkpoint would write its metadata as a pickle, which no file of ours may
hold. What makes a checkpoint complete stands in `npu_pipe.train.manifest`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from npu_pipe.device.cpu import Cpu
from npu_pipe.device.device import Device
from npu_pipe.errors import CheckpointError
from npu_pipe.train.job import Identity
from npu_pipe.train.manifest import (
    Manifest,
    Shard,
    commit,
    describe_shard,
    partial_path,
    prune,
    verify_shard,
)

__all__ = ["RankState", "load_checkpoint", "save_checkpoint"]

_MODEL, _OPTIMIZER = "model/", "optimizer/"

_Name = tuple[int, str]  # stage, and name in its module


@dataclass(frozen=True, slots=True)
class RankState:
    """What a rank has to remember.

    stages: its modules by stage index.
    writes: the stages whose files this rank writes: of two replicas of a stage, one.
    part: which part of its stages it has, where ranks share them; None for all.
    device: what they are on, whose random numbers have a state of their own.
    """

    rank: int
    stages: Mapping[int, nn.Module]
    optimizer: torch.optim.Optimizer
    writes: Collection[int]
    device: Device = field(default_factory=Cpu)
    part: int | None = None


def save_checkpoint(
    checkpoints: Path,
    state: RankState,
    *,
    step: int,
    job: Identity,
    keep: int,
    gather: Callable[[Any], list[Any]],
) -> None:
    """Save the state after `step` updates; collective.

    keep: complete checkpoints that are left, this one included.
    gather: value of each rank -> values of all, on every rank.
    Raises CheckpointError when this rank cannot write.
    """
    partial = partial_path(checkpoints, step)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        mine = {}
        for name, tensors in _shards(state).items():
            save_file(tensors, partial / name, metadata={"step": str(step)})
            mine[name] = describe_shard(partial / name)
        everything = gather({name: asdict(shard) for name, shard in mine.items()})
        if state.rank == 0:
            shards = {name: Shard(**one) for each in everything for name, one in each.items()}
            commit(checkpoints, Manifest(step, job, shards))
            prune(checkpoints, keep=keep)
    except (OSError, SafetensorError) as error:
        facts = (
            f"{error.filename or partial}: {error.strerror}"
            if isinstance(error, OSError)
            else f"{partial}: {error}"
        )
        raise CheckpointError(
            "a checkpoint is written into the run folder",
            facts,
            "make room or mend the rights, then go on with --resume",
        ) from error


def load_checkpoint(checkpoint: Path, manifest: Manifest, state: RankState) -> None:
    """Put the state of a checkpoint into the modules, the optimizer and the random generators.

    A run may go on on another kind of device, which then has the state of its own start.

    The checkpoint has to belong to this job: see `require_same`. Raises CheckpointError when a
    shard is missing or damaged, or holds other tensors than this rank's.
    """
    try:
        _load(checkpoint, manifest, state)
    except CheckpointError:
        raise
    except (SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            "a checkpoint holds the tensors of the job's stages",
            f"{checkpoint}: {' '.join(str(error).split()):.200}",
            "remove that checkpoint to go on from the one before",
        ) from error


def _load(checkpoint: Path, manifest: Manifest, state: RankState) -> None:
    names = _parameter_names(state)
    optimizer_state: dict[_Name, dict[str, Tensor]] = {name: {} for name in names.values()}
    for stage, module in state.stages.items():
        tensors = load_file(verify_shard(checkpoint, manifest, _stage_file(stage, state.part)))
        module.load_state_dict(
            {k.removeprefix(_MODEL): v for k, v in tensors.items() if k.startswith(_MODEL)}
        )
        for key, tensor in tensors.items():
            if key.startswith(_OPTIMIZER):
                slot, name = key.removeprefix(_OPTIMIZER).split("/", 1)
                optimizer_state[stage, name][slot] = tensor
    groups = state.optimizer.state_dict()["param_groups"]
    ordered = [names[p] for group in state.optimizer.param_groups for p in group["params"]]
    state.optimizer.load_state_dict(
        {
            "state": {i: optimizer_state[name] for i, name in enumerate(ordered)},
            "param_groups": groups,
        }
    )
    random = load_file(verify_shard(checkpoint, manifest, _rank_file(state.rank)))
    for generator in _generators(state):
        if generator.name in random:
            generator.set(random[generator.name])


def _shards(state: RankState) -> dict[str, dict[str, Tensor]]:
    """The tensors of this rank by file."""
    names = _parameter_names(state)
    shards: dict[str, dict[str, Tensor]] = {
        _rank_file(state.rank): {each.name: each.get() for each in _generators(state)}
    }
    for stage in state.writes:
        module = state.stages[stage]
        tensors = {_MODEL + name: value for name, value in module.state_dict().items()}
        for parameter in module.parameters():
            for slot, value in state.optimizer.state[parameter].items():
                tensors[f"{_OPTIMIZER}{slot}/{names[parameter][1]}"] = value
        shards[_stage_file(stage, state.part)] = tensors
    return shards


class _Generator(NamedTuple):
    name: str
    get: Callable[[], Tensor]
    set: Callable[[Tensor], None]


def _generators(state: RankState) -> list[_Generator]:
    """The host's, and the device's where that has another."""
    devices = {device.place.type: device for device in (Cpu(), state.device)}
    return [
        _Generator(
            "random_state" if kind == "cpu" else f"random_state of {kind}",
            device.random_state,
            device.set_random_state,
        )
        for kind, device in devices.items()
    ]


def _parameter_names(state: RankState) -> dict[nn.Parameter, _Name]:
    return {
        parameter: (stage, name)
        for stage, module in state.stages.items()
        for name, parameter in module.named_parameters()
    }


def _stage_file(stage: int, part: int | None) -> str:
    return f"stage-{stage}{'' if part is None else f'.tp-{part}'}.safetensors"


def _rank_file(rank: int) -> str:
    return f"rank-{rank}.safetensors"
