"""What is refused before anything is sent: stages that are none, calls that lack something."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_pipe.errors import ConfigError, DataError
from npu_pipe.torch_api.stage import PipelineStage

__all__ = ["require_call", "require_stages"]


def require_stages(stages: Sequence[PipelineStage]) -> None:
    """Raises ConfigError unless these can be the stages of one rank."""
    is_list = isinstance(stages, Sequence) and len(stages) > 0
    if not is_list or not all(isinstance(stage, PipelineStage) for stage in stages):
        raise ConfigError(
            "a schedule runs stages of npu_pipe.torch_api: one, or a list for several a rank",
            f"it was given {stages!r:.80}",
            "build them with npu_pipe.torch_api.PipelineStage",
        )
    sizes = sorted({stage.num_stages for stage in stages})
    if len(sizes) > 1:
        raise ConfigError(
            "all stages know the same number of stages",
            f"num_stages is {' and '.join(map(str, sizes))}",
            "give each stage the number of all",
        )
    if len({stage.world for stage in stages}) > 1:
        raise ConfigError(
            "the stages of a rank are in one pipeline",
            "they were made with groups of other ranks",
            "give each the same group",
        )
    indices = [stage.stage_index for stage in stages]
    if len(set(indices)) < len(indices):
        raise ConfigError(
            "the stages of a rank differ", f"their indices are {indices}", "number them apart"
        )


def require_call(*, backward: bool, losses: Any, no_loss: str, last: bool) -> None:
    """Raises ConfigError or DataError for a call that cannot be made.

    no_loss: what is missing for a loss, if anything.
    """
    if backward and not torch.is_grad_enabled():
        raise ConfigError(
            "step computes gradients",
            "it was called where they are disabled (torch.no_grad)",
            "call eval there",
        )
    if losses is not None and not isinstance(losses, list):
        raise DataError(
            "losses is a list to be filled", f"it is a {type(losses).__name__}", "give a list"
        )
    if last and no_loss and (backward or losses is not None):
        raise DataError(
            "a loss is of an output and a target, on the rank of the last stage",
            f"there is no {no_loss}",
            f"give {no_loss}{'' if backward else ', or no losses'}",
        )
