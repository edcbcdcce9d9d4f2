"""Loss normalisation: what the loss of an update is, and what each backward is scaled by.

    loss = sum over microbatches of scale * function(output, target)

    MeanLoss    function gives a mean        scale = rows of the microbatch / rows of all
    TokenLoss   function gives a sum         scale = 1 / valid tokens of all microbatches
    SumLoss     function gives what counts   scale = 1

With valid tokens [8, 4, 8, 2] and sums [16, 12, 8, 6] the loss is 42/22 by TokenLoss; the mean
of the four means, 2.25, is another number. The scales are known before the first backward
and cover all windows of one update, so gradients need no scaling afterwards.

A stage may return `WithLoss(value, loss)`: an auxiliary loss, as of a router that balances its
experts. It counts as what it is, a mean over the microbatch, by that microbatch's share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError

__all__ = [
    "CountedLoss",
    "Loss",
    "LossFunction",
    "MeanLoss",
    "Scale",
    "SumLoss",
    "TokenLoss",
    "WithLoss",
    "as_loss",
    "scalar",
]

LossFunction = Callable[[Any, Any], Tensor]
"""(output of the last stage, target) of one microbatch -> scalar."""


class Scale(NamedTuple):
    """What one microbatch's loss, and its auxiliary losses, are multiplied by."""

    loss: float
    auxiliary: float


@dataclass(frozen=True, slots=True)
class WithLoss:
    """What a stage may return: its value, and a scalar to be added to the loss."""

    value: Any
    loss: Tensor


@runtime_checkable
class Loss(Protocol):
    """What the pipeline asks of a loss."""

    @property
    def function(self) -> LossFunction:
        """(output of the last stage, target) of one microbatch -> scalar."""
        ...

    def scales(self, targets: Sequence[Any]) -> Sequence[Scale]:
        """For the targets of all microbatches of an update, one each."""
        ...


@runtime_checkable
class CountedLoss(Loss, Protocol):
    """A loss that can be normalised over more microbatches than those of one pipeline."""

    def counts(self, targets: Sequence[Any]) -> Sequence[int]:
        """What each microbatch counts in the normalisation."""
        ...

    def shares(self, counts: Sequence[int], total: int) -> Sequence[Scale]:
        """The scales of microbatches with these counts, of `total` in all."""
        ...


@dataclass(frozen=True, slots=True)
class MeanLoss:
    """Mean over the rows of a function that is itself a mean over its microbatch.

    The rows of a microbatch are those of the first tensor in its target; without one, all
    microbatches count alike.
    """

    function: LossFunction

    def scales(self, targets: Sequence[Any]) -> Sequence[Scale]:
        counts = self.counts(targets)
        return self.shares(counts, sum(counts))

    def counts(self, targets: Sequence[Any]) -> Sequence[int]:
        return [_rows(target) for target in targets]

    def shares(self, counts: Sequence[int], total: int) -> Sequence[Scale]:
        return [Scale(share, share) for share in _shares(counts, total, "rows")]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Sum over valid tokens / number of valid tokens, over all microbatches together.

    function: gives the sum over the valid tokens of a microbatch.
    count: target -> how many tokens of it are valid.
    """

    function: LossFunction
    count: Callable[[Any], int]

    def scales(self, targets: Sequence[Any]) -> Sequence[Scale]:
        counts = self.counts(targets)
        return self.shares(counts, sum(counts))

    def counts(self, targets: Sequence[Any]) -> Sequence[int]:
        return [int(self.count(target)) for target in targets]

    def shares(self, counts: Sequence[int], total: int) -> Sequence[Scale]:
        return [Scale(1 / total, share) for share in _shares(counts, total, "valid tokens")]


@dataclass(frozen=True, slots=True)
class SumLoss:
    """The plain sum: the function, and each auxiliary loss, scales itself."""

    function: LossFunction

    def scales(self, targets: Sequence[Any]) -> Sequence[Scale]:
        return [Scale(1, 1)] * len(targets)

    def counts(self, targets: Sequence[Any]) -> Sequence[int]:
        return [1] * len(targets)

    def shares(self, counts: Sequence[int], total: int) -> Sequence[Scale]:
        del total
        return self.scales(counts)


def as_loss(loss: Loss | LossFunction) -> Loss:
    """A bare function is taken for the mean of its microbatch, which most are."""
    return loss if isinstance(loss, Loss) else MeanLoss(loss)


def scalar(value: Any, what: str) -> Tensor:
    """The value; raises DataError unless it is a scalar tensor."""
    if not isinstance(value, Tensor) or value.dim():
        form = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise DataError(
            f"{what} is a scalar tensor", f"it is {form:.80}", "reduce it with mean() or sum()"
        )
    return value


def _shares(counts: Sequence[int], total: int, what: str) -> list[float]:
    if not total > 0:
        raise DataError(
            "a loss is normalised by something positive",
            f"the number of {what} in this step is {total}",
            f"give at least one of the {what}",
        )
    return [count / total for count in counts]


def _rows(target: Any) -> int:
    leaves = pytree.tree_leaves(target)
    sizes = (leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    return next(sizes, 1)
