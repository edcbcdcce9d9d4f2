"""What a rank does for the process that started it: end with it, and tell it of an error."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from npu_pipe.launch.failure import Failure, failure_of, to_json
from npu_pipe.launch.lifeline import end_with_launcher
from npu_pipe.launch.say import say
from npu_pipe.launch.variables import is_set
from npu_pipe.launch.world import Launcher, World

__all__ = ["guard", "report_failure"]

_AGENT_FILE = "TORCHELASTIC_ERROR_FILE"


@contextmanager
def guard(world: World) -> Iterator[None]:
    """Run the body of a rank; the first thing a worker does, before its slow imports.

    An error in the body is reported once and becomes an exit status: 2 for a UsageError, 1 for
    anything else. The rank ends, with all it has started in its process group, as soon as its
    launcher is gone.
    """
    end_with_launcher(world)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        raise SystemExit(report_failure(world, error)) from None


def report_failure(world: World, error: BaseException) -> int:
    """Tell the user, through the parent of a local launch, what has failed; returns the status.

    Rank 0 of a local launch shares the parent's terminal and so leaves the printing to it; other
    ranks print into their own log as well. An elastic agent of torch is told too, and shows the
    first failure at the end of all.
    """
    failure = failure_of(error, rank=world.rank)
    if world.report_fd is None or world.rank != 0:
        name = "" if world.launcher is Launcher.ONE_PROCESS else f"rank {world.rank}: "
        say(f"{name}{failure.text}")
    if world.report_fd is not None:
        with suppress(OSError):  # a full disk
            os.pwrite(world.report_fd, to_json(failure), 0)
    if is_set(os.environ, _AGENT_FILE) and world.launcher in (
        Launcher.TORCHRUN,
        Launcher.TORCH_NPU_RUN,
    ):
        with suppress(OSError):
            Path(os.environ[_AGENT_FILE]).write_text(_for_agent(failure))
    return failure.status


def _for_agent(failure: Failure) -> str:
    """As torch.distributed.elastic.multiprocessing.errors.ErrorHandler writes it, in seconds."""
    extra = {"py_callstack": failure.text, "timestamp": str(int(time.time()))}
    return json.dumps({"message": {"message": failure.text, "extraInfo": extra}})
