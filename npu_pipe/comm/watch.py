"""Watch: a thread beside each rank's own, which knows how the other ranks do.

Twice a second it tells them what this rank is at, and hears the same from them; word of a failure
goes at once. As soon as it knows why the pipeline cannot go on, it wakes this rank's main thread
out of whatever transfer it waits for; the main thread then asks here for the cause.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple
from mmap import mmap
from typing import Any

from npu_pipe.comm.board import Board, Place, place_of
from npu_pipe.comm.mesh import Mesh
from npu_pipe.comm.verdict import Cause, Seen, died, judge, left, table

__all__ = ["Watch"]

_BEAT_S = 0.5
_LEAST_BEAT_S = 0.02


class Watch:
    """Runs from its making to `close`.

    boards: of the other ranks of this host. timeout_s: without progress for that long, a rank
    has failed. interrupt: wakes the main thread, from this one. look: brings the board up to date
    where this rank's own thread cannot.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        mesh: Mesh,
        board: Board,
        boards: Mapping[int, mmap],
        timeout_s: float,
        interrupt: Callable[[], None],
        look: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._size = size
        self._mesh = mesh
        self._board = board
        self._boards = boards
        self._timeout_s = timeout_s
        self._beat_s = min(_BEAT_S, max(timeout_s / 8, _LEAST_BEAT_S))
        self._interrupt = interrupt
        self._look = look
        self._own = board.place
        self._since = time.monotonic()  # at this place
        self._holds_since = self._since  # the time-out: nobody is blamed for what was before
        self._heard = {
            other: (self._since, board.place, 0.0) for other in range(size) if other != rank
        }  # when, what it was at, for how long
        self._left: dict[int, Place] = {}
        self._cause: Cause | None = None
        self._table_by: int | None = None
        self._deciding = threading.Lock()
        self._decided = threading.Event()
        self._asked = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="npu_pipe watch", daemon=True)
        self._thread.start()
        atexit.register(self._stop)  # a daemon in the middle of a transfer aborts the process

    def cause(self, patience_s: float) -> Cause | None:
        """Why this rank's transfers have failed; None if nobody knows within the time."""
        self._asked = True
        self._mesh.wake()
        self._decided.wait(patience_s)
        return self._cause

    def tell(self, cause: Cause) -> None:
        """Leave word of a failure with all ranks; the first word counts."""
        if self._decide(cause, None):
            self._pass_on()

    @contextmanager
    def patience(self, timeout_s: float) -> Iterator[None]:
        """In the block, a rank has failed only without progress for that long."""
        before, self._timeout_s = self._timeout_s, max(timeout_s, self._timeout_s)
        try:
            yield
        finally:
            self._holds_since = time.monotonic()
            self._timeout_s = before

    def close(self) -> None:
        """Leave; the other ranks are told, first of all why if it is known: this may come to a
        rank before the word of the one that found out."""
        if self._cause is not None:
            self._pass_on()
        self._mesh.tell({"bye": astuple(self._board.place)})
        atexit.unregister(self._stop)
        self._stop()

    def _stop(self) -> None:
        self._closing = True
        self._mesh.wake()
        self._thread.join()
        self._mesh.close()

    def _run(self) -> None:
        due = time.monotonic()
        while not self._closing:
            for rank, message in self._mesh.hear(max(0.0, due - time.monotonic())):
                self._take(rank, message)
            now = time.monotonic()
            if now >= due:
                if now - due > self._timeout_s / 2:  # all ranks were stopped, by Ctrl-Z say
                    self._holds_since = now
                due = now + self._beat_s
                self._beat(now)
            if self._cause is None:
                self._judge(now)

    def _take(self, rank: int, message: Any) -> None:
        if message is None:
            if rank in self._heard:  # else it has said that it leaves
                place = self._place(rank)
                del self._heard[rank]
                self._settle(died(rank, place, exact=rank in self._boards))
        elif "word" in message:
            if self._decide(Cause(**message["word"]), message["table_by"]):
                self._react()
        elif "bye" in message:
            self._left[rank] = Place(*message["bye"])
            self._heard.pop(rank, None)
        else:
            self._heard[rank] = (time.monotonic(), Place(*message["at"]), message["still_s"])

    def _beat(self, now: float) -> None:
        self._look()
        place = self._board.place
        if place != self._own:
            self._own, self._since = place, now
        self._mesh.tell({"at": astuple(place), "still_s": now - self._since})

    def _judge(self, now: float) -> None:
        for rank, place in self._left.items():
            if self._asked or (self._own.waits and place.calls < self._own.calls):
                self._settle(left(rank, place))
                return
        seen, beat_s = self._seen(now), self._beat_s
        able = (r for r, each in seen.items() if each.place.waits and each.silent_s < 4 * beat_s)
        speaker = min(able, default=self._rank)
        grace_s = 0.0 if speaker == self._rank else beat_s  # so that one speaks, if it can
        cause = judge(self._rank, seen, timeout_s=self._timeout_s, grace_s=grace_s)
        if cause is not None:
            self._settle(cause, table_by=speaker)

    def _settle(self, cause: Cause, *, table_by: int | None = None) -> None:
        """The cause is found here; the others are told, and one of them to print the table."""
        if self._decide(cause, table_by):
            self._pass_on()
            self._react()

    def _decide(self, cause: Cause, table_by: int | None) -> bool:
        """Whether this is the first cause."""
        with self._deciding:
            first = self._cause is None
            if first:
                self._cause, self._table_by = cause, table_by
                self._decided.set()
        return first

    def _pass_on(self) -> None:
        assert self._cause is not None
        self._mesh.tell({"word": self._cause.to_json(), "table_by": self._table_by})

    def _react(self) -> None:
        self._interrupt()
        if self._table_by == self._rank:
            self._print_table()

    def _seen(self, now: float) -> dict[int, Seen]:
        longest_s = now - self._holds_since
        seen = {self._rank: Seen(self._own, min(now - self._since, longest_s), 0.0)}
        for rank, (when, place, still_s) in self._heard.items():
            silent_s = now - when
            if silent_s > 2 * self._beat_s:
                place = self._place(rank)
            seen[rank] = Seen(place, min(still_s + silent_s, longest_s), min(silent_s, longest_s))
        return dict(sorted(seen.items()))

    def _place(self, rank: int) -> Place:
        """What a rank is at: to the action on this host, else as last heard."""
        board = self._boards.get(rank)
        return self._heard[rank][1] if board is None else place_of(board)

    def _print_table(self) -> None:
        assert self._cause is not None
        text = table(self._seen(time.monotonic()), self._size)
        print(f"npu-pipe: {self._cause.facts}\n{text}", file=sys.stderr, flush=True)
