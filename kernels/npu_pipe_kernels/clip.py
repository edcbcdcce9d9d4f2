"""One norm of all gradients, where layers are cut over tensor-parallel ranks.

    cut parameters      each rank has a part: their squares are summed over the ranks
    shared parameters   each rank has the same: those of rank 0 count

`Pipeline.clip_gradients` knows of the stages of one pipeline only: with cut layers each of the
pipelines side by side would scale by another norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from npu_pipe.device.choose import device_of
from npu_pipe.ir.schedule import Schedule
from npu_pipe.ops.ranks import Ranks
from npu_pipe.runtime.gradients import gradients_of, square_norm
from npu_pipe_kernels.linear import RowParallelLinear

__all__ = ["clip_gradients", "is_cut"]


def clip_gradients(
    max_norm: float,
    stages: Mapping[int, nn.Module],
    *,
    schedule: Schedule,
    rank: int,
    ranks: Ranks,
    gather: Callable[[Any], list[Any]],
) -> float:
    """Scale the gradients of the whole model so that their joint 2-norm is at most `max_norm`.

    Returns the norm before, the same on every rank; collective over pipeline and tensor ranks.
    stages: this rank's. rank: of the pipeline. ranks: of the tensor-parallel group. gather: the
    pipeline's, `pipe.gather`.
    """
    counted = [module for stage, module in stages.items() if schedule.placement[stage] == rank]
    shared = {
        id(parameter)
        for module in counted
        for name, parameter in module.named_parameters()
        if ranks.rank > 0 and not is_cut(module, name)
    }
    digits = device_of(ranks.place).widest
    own = square_norm(gradients_of(counted, without=shared), digits=digits)
    squares = torch.tensor([math.fsum(gather(own))], dtype=digits, device=ranks.place)
    if ranks.size > 1:
        dist.all_reduce(squares, group=ranks.group)
    norm = math.sqrt(squares.item())
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for gradient in gradients_of(stages.values()):
            gradient.mul_(scale)
    return norm


def is_cut(module: nn.Module, name: str) -> bool:
    """Whether each rank has a part of this parameter, and not all of it."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    whole = isinstance(owner, RowParallelLinear) and last == "bias"
    return hasattr(owner, "cut") and not whole
