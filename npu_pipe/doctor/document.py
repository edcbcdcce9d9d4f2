"""A diagnosis as JSON. Imports no torch.

The form is stable: keys may be added, and `version` goes up when one is taken out or changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from npu_pipe.doctor.diagnosis import Diagnosis, Link, RankFacts
from npu_pipe.finding import Finding, Verdict
from npu_pipe.launch.mesh import Axis

__all__ = ["finding_from_json", "found_together", "to_json_value", "without_diagnosis"]

_FORMAT, _VERSION = "npu_pipe.doctor", 1


def to_json_value(diagnosis: Diagnosis) -> dict[str, Any]:
    """Everything that was found; bytes are bytes, times microseconds (_us), speeds GB/s (_gb_s)."""
    world = diagnosis.world
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "may_start": diagnosis.may_start,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "launcher": {
            "name": world.launcher.value,
            "rank": world.rank,
            "size": world.size,
            "local_rank": world.local_rank,
            "address": world.address,
            "port": world.port,
            "sources": None if world.sources is None else asdict(world.sources),
        },
        "versions": dict(diagnosis.versions),
        "variables": dict(diagnosis.variables),
        "mesh": {
            "dp": diagnosis.mesh.dp,
            "pp": diagnosis.mesh.pp,
            "tp": diagnosis.mesh.tp,
            "schedule": diagnosis.schedule,
            "ranks": [_rank(diagnosis, rank) for rank in range(diagnosis.mesh.size)],
        },
        "ranks": [asdict(facts) for facts in diagnosis.facts],
        "links": [asdict(link) for link in diagnosis.links],
    }


def without_diagnosis(finding: Finding) -> dict[str, Any]:
    """The same keys, where all that was found is what kept it from being made."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "may_start": False,
        "findings": [asdict(finding)],
        "launcher": None,
        "versions": {},
        "variables": {},
        "mesh": None,
        "ranks": [],
        "links": [],
    }


def found_together(
    value: Mapping[str, Any],
) -> tuple[tuple[Finding, ...], tuple[RankFacts, ...], tuple[Link, ...]]:
    """Of such a document: its findings, the facts of the ranks, the links."""
    return (
        tuple(finding_from_json(each) for each in value["findings"]),
        tuple(RankFacts(**each) for each in value["ranks"]),
        tuple(Link(**each) for each in value["links"]),
    )


def finding_from_json(value: Mapping[str, Any]) -> Finding:
    return Finding(
        value["name"],
        value["facts"],
        Verdict(value["verdict"]),
        value["cure"],
        tuple(value["ranks"]),
    )


def _rank(diagnosis: Diagnosis, rank: int) -> dict[str, Any]:
    at = diagnosis.mesh.coordinates(rank)
    return {
        "rank": rank,
        "dp": at.dp,
        "pp": at.pp,
        "tp": at.tp,
        "stages": list(diagnosis.stages[at.pp]),
        "groups": {axis.value: list(diagnosis.mesh.ranks(axis, rank)) for axis in Axis},
    }
