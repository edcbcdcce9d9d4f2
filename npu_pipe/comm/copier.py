"""Copier: a thread that does what takes long while the rank computes on, in the order asked for.

    main thread   F3 | send 3, free 1 asked for | F4 ......
    copier                    | copy 3 | free 1 |

Copying and waiting release Python's lock, so both really run.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

__all__ = ["Copier"]


class Copier:
    """Runs from the first job to `close`. What a job raises is raised in the main thread later."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._asked = 0
        self._done = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()

    @property
    def is_busy(self) -> bool:
        return self._done < self._asked

    def ask(self, job: Callable[[], None]) -> None:
        """Have this done after all that was asked for before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="npu_pipe copier", daemon=True)
            self._thread.start()
        self._asked += 1
        self._idle.clear()
        self._jobs.put(job)
        time.sleep(0)  # hands Python's lock over: it begins now, and not when this thread waits

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until all is done."""
        while self.is_busy:
            self._idle.wait()
        self.check()

    def close(self) -> None:
        """End after what has been asked for."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:  # after one nothing is in order any more
                    job()
            except BaseException as error:
                self._error = error
            del job  # and the tensors in it
            self._done += 1
            if not self.is_busy:
                self._idle.set()
