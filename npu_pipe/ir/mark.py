"""Mark: what a rank is at, in one int64, so that noting it costs one store.

    bits   48..   40..   24..    0..
           from   kind   stage   microbatch

`from` is 1 + the rank that the input is awaited from, 0 once it is there; `kind` counts from 1,
so that a mark is never 0.
"""

from __future__ import annotations

from typing import NamedTuple

from npu_pipe.ir.action import Action, Kind

__all__ = ["Mark", "from_int", "to_int"]

_KINDS = tuple(Kind)


class Mark(NamedTuple):
    """An action, and the rank that its input is awaited from, if it is."""

    action: Action
    source: int | None


def to_int(action: Action, source: int | None = None) -> int:
    kind = _KINDS.index(action.kind) + 1
    awaited = 0 if source is None else source + 1
    return awaited << 48 | kind << 40 | action.stage << 24 | action.microbatch


def from_int(value: int) -> Mark:
    source = (value >> 48) - 1
    action = Action(_KINDS[(value >> 40 & 0xFF) - 1], value >> 24 & 0xFFFF, value & 0xFFFFFF)
    return Mark(action, source if source >= 0 else None)
