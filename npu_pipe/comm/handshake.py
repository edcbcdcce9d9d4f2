"""Agreement before the first transfer: what is wrong on one rank is refused on all, alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from npu_pipe import errors
from npu_pipe.comm.words import words_of
from npu_pipe.errors import HandshakeError, NpuPipeError, PeerError, UsageError

__all__ = ["agree", "require_equal"]


def agree(
    call: str, prepare: Callable[[], Any], *, gather: Callable[[Any], list[Any]]
) -> list[Any]:
    """Run `prepare` on every rank and give all of them all results (JSON).

    call: what is about to be done. Ranks that are about to do different things are told so,
    by HandshakeError.
    If `prepare` raises a UsageError on some rank, every rank raises that error, of the lowest
    such rank, with the rank in its facts. Of any other error the other ranks tell by PeerError.
    In each case all have met: they may go on to their next call together.
    """
    own: BaseException | None = None
    answer = {"call": call}
    try:
        answer["value"] = json.dumps(prepare())
    except UsageError as error:
        answer["mistake"] = json.dumps([type(error).__name__, error.rule, error.facts, error.cure])
    except BaseException as error:  # it must not leave before the others have heard of it
        own = error
        answer["failure"] = words_of(error)
    answers = gather(answer)
    require_equal(
        [{"call": each["call"]} for each in answers], cure="call the pipeline alike on every rank"
    )
    if own is not None:
        raise own
    for rank, each in enumerate(answers):
        if "failure" in each:
            raise PeerError(
                "every rank runs its part of a call to the end",
                f"rank {rank} failed in {call}: {each['failure']}",
                "mend the cause on that rank; the others only followed",
            )
        if "mistake" in each:
            kind, rule, facts, cure = json.loads(each["mistake"])
            named: type[NpuPipeError] = getattr(errors, kind, UsageError)
            raise named(rule, f"rank {rank}: {facts}" if len(answers) > 1 else facts, cure)
    return [json.loads(each["value"]) for each in answers]


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
