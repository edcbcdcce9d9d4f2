"""Loss normalisation: what the loss of a window is, and what each backward is scaled by.

    loss = sum over microbatches of function(output, target) / denominator

    MeanLoss    function gives a mean        denominator = number of microbatches
    TokenLoss   function gives a sum         denominator = valid tokens of all microbatches
    SumLoss     function gives what counts   denominator = 1

With valid tokens [8, 4, 8, 2] and sums [16, 12, 8, 6] the loss is 42/22 by TokenLoss; the mean
of the four means, 2.25, is another number. The denominator is known before the first backward
and covers all windows of one update, so gradients need no scaling afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Loss", "LossFunction", "MeanLoss", "SumLoss", "TokenLoss", "as_loss"]

LossFunction = Callable[[Any, Any], Tensor]
"""(output of the last stage, target) of one microbatch -> scalar."""


@runtime_checkable
class Loss(Protocol):
    """What the executor asks of a loss."""

    @property
    def function(self) -> LossFunction:
        """(output of the last stage, target) of one microbatch -> scalar."""
        ...

    def denominator(self, targets: Sequence[Any]) -> float:
        """What the sum over these microbatches is divided by."""
        ...


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """Mean over microbatches of a function that is itself a mean over its microbatch."""

    function: LossFunction

    def denominator(self, targets: Sequence[Any]) -> float:
        return len(targets)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Sum over valid tokens / number of valid tokens, over all microbatches together.

    function: gives the sum over the valid tokens of a microbatch.
    count: target -> how many tokens of it are valid.
    """

    function: LossFunction
    count: Callable[[Any], int]

    def denominator(self, targets: Sequence[Any]) -> float:
        return sum(int(self.count(target)) for target in targets)


@dataclass(frozen=True, slots=True)
class SumLoss:
    """The plain sum: the function scales itself."""

    function: LossFunction

    def denominator(self, targets: Sequence[Any]) -> float:
        del targets
        return 1


def as_loss(loss: Loss | LossFunction) -> Loss:
    """A bare function is taken for the mean of its microbatch, which most are."""
    return loss if isinstance(loss, Loss) else MeanLoss(loss)
