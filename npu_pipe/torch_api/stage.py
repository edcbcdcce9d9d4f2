"""PipelineStage: a module and its place in the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from npu_pipe.comm.wrapped import wrappers_in
from npu_pipe.device.choose import device_of
from npu_pipe.errors import ConfigError
from npu_pipe.launch.users_group import world_of_group

__all__ = ["PipelineStage"]


class PipelineStage:
    """One stage of the model, held by this rank.

    submodule, stage_index, num_stages: the module, and its index among all, from 0.
    device: where the module lies and its inputs come: "cpu", or an accelerator of any kind that
        `npu_pipe.device` knows.
    input_args, output_args, output_grads, input_grads: taken, and not needed: the forms of what
        crosses are learnt from the values themselves, and may change from call to call.
    group: of the ranks of this pipeline, where they are a part of all: one of several replicas.
    dw_builder, get_mesh: refused; weight gradients are deferred by the runtime itself, and
        DTensors do not cross.

    Nothing is moved, and nothing is sent. Raises ConfigError, which is a ValueError.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Callable[..., Any] | None = None,
    ) -> None:
        del input_args, output_args, output_grads, input_grads
        if not 0 <= stage_index < num_stages:
            raise ConfigError(
                "stages are numbered from 0 to num_stages - 1",
                f"stage_index is {stage_index}, num_stages {num_stages}",
                "number the stages from 0",
            )
        _require_module(submodule)
        if dw_builder is not None or get_mesh is not None:
            given = "dw_builder" if dw_builder is not None else "get_mesh"
            raise ConfigError(
                "weight gradients are deferred by the runtime, and plain tensors cross stages",
                f"stage {stage_index} was given {given}",
                f"leave {given} out",
            )
        place = device_of(torch.device(device)).place
        _require_there(submodule, place, stage_index)
        self.submod = submodule
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = place
        self.group = group
        self.world = world_of_group(group)
        self.group_rank = self.world.rank
        self.group_size = self.world.size

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def _require_module(submodule: nn.Module) -> None:
    if not isinstance(submodule, nn.Module):
        raise ConfigError(
            "a stage runs a module",
            f"it was given a {type(submodule).__name__}",
            "give an nn.Module",
        )
    wrappers_in([submodule])  # or it is refused


def _require_there(submodule: nn.Module, place: torch.device, stage_index: int) -> None:
    found = {parameter.device for parameter in submodule.parameters()} - {place}
    if found:
        raise ConfigError(
            "the module of a stage lies on the device that is given with it",
            f"stage {stage_index} is given {place}, and has parameters on "
            f"{', '.join(sorted(map(str, found)))}",
            f"move it there first: module.to({str(place)!r})",
        )
