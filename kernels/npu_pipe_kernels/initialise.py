"""First values of a Llama model on tensor-parallel layers, drawn without the unsplit model."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from npu_pipe_kernels.linear import RowParallelLinear
from npu_pipe_kernels.sharding import Sharding
from npu_pipe_kernels.vocabulary import VocabularyEmbedding

__all__ = ["initialise"]


def initialise(module: nn.Module, sharding: Sharding, *, seed: int, blocks: int) -> None:
    """Draw the parameters of layers of `npu_pipe_kernels.llama.build_layers`, in place.

    Each rank draws its own part of what is cut, so the numbers depend on how many ranks there are;
    what all ranks hold is the same on all. Unit variance through every matrix; what is added to the
    residual stream starts small, over 2 * blocks of them.
    """
    ranks = sharding.operators.ranks
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0 if last == "bias" else 1)
            continue
        number = _number(f"{seed} {name} {ranks.rank}")
        generator = torch.Generator().manual_seed(number)
        std = _std(owner, name, parameter, ranks=ranks.size, blocks=blocks)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _std(owner: nn.Module, name: str, weight: Tensor, *, ranks: int, blocks: int) -> float:
    if isinstance(owner, VocabularyEmbedding):
        return 1.0
    if isinstance(owner, RowParallelLinear):
        return 1 / math.sqrt(2 * blocks * weight.shape[1] * ranks)
    first_guess = 0.1 if name.endswith("projection.weight") else 1.0  # is close to uniform
    return first_guess / math.sqrt(weight.shape[1])


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
