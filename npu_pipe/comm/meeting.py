"""Meeting at a store: all ranks come, or each is told who did not."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from npu_pipe.errors import PeerError

__all__ = ["agree_on_start", "claim_rank", "meet_at", "patiently"]

T = TypeVar("T")

_SLACK_S = 3.0
_LOOK_S = 0.05


def meet_at(store: dist.Store, rank: int, size: int, *, place: str, connect_s: float) -> None:
    """Return when all ranks have come; raises PeerError, naming the others, after `connect_s`.

    place: for the message, where they meet. Every rank meets the same number of times.
    """
    try:
        found = patiently(
            lambda: _look(dist.PrefixStore("meeting", store), rank, size, connect_s),
            2 * connect_s + _SLACK_S,
        )
    except RuntimeError as error:  # of which torch's own errors are
        found = f"rank {rank} lost the store ({str(error).splitlines()[0]})"
    if isinstance(found, str):
        raise _not_met(size, place, connect_s, found)
    if rank in found:
        raise _not_met(size, place, connect_s, f"rank {rank} came when the others had given up")
    if found:
        ranks = f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        raise _not_met(size, place, connect_s, f"rank {rank} waited in vain for {ranks}")


def claim_rank(store: dist.Store, rank: int, *, me: str) -> str | None:
    """Before the first meeting: who is this rank already, if another process is. Then all that
    still wait there are told. me: what names this process."""
    first: str = store.compare_set(f"rank {rank}", "", me).decode()
    if first == me:
        return None
    meeting = dist.PrefixStore("meeting", store)
    meeting.set("1/told", json.dumps(f"two processes say that they are rank {rank}: {first}, {me}"))
    _note(meeting, "1/told")
    return first


def agree_on_start(store: dist.Store, rank: int, size: int, *, place: str, connect_s: float) -> str:
    """A name for this start of the job, the same on all ranks, in a store that outlives them.

    The number of restarts will not do: the agents of torchrun on several nodes count their own.
    Rank 0 makes the name; each of the others may first find that of an earlier start, and knows
    the right one by being among those that rank 0 has counted with the word of this start.
    Raises PeerError where rank 0 does not come within `connect_s`; others that do not are for
    `meet_at` to tell.
    """
    word = secrets.token_hex(8)
    try:
        start = patiently(
            lambda: (
                _open_start(store, word, size, connect_s)
                if rank == 0
                else _find_start(store, word, rank, connect_s)
            ),
            connect_s + _SLACK_S,
        )
    except RuntimeError:  # the store is lost
        return word
    if start is None:
        raise _not_met(size, place, connect_s, f"rank {rank} waited in vain for rank 0")
    return start


def _open_start(store: dist.Store, word: str, size: int, connect_s: float) -> str:
    store.set("start", word)
    words = [f"{word}/{rank}" for rank in range(1, size)]
    if _comes(store, words, connect_s):
        store.set(f"{word}/all", json.dumps([store.get(each).decode() for each in words]))
        _note(store, f"{word}/all")
    return word


def _find_start(store: dist.Store, word: str, rank: int, connect_s: float) -> str | None:
    until_s = time.monotonic() + connect_s
    if not _comes(store, ["start"], connect_s):
        return None
    while True:
        start = store.get("start").decode()
        store.set(f"{start}/{rank}", word)
        # It may be an earlier one. A `wait` that ends in vain would make torch print warnings.
        told = json.loads(store.get(f"{start}/all")) if _noted(store, f"{start}/all") else []
        if told and told[rank - 1] == word:
            return start
        if time.monotonic() > until_s:
            return start
        time.sleep(_LOOK_S)


def _not_met(size: int, place: str, connect_s: float, facts: str) -> PeerError:
    return PeerError(
        f"all {size} ranks meet at {place} within {connect_s:g} s",
        facts,
        "look for a rank that did not start, or a firewall between the machines",
    )


def _look(store: dist.Store, rank: int, size: int, connect_s: float) -> list[int] | str:
    """The ranks that have not come, or what else is wrong. Rank 0 finds out, and tells; for it the
    others wait."""
    number = store.add(f"{rank}", 1)
    here = [f"{number}/{each}" for each in range(size)]
    told = f"{number}/told"
    store.set(here[rank], "")
    _note(store, here[rank])
    if rank == 0:
        missing = _wait_for(store, here, told, connect_s)
        if not _noted(store, told):
            store.set(told, json.dumps(missing))
    elif not (_comes(store, here[:1], connect_s) and _comes(store, [told], connect_s + _SLACK_S)):
        return [each for each in range(size) if not _noted(store, here[each])]
    found: list[int] | str = json.loads(store.get(told))
    return found


def _wait_for(store: dist.Store, here: list[str], told: str, connect_s: float) -> list[int]:
    """Who has not come by the end of the time, or when somebody has told what is wrong."""
    until_s = time.monotonic() + connect_s
    missing = list(range(len(here)))
    while missing and not _noted(store, told):
        if _noted(store, here[missing[0]]):
            del missing[0]
        elif time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        else:
            return [each for each in missing if not _noted(store, here[each])]
    return missing


def _note(store: dist.Store, key: str) -> None:
    """Have `_noted` say that it is there. (The store of torch_npu_run has no `check`.)"""
    store.add(f"{key} is there", 1)


def _noted(store: dist.Store, key: str) -> bool:
    return store.add(f"{key} is there", 0) > 0


def _comes(store: dist.Store, keys: list[str], timeout_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError:
        return False
    return True


def patiently(question: Callable[[], T], patience_s: float) -> T:
    """The answer of a store; RuntimeError if none comes within `patience_s`.

    Where the process that serves it is stopped, or something else listens in its place, a call
    never returns, whatever time-out the store has: hence a thread, which then is left behind.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="npu_pipe meeting", daemon=True)
    thread.start()
    thread.join(patience_s)
    if answers:
        return answers[0]
    raise errors[0] if errors else RuntimeError(f"no answer within {patience_s:.3g} s")
