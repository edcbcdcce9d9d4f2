"""The vocabulary, cut over the ranks: embedding, and cross entropy without gathered logits.

    rank 0   tokens 0 .. V/n-1         rank 1   tokens V/n .. 2V/n-1         ...

Shapes: B batch, T sequence, S the part of it on this rank, D dim, V vocabulary, n ranks.

A rank has the logits of its own tokens only. Of each row the ranks exchange three numbers: the
largest logit, the sum of the exponentials, and the target's logit, which one of them has.
[Shoeybi et al. 1909.08053]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from npu_pipe.errors import DataError
from npu_pipe.ops.collectives import all_gather, all_reduce, block_rows, reduce_scatter
from npu_pipe.ops.ranks import Ranks
from npu_pipe.runtime.weight_half import WeightHalf
from npu_pipe_kernels.autocast import as_autocast
from npu_pipe_kernels.sharding import Sequence, Sharding, share

__all__ = ["IGNORED", "VocabularyEmbedding", "token_losses"]

IGNORED = -100
"""A target that counts for nothing, as in torch."""


class VocabularyEmbedding(nn.Module):
    """ids (B, T) int64, the same on all ranks -> (S, B, D), sequence first.

    Raises ConfigError where n does not divide V, DataError for a T to be shared that it does not
    divide, and, for ids on the CPU, for one outside the vocabulary (elsewhere its row is NaN).
    Not initialised.
    """

    def __init__(self, vocabulary: int, dim: int, sharding: Sharding) -> None:
        super().__init__()
        self.sharding = sharding
        self.vocabulary = vocabulary
        self.weight = nn.Parameter(torch.empty(share("vocabulary", vocabulary, sharding), dim))

    def forward(self, ids_bt: Tensor) -> Tensor:
        if self.sharding.sequence is Sequence.SHARDED:
            block_rows(ids_bt.shape[1], self.sharding.operators.ranks)
        if ids_bt.device.type == "cpu":  # where looking costs nothing
            _require_known(ids_bt, self.vocabulary, "ids")
        out: Tensor = _Lookup.apply(ids_bt.t(), self.weight, self.sharding, self.vocabulary)  # type: ignore[no-untyped-call]
        return out

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of the unsplit `weight`."""
        del name
        ranks = self.sharding.operators.ranks
        return whole.chunk(ranks.size)[ranks.rank]


def token_losses(logits_tbv: Tensor, targets_bt: Tensor, ranks: Ranks) -> Tensor:
    """The cross entropy of each token in nats, (B, T) in float32; 0 where the target is IGNORED.

    logits_tbv: (T, B, V / n), this rank's. The same on all ranks, which each start their backward
    from it. Raises DataError for a target on the CPU outside the vocabulary (elsewhere: NaN).
    """
    vocabulary = logits_tbv.shape[-1] * ranks.size
    if targets_bt.device.type == "cpu":
        _require_known(targets_bt[targets_bt != IGNORED], vocabulary, "targets")
    losses: Tensor = _CrossEntropy.apply(logits_tbv, targets_bt.t(), ranks)  # type: ignore[no-untyped-call]
    return losses.t()


class _Lookup(Function):
    @staticmethod
    def forward(
        ctx: Any, ids_tb: Tensor, weight: Tensor, sharding: Sharding, vocabulary: int
    ) -> Tensor:
        ranks = sharding.operators.ranks
        own_tb, missing_tb = _own(ids_tb, weight.shape[0], ranks)
        ctx.save_for_backward(own_tb, missing_tb)
        ctx.sharding, ctx.rows = sharding, weight.shape[0]
        ctx.weight_half = WeightHalf(1)
        ctx.dtype = weight.dtype
        found_tbd = as_autocast(weight[own_tb].masked_fill_(missing_tb[..., None], 0))
        unknown_tb = (ids_tb < 0) | (ids_tb >= vocabulary)
        found_tbd.masked_fill_(unknown_tb[..., None], float("nan"))
        if sharding.sequence is Sequence.SHARDED:
            return reduce_scatter(found_tbd, ranks)
        return all_reduce(found_tbd, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_sbd: Tensor) -> tuple[None, Tensor | None, None, None]:
        sharding, rows, dtype = ctx.sharding, ctx.rows, ctx.dtype

        def formula(gradient: Tensor, own_tb: Tensor, missing_tb: Tensor) -> tuple[Tensor]:
            if sharding.sequence is Sequence.SHARDED:
                gradient = all_gather(gradient, sharding.operators.ranks)
            gradient = gradient.to(dtype).masked_fill(missing_tb[..., None], 0)
            backward = torch.ops.aten.embedding_dense_backward.default
            return (backward(gradient, own_tb, rows, -1, False),)

        (of_weight,) = ctx.weight_half.gradients(formula, gradient_sbd, *ctx.saved_tensors)
        return None, of_weight, None, None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_tbv: Tensor, targets_tb: Tensor, ranks: Ranks) -> Tensor:
        wide = logits_tbv.float() if logits_tbv.dtype.itemsize < 4 else logits_tbv
        own_tb, missing_tb = _own(targets_tb, wide.shape[-1], ranks)
        most_tb = all_reduce(wide.amax(-1), ranks, largest=True)
        sums_tb = (wide - most_tb[..., None]).exp_().sum(-1)
        picked_tb = wide.gather(-1, own_tb[..., None])[..., 0].masked_fill(missing_tb, 0)
        sums_tb, picked_tb = all_reduce(torch.stack((sums_tb, picked_tb)), ranks).unbind()
        log_sum_tb = sums_tb.log() + most_tb
        ignored_tb = targets_tb == IGNORED
        ctx.save_for_backward(logits_tbv, log_sum_tb, own_tb, missing_tb, ignored_tb)
        unknown_tb = (targets_tb < 0) | (targets_tb >= wide.shape[-1] * ranks.size)
        losses_tb = (log_sum_tb - picked_tb).masked_fill_(unknown_tb, float("nan"))
        return losses_tb.masked_fill_(ignored_tb, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_tb: Tensor) -> tuple[Tensor, None, None]:
        logits_tbv, log_sum_tb, own_tb, missing_tb, ignored_tb = ctx.saved_tensors
        found = (logits_tbv - log_sum_tb[..., None]).exp_()
        ones = torch.ones_like(log_sum_tb).masked_fill_(missing_tb, 0)
        found.scatter_add_(-1, own_tb[..., None], -ones[..., None])
        found *= gradient_tb.masked_fill(ignored_tb, 0)[..., None]
        return found.to(logits_tbv.dtype), None, None


def _own(ids: Tensor, rows: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Tokens by their place among this rank's, 0 where they are not; and where they are not."""
    own = ids - ranks.rank * rows
    missing = (own < 0) | (own >= rows)
    return own.masked_fill(missing, 0), missing


def _require_known(ids: Tensor, vocabulary: int, what: str) -> None:
    if not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        raise DataError(
            f"{what} are tokens of the vocabulary, 0 to {vocabulary - 1}",
            f"there is {low if low < 0 else high}",
            f"use the tokenizer of the model, and {IGNORED} for a target that does not count",
        )
