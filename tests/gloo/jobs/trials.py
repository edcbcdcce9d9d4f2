"""Jobs that try the transfers between ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from npu_pipe import World
from npu_pipe.comm import trial
from npu_pipe.comm.links import TeamLink, fastest_link, gloo_link, paced
from npu_pipe.comm.shared import Pace, SharedLink
from npu_pipe.comm.team import Team
from npu_pipe.comm.trial import Amounts, mark_slow, try_pairs
from npu_pipe.launch.store import open_store

AMOUNTS = Amounts(words=10, messages=3, message_bytes=1 << 18, repeats=3)


def trials(
    world: World,
    *,
    link: str = "fastest_link",
    pairs: Sequence[Sequence[int]] = (),
    paced_rank: int | None = None,
    pace: tuple[float, float] = (0.0, 0.0),
    wrong_rank: int | None = None,
    looks_s: float = 0.0,
) -> list[dict[str, Any]]:
    """paced_rank: whose sends are slow. wrong_rank: one that receives other bytes.
    looks_s: what it takes beside to make what is sent, and to look at what has come."""
    for name in ("_pattern", "_is_equal") if looks_s else ():
        setattr(trial, name, _slowly(getattr(trial, name), looks_s))
    team = Team(
        world.rank,
        world.size,
        address=world.address,
        open_store=lambda: open_store(world, timeout_s=20),
        timeout_s=20,
        connect_s=20,
    )
    try:
        opened = _open(team, link, paced_rank, pace)
        team.on_break(opened.forget)
        if world.rank == wrong_rank:
            _spoil(opened)
        found = try_pairs(
            team,
            opened,
            [(low, high) for low, high in pairs] or [(r, r + 1) for r in range(world.size - 1)],
            place=torch.device("cpu"),
            hosts=["here"] * world.size,
            amounts=AMOUNTS,
        )
        return [asdict(each) for each in mark_slow(found)]
    finally:
        team.close()


def _slowly(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any, **keywords: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **keywords)

    return slow


def _open(team: Team, link: str, paced_rank: int | None, pace: tuple[float, float]) -> TeamLink:
    if paced_rank is None:
        return {"fastest_link": fastest_link, "gloo_link": gloo_link}[link](team)
    usual = Pace(5_000, 100)  # slow enough for a busy machine not to matter beside it
    return paced(Pace(*pace) if team.rank == paced_rank else usual)(team)


def _spoil(link: TeamLink) -> None:
    """Have one bit of the first tensor of every message be another."""
    assert isinstance(link, SharedLink)
    take = link.take

    def wrong(receive: Any) -> Any:
        meta, tensors = take(receive)
        with torch.no_grad():
            tensors[0].view(torch.uint8)[5] ^= 1
        return meta, tensors

    link.take = wrong  # type: ignore[method-assign]
