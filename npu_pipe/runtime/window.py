"""A window: one batch cut into microbatches, as a rank takes part in it."""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import flatten_value
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.loss import Loss
from npu_pipe.runtime.microbatch import split_batch

__all__ = ["Batch", "Call", "Window", "cut_batch", "form_of_modules", "scalar_loss"]

Batch = tuple[Any, Any]
"""(inputs, targets), each a tensor or a nesting of tensors with the batch dimension first. Ranks
without the first stage may give None for the inputs, ranks without the last for the targets."""


class Call(enum.Enum):
    """What a window is run for."""

    TRAIN = "step"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True)
class Window:
    """inputs: per microbatch the model's input, where the first stage is; else empty.
    targets: per microbatch its target, where the last stage is; else empty.
    signature: stands for the form of the inputs, on every rank.
    """

    inputs: Sequence[Parcel]
    targets: Sequence[Any]
    signature: str


def cut_batch(batch: Batch, microbatches: int, *, first: bool, last: bool) -> Window:
    """Cut a batch into what this rank takes: the inputs if `first`, the targets if `last`.

    Raises DataError for a batch that cannot be cut.
    """
    if not isinstance(batch, tuple) or len(batch) != 2:
        raise DataError(
            "a batch is a pair (inputs, targets)",
            f"it is a {type(batch).__name__}",
            "give a tuple of the two",
        )
    inputs = split_batch(batch[0], microbatches, "inputs") if first else []
    targets = split_batch(batch[1], microbatches, "targets") if last else []
    parcels = [flatten_value(piece, "the input of the model") for piece in inputs]
    forms = json.dumps([meta.to_json() for meta, _ in parcels])
    return Window(parcels, targets, hashlib.sha256(forms.encode()).hexdigest()[:16])


def form_of_modules(modules: Iterable[nn.Module]) -> str:
    """What decides, beside the inputs, which values modules return and which need gradients:
    the mode that each part is in, and which parameters are trained."""
    bits = (
        (part.training, *(p.requires_grad for p in part.parameters(recurse=False)))
        for module in modules
        for part in module.modules()
    )
    return "".join(str(int(bit)) for part in bits for bit in part)


def scalar_loss(loss: Loss, output: Any, target: Any) -> Tensor:
    """The loss of one microbatch; raises DataError unless it is a scalar tensor."""
    value = loss.function(output, target)
    if not isinstance(value, Tensor) or value.dim():
        form = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise DataError(
            "a loss function gives a scalar tensor",
            f"it gave {form:.80}",
            "reduce it with mean() or sum()",
        )
    return value
