"""What all ranks agree on before the windows of a call: their forms, their number, their scales."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from npu_pipe.comm.handshake import require_equal
from npu_pipe.errors import ConfigError, DataError
from npu_pipe.runtime.loss import Loss, Scale
from npu_pipe.runtime.window import (
    AnyBatch,
    Call,
    GivenBatch,
    Window,
    count_microbatches,
    cut_batch,
    form_of_modules,
    has_no_targets,
    values_of,
)

__all__ = ["Agreed", "agree_on_windows"]

_CURE = "call the pipeline alike on every rank"


@dataclass(frozen=True, slots=True)
class Agreed:
    """A window as all ranks know it.

    mine: this rank's part. signatures: per microbatch, the form of what the model is called with
    anywhere. scales: per microbatch, what its losses count.
    """

    mine: Window
    signatures: Sequence[str]
    scales: Sequence[Scale]

    @property
    def microbatches(self) -> int:
        return len(self.signatures)


def agree_on_windows(
    batches: Sequence[GivenBatch],
    call: Call,
    microbatches: int | None,
    *,
    usual: int,
    first: bool,
    loss: Loss | None,
    unrated: bool,
    modules: Iterable[nn.Module],
    shared: Sequence[Sequence[int]],
    meet: Callable[[str, Callable[[], Any]], list[Any]],
) -> list[Agreed]:
    """Cut the batches up and meet the other ranks about them.

    microbatches: how many in each window; None for `usual`, or fewer if there are fewer rows.
    first: whether this rank takes the inputs. loss: of the targets that it takes, if it does.
    unrated: whether there may be no targets; there is no loss then.
    shared: of those that meet, who share layers, and so are given the same values.
    Raises, on every rank alike, DataError for a batch that cannot be cut or normalised by,
    ConfigError for training without gradients, and HandshakeError where ranks call differently.
    """
    windows: list[Window] = []
    scales: list[Scale] = []

    def prepare() -> dict[str, Any]:
        if call is Call.TRAIN and not torch.is_grad_enabled():
            raise ConfigError(
                "a step computes gradients",
                "it was called where they are disabled (torch.no_grad or torch.inference_mode)",
                "call evaluate there, or predict",
            )
        if microbatches is not None and not (isinstance(microbatches, int) and microbatches > 0):
            raise ConfigError(
                "a batch is cut into 1 microbatch or more",
                f"microbatches={microbatches!r} was given",
                "give a whole number from 1 on, or leave it out",
            )
        if not batches:
            raise DataError(
                "a step runs at least one batch", "none was given", "call step((inputs, targets))"
            )
        made: list[AnyBatch] = [each() if callable(each) else each for each in batches]
        last = loss is not None and not (unrated and all(map(has_no_targets, made)))
        count = microbatches or count_microbatches(made, usual, first=first, last=last)
        if count is not None:
            windows.extend(cut_batch(each, count, first=first, last=last) for each in made)
        if loss is not None and last:
            scales.extend(loss.scales([target for w in windows for target in w.targets]))
        return {
            "number of batches": len(batches),
            "number of microbatches": count,
            "form of the inputs": [_short(w.inputs_form) for w in windows] if first else None,
            "keywords": [_short(w.keywords_form) for w in windows],
            "scales": _short(scales) if scales else None,
            "rows": [w.rows for w in windows],
            "modules": form_of_modules(modules),
            "values": values_of(windows) if shared else None,
        }

    answers = meet(call.value, prepare)
    facts = ("keywords", "rows", "modules", "values")
    own = {fact: [answer.pop(fact) for answer in answers] for fact in facts}
    _require_equal_rows(own["rows"])  # first: numbers of microbatches that differ may come of it
    require_equal(answers, cure=_CURE)
    _require_same_values(own["values"], shared)
    known = {fact: value for a in answers for fact, value in a.items() if value is not None}
    count = known.get("number of microbatches", usual)
    mode = f"{call is Call.TRAIN} {hashlib.sha256(repr(own['modules']).encode()).hexdigest()[:16]}"
    every_scale = [
        Scale(*each) for each in _long(known.get("scales", [[0, 0]]), len(batches) * count)
    ]
    agreed = []
    for number, form in enumerate(known["form of the inputs"]):
        parts = [
            _long(form, count),
            *(_long(k[number], count) for k in own["keywords"] if k and k[number]),
        ]
        agreed.append(
            Agreed(
                windows[number] if windows else Window([], [], [], (), (), ()),
                [f"{mode} {' '.join(part)}" for part in zip(*parts, strict=True)],
                every_scale[number * count : (number + 1) * count],
            )
        )
    return agreed


def _require_equal_rows(rows: Sequence[Sequence[Sequence[int]]]) -> None:
    """What is cut for the same microbatches has the same rows.

    rows: per rank and window.
    """
    for window in range(min(map(len, rows))):
        found = {rank: each[window] for rank, each in enumerate(rows) if each[window]}
        if len({count for each in found.values() for count in each}) > 1:
            facts = ", ".join(
                f"rank {rank}: {' and '.join(map(str, sorted(set(each))))} rows"
                for rank, each in found.items()
            )
            raise DataError(
                "the inputs, targets and keywords of a batch have the same rows",
                facts,
                "give as many of each, or Microbatches, which are cut already",
            )


def _require_same_values(values: Sequence[int], shared: Sequence[Sequence[int]]) -> None:
    for ranks in shared:
        if len({values[rank] for rank in ranks}) > 1:
            raise DataError(
                "ranks that share layers are given the same batch",
                f"those of ranks {', '.join(map(str, ranks))} differ",
                "share the data out to the replicas of the pipeline only, as Mesh.coordinates "
                "numbers them (dp)",
            )


def _short(values: Sequence[Any]) -> list[Any]:
    """One value where all are the same."""
    return [values[0]] if values and all(value == values[0] for value in values) else list(values)


def _long(values: Sequence[Any], count: int) -> list[Any]:
    return list(values) * count if len(values) == 1 else list(values)
