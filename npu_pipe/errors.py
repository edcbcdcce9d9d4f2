"""The tree of errors.

    NpuPipeError                    everything this package raises on purpose
    |-- UsageError                  the user can mend it; the command line exits with status 2
    |   |-- ScheduleError           a schedule, program or schedule file breaks a rule
    |   |   `-- DeadlockError       ... by waiting in a circle
    |   |-- CostsError              costs that do not fit each other or the schedule
    |   |-- PartitionError          layers that cannot be cut into the stages asked for
    |   |-- ConfigError             a job file, flag or environment variable
    |   |-- DataError               a batch, text file or target
    |   `-- CheckpointError         a run folder or checkpoint that does not belong here
    `-- RunError                    something broke while running; exit status 1
        |-- HandshakeError          ranks disagree before the first transfer
        `-- PeerError               another rank failed, or was lost

Every message has three parts: the rule; the facts; the cure.
A UsageError is a ValueError too, and a RunError a RuntimeError: what torch raises for the same.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CostsError",
    "DataError",
    "DeadlockError",
    "HandshakeError",
    "NpuPipeError",
    "PartitionError",
    "PeerError",
    "RunError",
    "ScheduleError",
    "UsageError",
]


class NpuPipeError(Exception):
    """Base of all errors; `rule`, `facts` and `cure` are kept apart for programs."""

    def __init__(self, rule: str, facts: str, cure: str) -> None:
        super().__init__(rule, facts, cure)
        self.rule = rule
        self.facts = facts
        self.cure = cure

    def __str__(self) -> str:
        return f"{self.rule}; {self.facts}; {self.cure}"


class UsageError(NpuPipeError, ValueError):
    """Something the user can mend before anything runs."""


class ScheduleError(UsageError):
    """A schedule or program that breaks a rule.

    `rank`, `position` (index in that rank's order) and `action` (text form) say
    where; each is None when the fault has no such place.
    """

    def __init__(
        self,
        rule: str,
        facts: str,
        cure: str,
        *,
        rank: int | None = None,
        position: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(rule, facts, cure)
        self.rank = rank
        self.position = position
        self.action = action


class DeadlockError(ScheduleError):
    """Ranks that wait for each other; `cycle` lists (rank, action it waits at)."""

    def __init__(
        self,
        rule: str,
        facts: str,
        cure: str,
        *,
        cycle: tuple[tuple[int, str], ...],
        rank: int | None = None,
        position: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(rule, facts, cure, rank=rank, position=position, action=action)
        self.cycle = cycle


class CostsError(UsageError):
    """Costs that do not fit each other or the schedule."""


class PartitionError(UsageError):
    """Layers that cannot be cut into the stages asked for."""


class ConfigError(UsageError):
    """A job file, command-line flag or environment variable that cannot be used."""


class DataError(UsageError):
    """A batch, target or data file that cannot be used."""


class CheckpointError(UsageError):
    """A run folder or checkpoint that cannot be used."""


class RunError(NpuPipeError, RuntimeError):
    """Something broke while running."""


class HandshakeError(RunError):
    """Ranks that disagree on what they are about to run."""


class PeerError(RunError):
    """Another rank failed or was lost."""
