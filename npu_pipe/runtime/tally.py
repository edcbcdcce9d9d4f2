"""Tally: what the microbatches of one call add up to on a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from npu_pipe.runtime.boundary import flatten_local
from npu_pipe.runtime.executor import Ending
from npu_pipe.runtime.loss import LossFunction, Scale, scalar

__all__ = ["StepResult", "Tally"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """loss: of all windows of the step, with auxiliary losses; the same number on every rank.

    losses: per microbatch, what the loss function gave, on the rank of the last stage (with
    replicas: for the microbatches that ended there); empty elsewhere.
    outputs: likewise what the last stage returned, where asked for.
    None of them holds a graph.
    """

    loss: float
    losses: tuple[Tensor, ...]
    outputs: tuple[Any, ...]


class Tally:
    """Gathers losses, and outputs where asked for, from window to window.

    losses: per microbatch, unscaled, on the last stage's rank. outputs: likewise.
    """

    def __init__(self, *, outputs: bool = False) -> None:
        self._keeps_outputs = outputs
        self._counted: list[tuple[Tensor, float]] = []
        self._losses: list[dict[int, Tensor]] = []
        self._outputs: list[dict[int, Any]] = []
        self._needs_gradient: bool | None = None
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    @property
    def total(self) -> float:
        """The sum of what has been scaled."""
        return math.fsum(float(value) * scale for value, scale in self._counted)

    @property
    def needs_gradient(self) -> bool | None:
        """Whether some loss of a training step does; None where there was none."""
        return self._needs_gradient

    @property
    def losses(self) -> tuple[Tensor, ...]:
        return tuple(window[i] for window in self._losses for i in sorted(window))

    @property
    def outputs(self) -> tuple[Any, ...]:
        return tuple(window[i] for window in self._outputs for i in sorted(window))

    def window(
        self, function: LossFunction | None, targets: Sequence[Any], scales: Sequence[Scale]
    ) -> Ending:
        """Begin a window. function: None where there is no loss; then the output ends there."""
        losses: dict[int, Tensor] = {}
        outputs: dict[int, Any] = {}
        self._losses.append(losses)
        self._outputs.append(outputs)

        def output(microbatch: int, value: Any) -> tuple[Tensor, Tensor] | None:
            if self._keeps_outputs:
                meta, tensors = flatten_local(value)
                # Copies: it may lie in a buffer that is filled again, the received input's say.
                outputs[microbatch] = meta.value([each.detach().clone() for each in tensors])
            if function is None:
                return None
            loss = scalar(function(value, targets[microbatch]), "what a loss function gives")
            seed = self._count(loss, scales[microbatch].loss)
            losses[microbatch] = self._counted[-1][0]
            return loss, seed

        def auxiliary(microbatch: int, value: Any) -> Tensor:
            loss = scalar(value, "an auxiliary loss")
            return self._count(loss, scales[microbatch].auxiliary)

        return Ending(output, auxiliary)

    def _count(self, loss: Tensor, scale: float) -> Tensor:
        """Add a loss; gives the gradient that its backward starts with."""
        self._counted.append((loss.detach().clone(), scale))
        if torch.is_grad_enabled():
            self._needs_gradient = bool(self._needs_gradient) or loss.requires_grad
        key = (scale, loss.dtype, loss.device)
        if key not in self._seeds:
            self._seeds[key] = torch.full_like(loss, scale, requires_grad=False)
        return self._seeds[key]
