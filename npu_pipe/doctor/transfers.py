"""The transfers between neighbours, tried the way that training takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from npu_pipe.comm.device_pairs import Pair, pairs_used
from npu_pipe.comm.links import device_link, fastest_link
from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.comm.trial import Trial, better, mark_slow, try_pairs
from npu_pipe.device.device import Device
from npu_pipe.doctor.diagnosis import Link
from npu_pipe.ir.program import Lane
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.mesh import Coordinates, Mesh

__all__ = ["neighbours", "try_links"]


def neighbours(mesh: Mesh, schedule: Schedule) -> tuple[tuple[int, int], ...]:
    """The ranks of the job that send to each other, of all its pipelines: low < high."""
    found = set()
    for _, low, high in pairs_used(schedule):
        for dp, tp in product(range(mesh.dp), range(mesh.tp)):
            ends = (mesh.rank(Coordinates(dp, pp, tp)) for pp in (low, high))
            found.add((next(ends), next(ends)))
    return tuple(sorted(found))


def try_links(
    team: Team, device: Device, pairs: Sequence[tuple[int, int]], machines: Sequence[str]
) -> tuple[Link, ...]:
    """Try what lies between these pairs of ranks, low < high, over both lanes; collective, the same
    value on every rank. machines: that each rank is on. Raises PeerError when a rank fails."""
    if not pairs:
        return ()
    link = _open_link(team, device, pairs)
    team.on_break(link.forget)
    team.on_interrupt(link.interrupt)
    attempt = partial(try_pairs, team, link, place=device.place, hosts=machines)
    trials = mark_slow(attempt(pairs))
    slow = [(trial.low, trial.high) for trial in trials if trial.is_slow]
    if slow:  # a host that is busy for a moment makes a link look slow, but not twice
        trials = mark_slow(better(trials, attempt(slow)))
    return tuple(map(_link, trials))


def _open_link(team: Team, device: Device, pairs: Sequence[tuple[int, int]]) -> TeamLink:
    """The link that training takes."""
    if device.place.type == "cpu":
        return fastest_link(team)
    both = sorted(Pair(lane, low, high) for low, high in pairs for lane in Lane)
    return device_link(team, device, both)


def _link(trial: Trial) -> Link:
    down, up, both = (way / 1e3 for way in (trial.down, trial.up, trial.both))  # from bytes a us
    return Link(
        low=trial.low,
        high=trial.high,
        latency_us=trial.latency_us,
        down_gb_s=down,
        up_gb_s=up,
        both_gb_s=both,
        is_correct=trial.is_correct,
        is_near=trial.is_near,
        is_slow=trial.is_slow,
    )
