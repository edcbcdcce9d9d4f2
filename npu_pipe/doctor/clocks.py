"""How far the clocks of the hosts are apart. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from npu_pipe.finding import Finding, Verdict

__all__ = ["clock_finding"]

_FAR_S = 1.0  # more, and the logs of two hosts cannot be read side by side
_TIMES = 5


def clock_finding(
    gather: Callable[[Any], list[Any]], *, hosts: Sequence[str], machines: Sequence[str]
) -> Finding:
    """The time of day of each host against rank 0's, as good as ranks leave a meeting together;
    collective.

    gather: a value of each rank -> those of all. hosts: the name that each rank's has. machines:
    what tells one from another, whatever they are called.
    """
    offsets = []
    for _ in range(_TIMES):
        gather(None)
        clocks = gather(time.time())
        offsets.append([clock - clocks[0] for clock in clocks])
    if len(set(machines)) == 1:
        return Finding("clocks", "one host, one clock")
    apart = {
        machine: (hosts[rank], median(each[rank] for each in offsets))
        for rank, machine in reversed(list(enumerate(machines)))
    }
    told = ", ".join(
        f"{host} {seconds * 1e3:+.0f} ms" for host, seconds in reversed(apart.values())
    )
    facts = f"of the hosts, against rank 0's: {told}"
    if max(abs(seconds) for _, seconds in apart.values()) <= _FAR_S:
        return Finding("clocks", facts)
    cure = "run chrony or ntpd; npu-pipe puts timelines on one clock, but logs have their own"
    return Finding("clocks", facts, Verdict.WARN, cure)
