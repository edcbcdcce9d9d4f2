"""What a schedule is worth for a workload, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from npu_pipe.ir.check import prove_schedule
from npu_pipe.ir.deadlock import transfers_of
from npu_pipe.ir.needs import KINDS
from npu_pipe.ir.schedule import Schedule
from npu_pipe.planner.network import make_network
from npu_pipe.planner.robustness import Losses, losses
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.memory import Memory, Peak
from npu_pipe.simulator.peaks import activation_peaks, schedule_peaks
from npu_pipe.timeline.times import TimeScale, scale_of

__all__ = ["Assessment", "assess"]


@dataclass(frozen=True, slots=True)
class Assessment:
    """name: with its number of chunks where the schedule leaves a choice.

    makespan, span, bubble_ratio, peak_activations: see `Timeline`.
    peaks: bytes per rank, transfer buffers left out; None if bytes are not known.
    transfers: between two ranks a < b, how many there are both ways.
    is_split: whether backwards are split into I and W. has_pairs: whether pairs are fused.
    scale: the unit in which its times are told.
    """

    name: str
    schedule: Schedule
    makespan: float
    span: float
    bubble_ratio: float
    busy: tuple[float, ...]
    peak_activations: tuple[int, ...]
    peaks: tuple[Peak, ...] | None
    transfers: dict[tuple[int, int], int]
    is_split: bool
    has_pairs: bool
    losses: Losses
    scale: TimeScale

    @property
    def chunks(self) -> int:
        """Stages that a microbatch passes on each rank."""
        return self.schedule.stages // self.schedule.ranks

    @property
    def copies(self) -> int:
        """How often the parameters are held."""
        return 2 if self.schedule.mirrored else 1

    @property
    def held(self) -> float:
        """The largest peak of a rank, in activations of a rank's whole share of the model."""
        return max(self.peak_activations) / self.chunks

    @property
    def held_bytes(self) -> float | None:
        """The largest peak of a rank in bytes, if they are known."""
        return max(peak.total_bytes for peak in self.peaks) if self.peaks else None

    @property
    def crossings(self) -> int:
        """All transfers of a window."""
        return sum(self.transfers.values())


def assess(
    name: str,
    schedule: Schedule,
    costs: Costs,
    *,
    memory: Memory | None,
    samples: int,
    seed: int,
) -> Assessment:
    """Prove it, play it, and disturb it. Raises ScheduleError, CostsError."""
    table, ranks = prove_schedule(schedule).table, schedule.ranks
    network = make_network(schedule, costs)
    ends = network.ends(network.length[:, None], network.travel[:, :, None])[:, 0]
    computes = network.rank >= 0
    rank, length, end = network.rank[computes], network.length[computes], ends[computes]
    first, last = np.full(ranks, np.inf), np.zeros(ranks)
    np.minimum.at(first, rank, end - length)
    np.maximum.at(last, rank, end)
    busy, makespan = np.bincount(rank, length, ranks), float(last.max())
    *_, source, target = transfers_of(schedule, table)
    pairs = np.sort(np.stack((source, target), axis=1), axis=1).tolist()
    crossed = Counter(map(tuple, pairs))
    return Assessment(
        name=name,
        schedule=schedule,
        makespan=makespan,
        span=float((last - first).max()),
        bubble_ratio=1 - float(busy.sum()) / (ranks * makespan) if makespan else 0.0,
        busy=tuple(busy.tolist()),
        peak_activations=activation_peaks(schedule),
        peaks=schedule_peaks(schedule, memory) if memory else None,
        transfers={(low, high): crossed[low, high] for low, high in sorted(crossed)},
        is_split=bool(np.any(table.kind == _I)),
        has_pairs=bool(np.any(table.joined)),
        losses=losses(network, costs, ranks=ranks, samples=samples, seed=seed),
        scale=scale_of(float(np.median(length)), makespan),
    )


_I = KINDS.index("I")
