"""Agreement before the first transfer: what is wrong on one rank is refused on all, alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from npu_pipe import errors
from npu_pipe.comm.control import Control
from npu_pipe.errors import HandshakeError, NpuPipeError, UsageError

__all__ = ["agree", "require_equal"]


def agree(control: Control, prepare: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Run `prepare` on every rank and give all of them all results (JSON).

    If it raises a UsageError on some rank, every rank raises that error, of the lowest such
    rank, with the rank in its facts.
    """
    try:
        mine: dict[str, Any] = {"value": dict(prepare())}
    except UsageError as error:
        kind = type(error).__name__
        mine = {"error": [kind, error.rule, error.facts, error.cure]}
    answers = control.gather(mine)
    for rank, answer in enumerate(answers):
        if "error" in answer:
            kind, rule, facts, cure = answer["error"]
            named: type[NpuPipeError] = getattr(errors, kind, UsageError)
            where = f"rank {rank}: " if control.size > 1 else ""
            raise named(rule, where + facts, cure)
    return [answer["value"] for answer in answers]


def require_equal(answers: list[dict[str, Any]], *, cure: str) -> None:
    """Raise HandshakeError, naming ranks and values, where a fact is not the same everywhere.

    A rank that gives None for a fact does not know it, and is not asked.
    """
    for fact in answers[0]:
        ranks: dict[str, list[int]] = {}
        for rank, answer in enumerate(answers):
            if answer[fact] is not None:
                ranks.setdefault(str(answer[fact]), []).append(rank)
        if len(ranks) > 1:
            facts = "; ".join(
                f"{value} on rank{'s' * (len(there) > 1)} {', '.join(map(str, there))}"
                for value, there in ranks.items()
            )
            raise HandshakeError(
                f"all ranks have the same {fact}", facts.replace("; ", ", but "), cure
            )
