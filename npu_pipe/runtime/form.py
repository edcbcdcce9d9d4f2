"""Form: what both ends of a boundary know of the values that cross it.

    known to both      nesting, shapes, dtypes, which tensors need a gradient, which leaves are None
    sent with each     the bools, numbers and texts, as JSON in one more tensor of bytes; and which
                       tensors need a gradient, if some of the first value did not

A stage gives one form for one form of the model's input, so a form is told once. What a number
is may change from one microbatch to the next, and so may whether a stage that was frozen is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from npu_pipe.errors import DataError
from npu_pipe.runtime.boundary import DTYPES, Meta, TensorMeta

__all__ = ["Form", "form_from_json", "form_of"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Form:
    """leaves: a tensor's form, or None. constants: indices of those that are sent with each value.
    room: for what is sent with each, in bytes. tells_need: whether what needs a gradient is."""

    nesting: str
    leaves: tuple[TensorMeta | None, ...]
    constants: tuple[int, ...] = ()
    room: int = 0
    tells_need: bool = False

    # Worked out once: they are asked for with each transfer.
    tensors: tuple[TensorMeta, ...] = field(init=False, compare=False)  # what is sent forward
    gradients: tuple[TensorMeta, ...] = field(init=False, compare=False)  # what is sent back
    _meta: Meta = field(init=False, compare=False)
    _all_enter: bool = field(init=False, compare=False)  # a graph of the next stage's

    def __post_init__(self) -> None:
        own = tuple(leaf for leaf in self.leaves if leaf is not None)
        room = (TensorMeta((self.room,), torch.uint8, False),) if self.room else ()
        for name, value in (
            ("tensors", own + room),
            ("gradients", tuple(leaf for leaf in own if leaf.needs_grad)),
            ("_meta", Meta(self.nesting, self.leaves)),
            ("_all_enter", all(leaf.needs_grad for leaf in own)),
        ):
            object.__setattr__(self, name, value)

    def fits(self, meta: Meta) -> bool:
        """Whether a value can be sent in this form: one that needs fewer gradients can."""
        if meta.leaves == self.leaves and meta.nesting == self.nesting:  # most do
            return not self.constants
        other = form_of(meta)
        return (
            self.nesting == other.nesting
            and len(self.leaves) == len(other.leaves)
            and all(
                mine == theirs
                or (mine is not None and theirs is not None and self._takes(mine, theirs))
                for mine, theirs in zip(self.leaves, other.leaves, strict=True)
            )
        )

    def _takes(self, mine: TensorMeta, theirs: TensorMeta) -> bool:
        wanted = theirs._replace(needs_grad=mine.needs_grad)
        return mine == wanted and (mine.needs_grad or self.tells_need)

    def unneeded(self, meta: Meta) -> tuple[int, ...]:
        """Which of the gradients that come back for a value of this form it does not need."""
        tensors = [leaf for leaf in self.leaves if leaf is not None]
        pairs = zip(tensors, meta.tensors, strict=True)
        needed = [own.needs_grad for mine, own in pairs if mine.needs_grad]
        return tuple(index for index, needs in enumerate(needed) if not needs)

    def pack(self, meta: Meta, tensors: list[Tensor], what: str) -> list[Tensor]:
        """The tensors to send. Raises DataError if the constants have grown beyond the room."""
        if not self.room:
            return tensors
        text = _told(meta, needs=self.tells_need).encode()
        if len(text) > self.room:
            raise DataError(
                "numbers and texts that cross stages stay about as long as the first were",
                f"{what} holds {len(text)} bytes of them, and there is room for {self.room}",
                "send what grows in a tensor",
            )
        packed = torch.frombuffer(bytearray(text.ljust(self.room)), dtype=torch.uint8)
        return [*tensors, packed]

    def unpack(self, tensors: Sequence[Tensor]) -> tuple[Meta, list[Tensor]]:
        """The value's meta and tensors from what was sent.

        The buffers are used again as they are. So a tensor that enters no graph comes as another
        one in the same memory: its module may change its shape in place, or what it holds. (`data`,
        not `detach`: else autograd would believe that what lies beside it has changed too.)
        """
        if not self._all_enter:
            tensors = [tensor.data for tensor in tensors]
        if not self.room:
            return self._meta, list(tensors)
        *own, packed = tensors
        constants, needs = json.loads(packed.numpy().tobytes())
        leaves: list[object] = list(self.leaves)
        for index, constant in zip(self.constants, constants, strict=True):
            leaves[index] = constant
        if self.tells_need:
            left = iter(needs)
            leaves = [
                leaf._replace(needs_grad=next(left)) if isinstance(leaf, TensorMeta) else leaf
                for leaf in leaves
            ]
        return Meta(self.nesting, tuple(leaves)), own

    def to_json(self) -> str:
        leaves = [
            leaf and {"shape": leaf.shape, "dtype": _NAMES[leaf.dtype], "grad": leaf.needs_grad}
            for leaf in self.leaves
        ]
        return json.dumps([self.nesting, leaves, self.constants, self.room, self.tells_need])


def form_of(meta: Meta, *, may_need: bool = False) -> Form:
    """The form of a value and of all that differ from it by their constants only.

    may_need: and of those that need gradients where this one does not.
    """
    tells_need = may_need and any(
        tensor.dtype.is_floating_point and not tensor.needs_grad for tensor in meta.tensors
    )
    is_tensor = [isinstance(leaf, TensorMeta) for leaf in meta.leaves]
    leaves = tuple(
        leaf if there else None for leaf, there in zip(meta.leaves, is_tensor, strict=True)
    )
    constants = tuple(
        index for index, leaf in enumerate(meta.leaves) if leaf is not None and not is_tensor[index]
    )
    told = constants or tells_need
    room = 64 + 2 * len(_told(meta, needs=tells_need).encode()) if told else 0
    return Form(meta.nesting, leaves, constants, room, tells_need)


def form_from_json(text: str) -> Form:
    """Read what `Form.to_json` wrote on another rank."""
    nesting, leaves, constants, room, tells_need = json.loads(text)
    found = tuple(
        leaf and TensorMeta(tuple(leaf["shape"]), DTYPES[leaf["dtype"]], leaf["grad"])
        for leaf in leaves
    )
    return Form(nesting, found, tuple(constants), room, tells_need)


def _told(meta: Meta, *, needs: bool) -> str:
    """What is sent with each value: its constants, and which tensors need a gradient."""
    constants = [c for c in meta.leaves if c is not None and not isinstance(c, TensorMeta)]
    return json.dumps([constants, [tensor.needs_grad for tensor in meta.tensors] if needs else []])
