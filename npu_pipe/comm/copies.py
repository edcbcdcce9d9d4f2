"""What ranks tell each other of the copies of tied parameters, and agree on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from npu_pipe.comm.handshake import require_equal
from npu_pipe.errors import ConfigError, HandshakeError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.runtime.tied import Copy, Tied, check_tied

__all__ = ["Part", "agree_on_parts", "copies_here"]

_Row: TypeAlias = list[list[str] | None]
"""Of one tied parameter on one rank, per copy: form, trained or frozen, first copy that is the
same Parameter. None for a copy elsewhere."""


class Part(NamedTuple):
    """Copies that are one Parameter, where two stages of a rank share it; most often a single one.

    home: the rank that sends its gradient to those that do not hold it.
    holders: home, and with replicas the other rank that holds the same stages.
    """

    copies: tuple[Copy, ...]
    home: int
    holders: frozenset[int]


def copies_here(
    tied: Sequence[Tied], modules: Mapping[int, nn.Module], schedule: Schedule
) -> dict[str, Any]:
    """What this rank is told and what it holds, as JSON.

    Raises ConfigError for copies that do not exist, or belong to two tied parameters.
    """
    check_tied(tied, stages=schedule.stages)
    owners: dict[int, tuple[str, str]] = {}  # of each Parameter: the tied one, its first copy
    found = []
    for each in tied:
        row: _Row = []
        for stage, name in each.copies:
            if stage not in modules:
                row.append(None)
                continue
            parameter = _parameter(modules[stage], stage, name)
            owner, first = owners.setdefault(id(parameter), (str(each), f"{stage}:{name}"))
            if owner != str(each):
                raise ConfigError(
                    "a parameter is one copy of one tied parameter",
                    f"'{name}' of stage {stage} is the same as {first}, which is in {owner}",
                    "name all copies of it in one Tied",
                )
            form = f"{tuple(parameter.shape)} of {parameter.dtype}"
            row.append([form, "trained" if parameter.requires_grad else "frozen", first])
        found.append(row)
    return {"tied": [str(each) for each in tied], "copies": found}


def agree_on_parts(
    tied: Sequence[Tied], answers: Sequence[dict[str, Any]], schedule: Schedule
) -> list[list[Part]]:
    """The parts of each tied parameter, by stage.

    answers: of all ranks, what `copies_here` gave.
    Raises HandshakeError for ranks that disagree, ConfigError for copies that do not fit.
    """
    require_equal(
        [{"tied parameters": answer["tied"]} for answer in answers],
        cure="give Pipeline the same tied parameters on every rank",
    )
    parts = []
    for index, each in enumerate(tied):
        facts = [answer["copies"][index] for answer in answers]
        _require_alike(each, facts)
        parts.append(_parts_of(each, facts, schedule))
    return parts


def _parameter(module: nn.Module, stage: int, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        names = [known for known, _ in module.named_parameters(remove_duplicate=False)]
        raise ConfigError(
            "a copy of a tied parameter is named as in its stage's module",
            f"stage {stage} has no parameter '{name}'; it has {', '.join(names) or 'none'}",
            "name one of these",
        ) from error


def _require_alike(tied: Tied, facts: Sequence[_Row]) -> None:
    """All copies have one form; and where two stages lie on two ranks, with replicas, the same
    ones are one Parameter."""
    for (stage, name), copies in zip(tied.copies, zip(*facts, strict=True), strict=True):
        firsts = {copy[2] for copy in copies if copy is not None}
        if len(firsts) > 1:
            raise HandshakeError(
                "two replicas share the same parameters between their stages",
                f"'{name}' of stage {stage} is the same as another copy on one rank only",
                "build both replicas alike",
            )
    held = [
        (rank, *where, *copy[:2])
        for rank, row in enumerate(facts)
        for where, copy in zip(tied.copies, row, strict=True)
        if copy is not None
    ]
    if len({(form, state) for *_, form, state in held}) > 1:
        seen = (f"{n} of stage {s} on rank {r}: {form}, {state}" for r, s, n, form, state in held)
        raise ConfigError(
            "all copies of a tied parameter have one shape and dtype, and are trained or frozen",
            "; ".join(seen).replace("; ", ", "),
            "build them alike, or do not tie them",
        )


def _parts_of(tied: Tied, facts: Sequence[_Row], schedule: Schedule) -> list[Part]:
    shared: dict[str, list[Copy]] = {}
    for place, (stage, name) in enumerate(tied.copies):
        copy = facts[schedule.placement[stage]][place]
        assert copy is not None
        shared.setdefault(copy[2], []).append((stage, name))
    parts = []
    for copies in shared.values():
        stage = copies[0][0]
        holders = (rank for rank in range(schedule.ranks) if stage in schedule.stages_of(rank))
        parts.append(Part(tuple(copies), schedule.placement[stage], frozenset(holders)))
    return parts
