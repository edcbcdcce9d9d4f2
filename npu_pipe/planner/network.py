"""A schedule as a network of waiting, to play it with many disturbed times at once.

    wave 0   0F0                 a step waits for at most three: the one before it on its rank, and
    wave 1   0F1 1F0             what gives its input (a fused pair has two). All steps of a wave
    wave 2   0F2 1F1 2F0         wait for earlier waves only, so a wave is one array operation for
    ...                          all of its steps and all samples.

Transfers that occupy the ranks are steps themselves, on both ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from npu_pipe.ir.check import prove_schedule
from npu_pipe.ir.deadlock import prove_program
from npu_pipe.ir.needs import Table
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.lower import lower
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.program import blocking_waits
from npu_pipe.simulator.simulate import arrivals, durations, steps_before

__all__ = ["Network", "make_network"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Network:
    """n steps in waves.

    waves: bounds of the waves. before: (n,), the step before on the same rank. needs: (n, k), the
    other steps that are waited for, -1 for none; travel: (n, k), how long what they give travels.
    length, rank: (n,); the rank of a transfer is -1.
    need_link, link: (n, k) and (n,), the link that a need crosses and the one that a transfer is
    on, between two ranks a < b, as a * ranks + b; -1 where there is none.
    """

    waves: tuple[int, ...]
    before: Ints
    needs: Ints
    travel: Floats
    length: Floats
    rank: Ints
    need_link: Ints
    link: Ints

    def ends(self, length: Floats, travel: Floats) -> Floats:
        """When each step ends, in each sample: (n, samples).

        length: (n, samples). travel: (n, k, samples), or (n, k, 1) if it is the same in all.
        """
        steps, samples = length.shape
        end = np.zeros((steps + 1, samples))  # the last for -1
        columns = [(self.needs[:, c], travel[:, c]) for c in range(self.needs.shape[1])]
        for begin, stop in pairwise(self.waves):
            at = end[self.before[begin:stop]]
            for needs, wait in columns:
                np.maximum(at, end[needs[begin:stop]] + wait[begin:stop], out=at)
            np.add(at, length[begin:stop], out=end[begin:stop])
        return end[:-1]


def make_network(schedule: Schedule, costs: Costs) -> Network:
    """The network that `simulate(schedule, costs)` plays. Raises ScheduleError, CostsError."""
    costs.check_fits(schedule)
    if costs.overlapped:
        proof = prove_schedule(schedule)
        table, order = proof.table, np.asarray(proof.order)
        inputs = arrivals(proof, costs)
        before = steps_before(table)
        needs = np.stack((inputs.need, inputs.partner_need), axis=1)
        travel = np.stack((inputs.travel, inputs.partner_travel), axis=1)
        if not table.joined.any():
            needs, travel = needs[:, :1], travel[:, :1]
        need_link = np.where(needs >= 0, _link(table, table.rank[needs], table.rank[:, None]), -1)
        link = np.full(len(table), -1)
        rank = table.rank
    else:
        program = prove_program(lower(schedule, costs))
        table, order = program.table, np.asarray(program.order)
        waits = blocking_waits(program)
        before, needs = waits.first, waits.second[:, None]
        travel, need_link = np.zeros(needs.shape), np.full(needs.shape, -1)
        is_transfer = program.peer >= 0
        link = np.where(is_transfer, _link(table, table.rank[program.peer], table.rank), -1)
        rank = np.where(is_transfer, -1, table.rank)
    wave = _waves(order, np.concatenate((before[:, None], needs), axis=1))
    rows = order[np.argsort(wave[order], kind="stable")]
    place = np.full(len(table) + 1, -1)
    place[rows] = np.arange(len(rows))
    return Network(
        waves=tuple(np.concatenate(([0], np.cumsum(np.bincount(wave[rows])))).tolist()),
        before=place[before[rows]],
        needs=place[needs[rows]],
        travel=travel[rows],
        length=durations(table, costs)[rows],
        rank=rank[rows],
        need_link=need_link[rows],
        link=link[rows],
    )


def _link(table: Table, one: Ints, other: Ints) -> Ints:
    low, high = np.minimum(one, other), np.maximum(one, other)
    return np.where(low < high, low * (len(table.starts) - 1) + high, -1)


def _waves(order: Ints, needs: Ints) -> Ints:
    """Per row, the most steps that lie before it on a way through the network."""
    wave = [0] * (len(needs) + 1)
    wave[-1] = -1  # what row -1, no need, finds
    first, second, third = (needs[:, c % needs.shape[1]].tolist() for c in range(3))
    for row in order.tolist():
        latest = wave[first[row]]
        if wave[second[row]] > latest:
            latest = wave[second[row]]
        if wave[third[row]] > latest:
            latest = wave[third[row]]
        wave[row] = latest + 1
    return np.array(wave[:-1])
