"""Predict when each action and transfer of a program runs.

Compute goes in order. Transfers run beside it, each lane in the program's order:

    rank 0  | 0F0 | 0F1 |           a send is issued when its producer ends;
    lane        |>>>>|>>>>|         the n-th receive of a lane is posted when its rank begins to
    rank 1           | 1F0 | 1F1 |  use an input of that lane for the (n - prefetch)-th time

A transfer begins when both of its ends are there and the one before it between the two ranks
has ended, and lasts as long as the boundary costs. With costs that are not overlapped it
occupies both ranks instead, from when both stand at it.

So everything waits for three things at most, and for which ones is known beforehand. The proof
of a program gives an order in which they all come first, and one pass over it gives all times.
"""

from __future__ import annotations

from itertools import chain, compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import ScheduleError
from npu_pipe.ir.deadlock import ProgramProof, prove_program
from npu_pipe.ir.program import Program
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.simulate import Clock, Floats, durations, spans
from npu_pipe.timeline.timeline import Timeline

__all__ = ["Waits", "blocking_waits", "replay_program", "simulate_program"]

Ints = npt.NDArray[np.int64]


def simulate_program(program: Program, costs: Costs) -> Timeline:
    """The predicted timeline of compute and transfers.

    Raises ScheduleError for a program that is wrong and CostsError for costs that do not fit.
    """
    proof = prove_program(program)
    costs.check_fits(program.schedule)
    return _timeline(proof, program, durations(proof.table, costs), overlapped=costs.overlapped)


def replay_program(program: Program, measured: Timeline, costs: Costs) -> Timeline:
    """What the simulation says for the times that each step of a run really took, with the
    transfers of `costs`: what is later in `measured` is not due to compute.

    Raises ScheduleError for a program that is wrong or a step of it that was not measured, and
    CostsError for costs that do not fit.
    """
    proof = prove_program(program)
    costs.check_fits(program.schedule)
    length = durations(proof.table, costs)
    took_us = {step: end_us - start_us for _, step, start_us, end_us in measured.compute}
    steps = chain.from_iterable(program.orders)
    for row, step in zip(proof.table.step_rows().tolist(), steps, strict=True):
        if not proof.table.is_compute[row]:
            continue
        if step not in took_us:
            raise ScheduleError(
                "a window is replayed by the program that it ran",
                f"{step} of the program was not measured",
                "lower the schedule of the measured timeline",
                action=str(step),
            )
        length[row] = took_us[step]
    return _timeline(proof, program, length, overlapped=costs.overlapped)


def _timeline(
    proof: ProgramProof, program: Program, length: Floats, *, overlapped: bool
) -> Timeline:
    waits = _overlapped(proof, program.prefetch) if overlapped else blocking_waits(proof)
    everything = spans(proof.table, program.orders, _play(proof, waits, length))
    is_compute = proof.table.is_compute[proof.table.step_rows()]
    return Timeline(
        program.schedule,
        compute=tuple(compress(everything, is_compute.tolist())),
        transfers=tuple(compress(everything, (~is_compute).tolist())),
    )


class Waits(NamedTuple):
    """What each row waits for, as rows; -1 for none.

    Given for leading rows, of a transfer for its SEND, and naming such rows. What is waited for
    is a row's end; or its start, where `third` is at least n, the number of all rows: of row
    third - n.
    """

    first: Ints
    second: Ints
    third: Ints


def _play(proof: ProgramProof, waits: Waits, length: Floats) -> Clock:
    rows, order = len(proof.table), proof.order
    end_of = np.zeros(rows + 1, dtype=np.int64)  # row -> where its end stands below, its start next
    end_of[order] = 2 * np.arange(1, len(order) + 1)
    for_start = waits.third >= rows
    third = end_of[waits.third - rows * for_start] + for_start
    columns = (end_of[waits.first], end_of[waits.second], third, length)
    time = [0.0, 0.0]  # for row -1
    for one, two, three, takes in zip(*(c[order].tolist() for c in columns), strict=True):
        at = time[one]
        if time[two] > at:
            at = time[two]
        if time[three] > at:
            at = time[three]
        time.append(at + takes)
        time.append(at)
    times, ends = np.array(time), end_of[_named(proof, proof.table.lead)]
    return Clock(start=times[ends + 1], end=times[ends])


def blocking_waits(proof: ProgramProof) -> Waits:
    """A transfer occupies both of its ranks. The order of each rank settles every need."""
    table, none = proof.table, np.full(len(proof.table), -1, dtype=np.int64)
    steps = table.step_rows()
    before = none.copy()
    before[steps] = _named(proof, _earlier(steps, table.rank[steps], by=1))
    there = np.where(proof.peer >= 0, before[proof.peer], -1)
    return Waits(before, there, none)


def _overlapped(proof: ProgramProof, prefetch: int) -> Waits:
    """Transfers run beside compute."""
    table = proof.table
    take, partner_take = table.inputs(proof.needed)
    second, third = _named(proof, take), _named(proof, partner_take)
    steps = table.step_rows()
    compute = steps[table.is_compute[steps]]
    first = np.full(len(table), -1, dtype=np.int64)
    first[compute] = _earlier(compute, table.rank[compute], by=1)

    # Lanes are numbered 2 * rank + (1 for down), apart for what a rank sends and receives.
    sends, receives = np.flatnonzero(table.is_send), np.flatnonzero(table.is_receive)
    there = table.rank[proof.peer]
    lane = 2 * table.rank + np.where(table.is_receive, table.rank > there, there > table.rank)
    link = table.rank * len(table.starts) + there
    first[sends] = _latest(table.lead[proof.needed[sends, 0]], lane[sends])
    second[sends] = _earlier(sends, link[sends], by=1)
    # The n-th receive of a lane waits for the n-th use but prefetch.
    takes = np.stack((take[compute], partner_take[compute]), axis=1)
    far = (takes >= 0) & (proof.peer[takes] >= 0)
    uses, used_lane = np.repeat(compute, far.sum(axis=1)), lane[takes[far]]
    opens = _earlier(uses, used_lane, by=prefetch)
    opens = np.where(opens >= 0, len(table) + opens, -1)[np.argsort(used_lane, kind="stable")]
    third[proof.peer[receives[np.argsort(lane[receives], kind="stable")]]] = opens
    return Waits(first, second, third)


def _named(proof: ProgramProof, rows: Ints) -> Ints:
    """The same rows, a RECV named by its SEND."""
    is_receive = (rows >= 0) & proof.table.is_receive[rows]
    return np.where(is_receive, proof.peer[rows], rows)


def _earlier(rows: Ints, group: Ints, *, by: int) -> Ints:
    """Per row, the one `by` places before it among the rows of its group, -1 for none."""
    listed = np.argsort(group, kind="stable")
    ahead, later = listed[:-by], listed[by:]
    same = group[ahead] == group[later]
    found = np.full(len(rows), -1, dtype=np.int64)
    found[later[same]] = rows[ahead[same]]
    return found


def _latest(rows: Ints, group: Ints) -> Ints:
    """Per row, the largest so far among the rows of its group."""
    listed = np.argsort(group, kind="stable")
    above = group[listed] * (rows.max(initial=0) + 1)
    found = np.empty_like(rows)
    found[listed] = np.maximum.accumulate(rows[listed] + above) - above
    return found
