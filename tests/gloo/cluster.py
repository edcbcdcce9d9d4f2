"""Ranks for tests: processes that are started once and run one job after another.

A job is a function in tests/gloo/jobs: (world, **arguments) -> JSON value. All ranks run it at
the same time, and the test gets what each returned or raised. A job that hangs costs the test
its time-out and the ranks their life; the next test gets new ones.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Answer:
    """What a job did on one rank: its value, or the class name and text of its error."""

    value: Any = None
    error: str | None = None
    text: str = ""
    trace: str = ""


class Cluster:
    def __init__(self, ranks: int, *, start: Callable[[int], Any] | None = None) -> None:
        """start: starts the process of a rank, and gives what subprocess.Popen does."""
        self.ranks = ranks
        self._jobs = 0
        self._store = dist.TCPStore(
            "127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False
        )
        self._processes = [(start or _start)(rank) for rank in range(ranks)]
        for rank in range(ranks):  # imports take their time, which no job's time-out counts
            self._line(rank)

    @property
    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def run(self, job: str, *, timeout_s: float = 60, **arguments: Any) -> list[Answer]:
        """Run jobs.<module>.<function> on all ranks. Fails the test if they do not end in time."""
        return self._run(job, range(self.ranks), timeout_s, arguments)

    def survivors(
        self, job: str, *, dead: int, timeout_s: float = 60, **arguments: Any
    ) -> list[Answer]:
        """As `run`, for jobs that kill the process of rank `dead`: the answers of the others."""
        rest = [rank for rank in range(self.ranks) if rank != dead]
        return self._run(job, rest, timeout_s, arguments)

    def _run(
        self, job: str, ranks: Sequence[int], timeout_s: float, arguments: dict[str, Any]
    ) -> list[Answer]:
        self._jobs += 1
        module, function = job.rsplit(".", 1)
        for rank, process in enumerate(self._processes):
            place = {"rank": rank, "size": self.ranks, "port": self._store.port, "job": self._jobs}
            order = {
                "module": module,
                "function": function,
                "arguments": arguments,
                "world": place,
            }
            assert process.stdin is not None
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        timer = threading.Timer(timeout_s, self.kill)
        timer.start()
        try:
            lines = {rank: self._line(rank) for rank in ranks}
        except BaseException:  # the test's own time-out: late answers would be taken for the next
            self.kill()
            raise
        finally:
            timer.cancel()
        silent = [rank for rank, line in lines.items() if not line]
        if silent:
            self.kill()
            raise AssertionError(f"{job}({arguments}): ranks {silent} gave no answer")
        return [Answer(**json.loads(line)) for line in lines.values()]

    def values(self, job: str, *, timeout_s: float = 60, **arguments: Any) -> list[Any]:
        """As `run`, for jobs that must not fail on any rank."""
        answers = self.run(job, timeout_s=timeout_s, **arguments)
        failed = [(rank, answer) for rank, answer in enumerate(answers) if answer.error]
        failed.sort(key=lambda each: each[1].error == "PeerError")  # causes before consequences
        assert not failed, "".join(f"rank {rank}: {answer.trace}" for rank, answer in failed)
        return [answer.value for answer in answers]

    def _line(self, rank: int) -> str:
        stream = self._processes[rank].stdout
        assert stream is not None
        return stream.readline()

    def signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()  # or `alive` would still find them

    def close(self) -> None:
        """End the ranks: there is nothing in them to save."""
        self.kill()
        for process in self._processes:
            process.communicate()


def _start(rank: int) -> subprocess.Popen[str]:
    variables = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent / 'pure'}",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(TESTS / "cluster_rank.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables},
        text=True,
    )
