"""The unsplit model's update: what a pipeline's is compared with, and how far they may differ.

float64, float32   all rows at once. Rounding grows with the sums that are taken in another
                   order, and there is nothing else: a limit for each.
bfloat16           in the pipeline's microbatches, so that each product has the same rows.
                   Whole layers then round alike, and sums over microbatches are float32: its
                   limit. Layers that ranks share round parts of sums, so no two roundings are
                   alike: if the pipeline is at most twice as far from the update in float32 as
                   the unsplit model is, the two are at most three of these distances apart.
                   A norm moves no further than its vector, and the loss of a token no further
                   than twice its logits: for these two, what is measured can be 0 by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from npu_pipe.device.device import Device
from npu_pipe.train.adamw import build_adamw
from npu_pipe.train.computing import computing
from npu_pipe.train.job import Job
from npu_pipe.train.model import build_model, token_loss
from npu_pipe.train.precision import Precision

__all__ = [
    "Arithmetic",
    "Outcome",
    "arithmetics",
    "differences",
    "gradient",
    "limits",
    "nan_last",
    "unsplit",
]

_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-3}
_DISTANCES = 3

Cut = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """dtype: of the parameters. precision: what layers compute in, where that is another."""

    dtype: torch.dtype
    precision: Precision = Precision.FLOAT32

    def __str__(self) -> str:
        is_wide = self.precision is Precision.FLOAT32
        return str(self.dtype).removeprefix("torch.") if is_wide else str(self.precision)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one update. logits: None where they are not. gradients, updated: by parameter."""

    logits: Tensor | None
    loss: float
    gradients: Mapping[str, Tensor]
    norm: float
    updated: Mapping[str, Tensor]

    def cut(self, part: Cut, logits: Callable[[Tensor], Tensor]) -> Outcome:
        """What a rank has of it."""
        mine = None if self.logits is None else logits(self.logits)
        return Outcome(mine, self.loss, part(self.gradients), self.norm, part(self.updated))


def arithmetics(precision: Precision, *, widest: torch.dtype) -> list[Arithmetic]:
    """Those that all operators of the device take, and at last the job's own."""
    found = [Arithmetic(dtype) for dtype in _LIMITS if dtype.itemsize <= widest.itemsize]
    own = Arithmetic(torch.float32, precision)
    return found if own in found else [*found, own]


def unsplit(
    job: Job, arithmetic: Arithmetic, inputs: Tensor, targets: Tensor, *, device: Device
) -> tuple[Outcome, dict[str, Tensor]]:
    """One update of the whole model, and its parameters before it."""
    whole = build_model(job.model, seed=job.run.seed).to(device.place, arithmetic.dtype)
    theirs = dict(whole.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
    is_wide = arithmetic.precision is Precision.FLOAT32
    pieces = 1 if is_wide else job.pipeline.microbatches
    logits, losses = [], []
    with computing(arithmetic.precision, device):
        for each, target in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            found = whole(each)
            loss = token_loss(found, target) / pieces
            logits.append(found.detach())
            losses.append(loss)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {name: gradient(parameter).clone() for name, parameter in theirs.items()}
    norm = float(nn.utils.clip_grad_norm_(whole.parameters(), job.optimizer.clip_norm))
    build_adamw(job.optimizer, [whole]).step()
    total = math.fsum(loss.item() for loss in losses)
    updated = {name: parameter.detach() for name, parameter in theirs.items()}
    return Outcome(torch.cat(logits), total, gradients, norm, updated), before


def gradient(parameter: Tensor) -> Tensor:
    """NaN where there is none."""
    return torch.full_like(parameter, math.nan) if parameter.grad is None else parameter.grad


def differences(ours: Outcome, theirs: Outcome, before: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative to `theirs`, by what is compared."""
    logits = 0.0
    if ours.logits is not None and theirs.logits is not None:
        logits = _relative(ours.logits, theirs.logits)
    worst = (_relative(mine, theirs.gradients[name]) for name, mine in ours.gradients.items())
    return {
        "logits": logits,
        "loss": _ratio(abs(ours.loss - theirs.loss), abs(theirs.loss)),
        "gradients": max(worst, key=nan_last, default=0.0),
        "norm": _ratio(abs(ours.norm - theirs.norm), theirs.norm),
        "parameters": _update_difference(ours.updated, theirs.updated, before),
    }


def limits(
    arithmetic: Arithmetic, rounded: Outcome, wide: Outcome | None, before: Mapping[str, Tensor]
) -> dict[str, float]:
    """How far a pipeline may be from the unsplit model, by what is compared.

    rounded: of the unsplit model. wide: the same in float32, where layers round in parts; or None.
    """
    same = dict.fromkeys(("logits", "loss", "gradients", "norm", "parameters"), 0.0)
    if wide is not None:
        assert rounded.logits is not None
        assert wide.logits is not None
        same = differences(rounded, wide, before)
        logits = float((rounded.logits - wide.logits).abs().max())
        same["loss"] = _ratio(2 * logits, abs(wide.loss))
        names = wide.gradients
        apart = _flat(rounded.gradients[name] - wide.gradients[name] for name in names)
        same["norm"] = _ratio(float(vector_norm(apart)), wide.norm)
    least = _LIMITS[arithmetic.dtype]
    return {check: max(least, _DISTANCES * distance) for check, distance in same.items()}


def nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return _ratio(float((ours - theirs).abs().max()), float(theirs.abs().max()))


def _update_difference(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> float:
    """Root mean square of the difference, relative to that of the update.

    Not the largest: AdamW's first update is close to the sign of the gradient, so where a
    gradient is all rounding, so is the update.
    """
    difference = _flat(ours[name] - theirs[name] for name in ours)
    update = _flat(theirs[name] - before[name] for name in ours)
    return _ratio(float(vector_norm(difference)), float(vector_norm(update)))


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _ratio(difference: float, of: float) -> float:
    """No difference is none, also of nothing: a gradient or learning rate may be zero."""
    if difference == 0:
        return 0.0
    return difference / of if of else math.inf
