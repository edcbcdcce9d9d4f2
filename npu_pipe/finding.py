"""Finding: one thing that was looked at, what it is like, and what to do about it."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from npu_pipe.errors import NpuPipeError

__all__ = ["Finding", "Verdict", "may_start", "refusal"]


class Verdict(enum.StrEnum):
    """Whether training may start with it: a warning costs speed, or will be missed later."""

    OK = "ok"
    WARN = "warn"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Finding:
    """name: what was looked at. cure: empty where nothing need be done.
    ranks: those that found the same, ascending; empty for what is found once for a job."""

    name: str
    facts: str
    verdict: Verdict = Verdict.OK
    cure: str = ""
    ranks: tuple[int, ...] = ()


def refusal(name: str, error: NpuPipeError, *, verdict: Verdict = Verdict.REFUSE) -> Finding:
    """The finding that an error is: its rule and facts, and its cure."""
    return Finding(name, f"{error.rule}; {error.facts}", verdict, error.cure)


def may_start(findings: Iterable[Finding]) -> bool:
    """Whether training may start: nothing is refused."""
    return all(finding.verdict is not Verdict.REFUSE for finding in findings)
