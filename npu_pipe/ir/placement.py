"""Placements: which rank holds which stage.

For 4 ranks and 8 stages (columns are ranks):

    linear          loop            V
    0  1  2  3      0  1  2  3      0  1  2  3
                    4  5  6  7      7  6  5  4

A placement is the tuple stage -> rank. Loop: Narayanan et al. 2021; V: Qi et al. 2405.15362.
"""

from __future__ import annotations

__all__ = ["linear", "loop", "vee"]


def linear(ranks: int) -> tuple[int, ...]:
    """Stage s on rank s."""
    return tuple(range(ranks))


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage c*p + r is chunk c of rank r."""
    return tuple(range(ranks)) * chunks


def vee(ranks: int) -> tuple[int, ...]:
    """Stage s on rank s on the way down, on rank 2p-1-s on the way back up."""
    return (*range(ranks), *reversed(range(ranks)))
