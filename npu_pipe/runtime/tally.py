"""Tally: what the microbatches of one call add up to on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from npu_pipe.runtime.boundary import flatten_local
from npu_pipe.runtime.executor import Ending
from npu_pipe.runtime.loss import LossFunction, Scale, scalar
from npu_pipe.runtime.stage import Stage

__all__ = ["Tally"]


class Tally:
    """Gathers losses, and outputs where `last` is given, from window to window.

    total: the sum of what has been scaled. losses: per microbatch, unscaled, on the last stage's
    rank. outputs: likewise.
    """

    def __init__(self, *, last: Stage | None = None) -> None:
        self._last = last
        self._total = torch.zeros((), dtype=torch.float64)
        self._losses: list[dict[int, Tensor]] = []
        self._outputs: list[dict[int, Any]] = []

    @property
    def total(self) -> float:
        return float(self._total)

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
            if self._last is not None:
                meta, tensors = flatten_local(value)
                outputs[microbatch] = meta.value(self._last.leaving(tensors))
            if function is None:
                return None
            loss = scalar(function(value, targets[microbatch]), "what a loss function gives")
            losses[microbatch] = loss.detach().clone()
            return loss, self._add(loss, scales[microbatch].loss)

        def auxiliary(microbatch: int, value: Any) -> Tensor:
            loss = scalar(value, "an auxiliary loss")
            return self._add(loss, scales[microbatch].auxiliary)

        return Ending(output, auxiliary)

    def _add(self, loss: Tensor, scale: float) -> Tensor:
        self._total.add_(loss.detach().to(self._total), alpha=scale)
        return torch.full_like(loss, scale, requires_grad=False)
