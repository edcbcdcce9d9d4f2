"""A window: one batch cut into microbatches, as a rank takes part in it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import Meta, TensorMeta, flatten_local
from npu_pipe.runtime.digest import digest_of
from npu_pipe.runtime.executor import Parcel
from npu_pipe.runtime.microbatch import rows_of, split_batch

__all__ = [
    "AnyBatch",
    "Batch",
    "Call",
    "Microbatches",
    "Window",
    "count_microbatches",
    "cut_batch",
    "form_of_modules",
    "values_of",
]

_NONE: Mapping[str, Any] = {}


class Batch(NamedTuple):
    """A batch, to be cut into microbatches; a plain pair (inputs, targets) is one too.

    inputs: of the model: a tensor or any nesting of tensors, the batch dimension first, and of
        other values, which go into each microbatch. A tuple or list is the first stage's
        positional arguments. Ranks without the first stage may give None.
    targets: likewise; ranks without the last stage may give None.
    keywords: keyword arguments for the stages of the rank that gives them, cut like the inputs.
    """

    inputs: Any = None
    targets: Any = None
    keywords: Mapping[str, Any] = _NONE


@dataclass(frozen=True, slots=True)
class Microbatches:
    """A batch that is cut already: each of them None or one value a microbatch, of any shapes."""

    inputs: Sequence[Any] | None = None
    targets: Sequence[Any] | None = None
    keywords: Sequence[Mapping[str, Any]] | None = None


class Call(enum.Enum):
    """What a window is run for."""

    TRAIN = "step"
    EVALUATE = "evaluate"
    PREDICT = "predict"


@dataclass(frozen=True, slots=True)
class Window:
    """inputs: per microbatch the model's input, where the first stage is; else empty.
    targets: per microbatch its target, where the last stage is; else empty.
    keywords: per microbatch, where some were given; else empty.
    inputs_form, keywords_form: per microbatch, what stands for the form of this rank's.
    rows: of the inputs, targets and keywords that were cut here.
    """

    inputs: Sequence[Parcel]
    targets: Sequence[Any]
    keywords: Sequence[Mapping[str, Any]]
    inputs_form: Sequence[str]
    keywords_form: Sequence[str]
    rows: tuple[int, ...]


AnyBatch: TypeAlias = Batch | tuple[Any, Any] | Microbatches

GivenBatch: TypeAlias = AnyBatch | Callable[[], AnyBatch]
"""Or what makes it: what that raises is told on all ranks, as of a batch that cannot be cut."""


def has_no_targets(batch: AnyBatch) -> bool:
    return batch.targets is None if isinstance(batch, Microbatches) else batch[1] is None


def cut_batch(batch: AnyBatch, microbatches: int, *, first: bool, last: bool) -> Window:
    """Cut a batch into what this rank takes: the inputs if `first`, the targets if `last`.

    Raises DataError for a batch that cannot be cut.
    """
    rows: tuple[int, ...] = ()
    if isinstance(batch, Microbatches):
        cut = batch
    else:
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            raise DataError(
                "a batch is a pair (inputs, targets), a Batch or Microbatches",
                f"it is a {type(batch).__name__}",
                "give a tuple of the two",
            )
        cut, rows = _cut(Batch(*batch), microbatches, first=first, last=last)
    inputs = _required(cut.inputs, microbatches, "inputs") if first else []
    targets = _required(cut.targets, microbatches, "targets") if last else []
    keywords = []
    if cut.keywords is not None:
        named = _required(cut.keywords, microbatches, "keywords")
        _require_names(named)
        keywords = [dict(each) for each in named]
    parcels = [flatten_local(piece) for piece in inputs]
    return Window(
        parcels,
        targets,
        keywords,
        [_digest(_form(meta)) for meta, _ in parcels],
        [_digest(_form(flatten_local(each)[0])) for each in keywords],
        rows,
    )


def count_microbatches(
    batches: Sequence[AnyBatch], usual: int, *, first: bool, last: bool
) -> int | None:
    """How many to cut batches into: the usual number, or that of their rows if it is smaller.

    None where a rank is given nothing that tells. What cannot be cut is left to `cut_batch`.
    """
    found = []
    for batch in batches:
        if isinstance(batch, Microbatches):
            lists = (batch.inputs, batch.targets, batch.keywords)
            found += [len(each) for each in lists if isinstance(each, Sequence)]
        elif isinstance(batch, tuple) and len(batch) in (2, 3):
            inputs, targets, keywords = Batch(*batch)
            wanted = ((first, inputs), (last, targets), (bool(keywords), keywords))
            rows = [rows_of(value, "values") for takes, value in wanted if takes]
            found += [min(usual, each) for each in rows if each is not None]
        else:
            found.append(usual)
    return min(found, default=usual if first or last else None)


def values_of(windows: Iterable[Window]) -> int:
    """A number for what this rank was given of them: the same for the same values."""
    return digest_of(
        leaf
        for window in windows
        for leaf in pytree.tree_leaves(
            [[tensors for _, tensors in window.inputs], window.targets, window.keywords]
        )
        if isinstance(leaf, Tensor)
    )


def form_of_modules(modules: Iterable[nn.Module]) -> str:
    """What decides, beside the inputs, which values modules return and which need gradients:
    the mode that each part is in, and which parameters are trained."""
    bits = (
        (part.training, *(p.requires_grad for p in part.parameters(recurse=False)))
        for module in modules
        for part in module.modules()
    )
    return "".join(str(int(bit)) for part in bits for bit in part)


def _cut(
    batch: Batch, microbatches: int, *, first: bool, last: bool
) -> tuple[Microbatches, tuple[int, ...]]:
    inputs, targets, keywords = batch
    _require_names([keywords])
    rows = [rows_of(keywords, "keywords")]
    for wanted, value, what in ((first, inputs, "inputs"), (last, targets, "targets")):
        if wanted:
            rows.append(rows_of(value, what))
            if rows[-1] is None:
                raise DataError(
                    f"the {what} of a batch hold a tensor of (batch, ...)",
                    "they hold no tensor with a first dimension",
                    "give tensors, or Microbatches that are cut already",
                )
    return Microbatches(
        split_batch(inputs, microbatches, "inputs") if first else None,
        split_batch(targets, microbatches, "targets") if last else None,
        split_batch(dict(keywords), microbatches, "keywords") if keywords else None,
    ), tuple(each for each in rows if each is not None)


def _require_names(keywords: Iterable[Any]) -> None:
    for each in keywords:
        if not isinstance(each, Mapping) or not all(isinstance(name, str) for name in each):
            raise DataError(
                "the keywords of a batch, or of a microbatch, are a mapping of names to values",
                f"they are {each!r:.80}",
                "give a dict",
            )


def _required(cut: Sequence[Any] | None, microbatches: int, what: str) -> list[Any]:
    if cut is None or isinstance(cut, str) or not isinstance(cut, Sequence):
        raise DataError(
            f"Microbatches hold the {what} of each microbatch, on the rank that takes them",
            f"the {what} are {'missing' if cut is None else f'a {type(cut).__name__}'}",
            f"give a list of {microbatches}",
        )
    if len(cut) != microbatches:
        raise DataError(
            "there is one of everything for each microbatch",
            f"{len(cut)} {what} were given for {microbatches} microbatches",
            f"give {microbatches}, or build the schedule for {len(cut)} microbatches",
        )
    return list(cut)


def _form(meta: Meta) -> Meta:
    """Opaque leaves are known by their type: one object a batch would be a new form each time."""
    if all(isinstance(leaf, TensorMeta) for leaf in meta.leaves):
        return meta
    leaves = (
        leaf
        if leaf is None or isinstance(leaf, TensorMeta | bool | int | float | str)
        else type(leaf).__name__
        for leaf in meta.leaves
    )
    return Meta(str(meta.nesting), tuple(leaves))


def _digest(meta: Meta) -> str:
    # 1 == True == 1.0 for a cache, but not for a module
    return _digest_of(meta.nesting, meta.leaves, tuple(map(type, meta.leaves)))


@lru_cache(maxsize=1024)
def _digest_of(nesting: Any, leaves: tuple[Any, ...], kinds: tuple[type, ...]) -> str:
    text = f"{nesting} {leaves} {kinds}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]
