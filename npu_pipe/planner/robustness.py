"""What a schedule loses when times are not what it was planned for. Its orders stay as they are.

jitter      every action and every transfer takes its own time times an own random factor, evenly
            spread over 1 - 0.1 .. 1 + 0.1
slow link   every crossing between two of the ranks, either way, takes a quarter of a rank's mean
            forward longer. It is counted in absolute time, as a tensor is as large however many
            chunks the ranks have.
slow rank   all actions of one of the ranks take a fifth longer

A loss is the mean over samples of (makespan - undisturbed makespan) / undisturbed makespan. Which
link or rank is slow is drawn without repetition: where there are no more of them than samples,
each has its turn once, and the mean is exact. One seed gives one answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.planner.network import Network
from npu_pipe.simulator.costs import Costs

__all__ = ["JITTER", "SLOW_LINK", "SLOW_RANK", "Losses", "losses", "samples_for"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

JITTER = 0.1
SLOW_LINK = 0.25  # of a rank's mean forward, longer
SLOW_RANK = 0.2

_WORK = 131_072  # samples x ranks x microbatches


class Losses(NamedTuple):
    """Shares of the undisturbed makespan: 0.05 is 5 % longer."""

    jitter: float
    slow_link: float
    slow_rank: float


def samples_for(ranks: int, microbatches: int) -> int:
    """As many samples a scenario as keep it quick."""
    return min(max(_WORK // (ranks * microbatches), 4), 32)


def losses(network: Network, costs: Costs, *, ranks: int, samples: int, seed: int) -> Losses:
    """The mean loss in each scenario.

    network: of a schedule with these costs.
    """
    rng = np.random.default_rng(seed)
    crossed = network.need_link if costs.overlapped else network.link
    slow_link = _drawn(np.unique(crossed[crossed >= 0]), samples, rng)
    slow_rank = _drawn(np.arange(ranks), samples, rng)
    late = SLOW_LINK * sum(costs.forward) / ranks
    length, travel = network.length[:, None], network.travel[:, :, None]

    def makespans(length: Floats, travel: Floats) -> Floats:
        ends: Floats = network.ends(length, travel).max(axis=0)
        return ends

    (calm,) = makespans(length, travel)
    shaken = travel
    if network.travel.any():
        shaken = travel * _factors((*network.travel.shape, samples), rng)
    jittered = makespans(length * _factors((len(length), samples), rng), shaken)
    linked = makespans(
        length + late * (network.link[:, None] == slow_link),
        travel + late * (network.need_link[:, :, None] == slow_link),
    )
    slowed = length * np.where(network.rank[:, None] == slow_rank, 1 + SLOW_RANK, 1.0)
    ranked = makespans(slowed, travel)
    return Losses(*(_loss(part, float(calm)) for part in (jittered, linked, ranked)))


def _drawn(numbers: Ints, samples: int, rng: np.random.Generator) -> Ints:
    return rng.permutation(numbers)[:samples]


def _factors(shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    return rng.uniform(1 - JITTER, 1 + JITTER, shape)


def _loss(makespans: Floats, base: float) -> float:
    return float(makespans.mean()) / base - 1 if len(makespans) and base else 0.0
