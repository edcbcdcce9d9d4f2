"""Diagnosis: all that was found about a job's ranks and hosts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from npu_pipe.finding import Finding, Verdict, may_start
from npu_pipe.launch.mesh import Mesh
from npu_pipe.launch.world import World

__all__ = ["Diagnosis", "Link", "RankFacts", "disagreements", "merged", "told_ranks"]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """host: its name. device: in words. Bytes are None where nobody counts them."""

    rank: int
    host: str
    local_rank: int
    device: str
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True)
class Link:
    """How fast two ranks reach each other, low < high. down is to the higher one, both with both
    lanes busy; in GB (1e9 bytes) a second, one way."""

    low: int
    high: int
    latency_us: float
    down_gb_s: float
    up_gb_s: float
    both_gb_s: float
    is_correct: bool
    is_near: bool
    is_slow: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """world: of the process that tells. stages: of each place along the pipeline.
    versions, variables: of rank 0's host. facts: of each rank, none if they did not meet.
    links: none if none was tried."""

    world: World
    mesh: Mesh
    schedule: str
    stages: tuple[tuple[int, ...], ...]
    versions: Mapping[str, str | None]
    variables: Mapping[str, str]
    findings: tuple[Finding, ...]
    facts: tuple[RankFacts, ...] = ()
    links: tuple[Link, ...] = ()

    @property
    def may_start(self) -> bool:
        """Whether training may start."""
        return may_start(self.findings)

    def with_findings(self, more: Iterable[Finding]) -> Diagnosis:
        return replace(self, findings=(*self.findings, *more))


def merged(by_rank: Sequence[Sequence[Finding]]) -> tuple[Finding, ...]:
    """What several ranks found alike is one finding, with its ranks; in the order of names."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in dict.fromkeys(findings):
            ranks.setdefault(replace(finding, ranks=()), []).append(rank)
    names = list(dict.fromkeys(finding.name for finding in ranks))
    found = (replace(finding, ranks=tuple(there)) for finding, there in ranks.items())
    return tuple(sorted(found, key=lambda finding: names.index(finding.name)))


def disagreements(
    name: str, by_rank: Sequence[Mapping[str, str | None]], *, verdict: Verdict, cure: str
) -> tuple[Finding, ...]:
    """One finding for each thing that is not the same on all ranks."""
    found = []
    for key in dict.fromkeys(key for values in by_rank for key in values):
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            ranks.setdefault(values.get(key) or "not set", []).append(rank)
        if len(ranks) > 1:
            told = ", ".join(f"{value} on {told_ranks(there)}" for value, there in ranks.items())
            found.append(Finding(name, f"{key} is {told}", verdict, cure))
    return tuple(found)


def told_ranks(ranks: Sequence[int]) -> str:
    """rank 3; ranks 0-3, 8: for a person."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' * (len(ranks) > 1)} {text}"
