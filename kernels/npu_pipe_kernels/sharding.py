"""Sharding: how layers are cut over the ranks of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from npu_pipe.errors import ConfigError
from npu_pipe.ops.operators import Operators

__all__ = ["Keep", "Sequence", "Sharding", "share"]


class Keep(Enum):
    """What waits for W of the tensor that is put together from all ranks."""

    GATHERED = auto()
    """All of it: no more transfers."""
    OWN_ROWS = auto()
    """This rank's rows, a n-th of the memory: W gathers the others again."""


class Sequence(Enum):
    """What a rank holds of the tokens between the parallel layers."""

    SHARDED = auto()
    """An n-th of the sequence. [Korthikanti et al. 2205.05198]"""
    WHOLE = auto()
    """All of it, the same on each rank. [Shoeybi et al. 1909.08053]"""


@dataclass(frozen=True, slots=True)
class Sharding:
    operators: Operators
    sequence: Sequence = Sequence.SHARDED
    keep: Keep = Keep.GATHERED


def share(what: str, extent: int, sharding: Sharding) -> int:
    """A rank's part of an extent. Raises ConfigError where it cannot be cut equally."""
    ranks = sharding.operators.ranks.size
    if extent % ranks:
        raise ConfigError(
            f"tensor-parallel ranks share the {what} equally",
            f"{extent} on {ranks} ranks",
            f"use {-(-extent // ranks) * ranks}, or fewer ranks",
        )
    return extent // ranks
