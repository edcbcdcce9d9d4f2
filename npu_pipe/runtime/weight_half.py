"""WeightHalf: how a torch.autograd.Function of one's own leaves its weights to W.

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            ctx.weight_half = WeightHalf(1)          # input 1 is a weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            (of_weight,) = ctx.weight_half.gradients(_of_weight, gradient, x)
            return gradient @ weight, of_weight

    def _of_weight(gradient, x):
        return (gradient.t() @ x,)

In a whole backward, and outside a pipeline, `gradients` computes at once. In I it notes what W
needs, and returns None for each weight; W computes them. So a backward runs once, in I, whatever
the schedule is. A formula may communicate: W has its place in the program of each rank, and ranks
that run one program come to it in the same order.

The runtime finds the object on the autograd node, which is the context itself. A Function without
one has all its gradients made in I.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from npu_pipe.runtime.weight_gradients import WeightGradients

__all__ = ["WeightHalf"]


class WeightHalf:
    """One for each call of the forward: `ctx.weight_half`.

    places: which of the Function's inputs are weights. They have to be parameters, or made of
        parameters alone, to be put off; else, or where a weight has another use that cannot wait,
        all of them are computed in I.
    """

    __slots__ = ("_is_put_off", "_later", "places")

    def __init__(self, *places: int) -> None:
        self.places = places
        self._is_put_off = False
        self._later: tuple[WeightGradients, Tensor] | None = None

    def gradients(
        self,
        formula: Callable[..., Sequence[Tensor | None]],
        gradient: Tensor,
        *read: Tensor,
    ) -> Sequence[Tensor | None]:
        """In backward: formula(gradient, *read), one for each of `places`, or None for each now
        and the formula in W.

        A formula returns None for a weight that needs no gradient or has got it already.
        gradient: that of the output, or what was made of it. read: what the forward has saved; a
        DataError in W tells if one was written to in between. All else that the formula holds
        is kept up to W too, so it does not hold the context.
        """
        if not self._is_put_off:
            return formula(gradient, *read)
        apart = [tensor.detach() for tensor in read]
        versions = [(tensor, tensor._version) for tensor in apart]
        compute = WeightGradients(lambda later: formula(later, *apart), versions)
        self._later = compute, gradient.detach()
        return [None] * len(self.places)

    def put_off(self) -> None:
        """For the runtime, before I."""
        self._is_put_off = True

    def take(self) -> tuple[WeightGradients, Tensor] | None:
        """For the runtime, after this backward: what W does, and the gradient that it starts from.
        None if the backward asked for no gradient of its weights."""
        later, self._later = self._later, None
        return later
