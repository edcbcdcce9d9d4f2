"""The command line: `npu-pipe VERB ...`. Each verb is a module with `run(argv) -> status`.

A verb's module is imported when it is asked for, so that `show` starts without torch.
"""

from __future__ import annotations

import difflib
import errno
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import TextIO

from npu_pipe.errors import NpuPipeError, UsageError

__all__ = ["main"]

_NOBODY_READS = 141  # what a shell reports of a process ended by SIGPIPE
_VERBS = {
    "doctor": "look at this host or job, and say whether training may start",
    "launch": "run any Python program, or train, on ranks of this machine",
    "plan": "compare all schedules for your costs and memory, and say which to take",
    "script": "write the script that starts a job on a cluster, every setting explained",
    "show": "build a schedule, prove it, predict its timeline and draw it",
    "trace": "tell where the time of a run went, and what would make it shorter",
    "train": "train a model through a pipeline, as a job file says",
    "verify": "compare a job's pipeline with the unsplit model, number by number",
}

_HELP = f"""\
usage: npu-pipe VERB ...

Design, prove, predict and run pipeline-parallel training.

verbs:
{chr(10).join(f"  {verb:<8}{summary}" for verb, summary in _VERBS.items())}

options:
  -h, --help     this text; npu-pipe VERB --help tells the flags of a verb
  --version      the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit status.

    0 done; 1 something broke while running; 2 a mistake of the user; 130 interrupted.
    Errors of npu_pipe become one message on stderr.
    """
    # `import torch` loads torch_npu by itself where that is installed, and then fails without
    # CANN. device/ loads the backend it needs; every process we start shall leave it to that.
    # The variable has to be there before anything imports torch, hence here and not in launch/.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    _open_streams()
    try:
        status = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except NpuPipeError as error:
        _say(f"error: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_stdout():
            # As `npu-pipe show ... | head -1` leaves it.
            status = _NOBODY_READS
        elif error.errno == errno.ENOSPC:
            _say("error: what is printed and written has a place; the disk is full; make room")
            status = 1
        else:
            raise
        _discard(sys.stdout)
        return status


def _say(text: str) -> None:
    try:
        print(f"npu-pipe: {text}", file=sys.stderr)
    except OSError:  # nobody can be told; and nothing is left for the interpreter to flush
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """What is still buffered goes nowhere, or the interpreter would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Put /dev/null where this process was started with a closed stdin, stdout or stderr.

    Else the next file or socket gets that number, and is printed into.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115


def _dispatch(argv: list[str]) -> int:
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if verb in ("-h", "--help", "help"):
        print(_HELP, end="")
        return 0
    if verb == "--version":
        from importlib.metadata import version  # slow to import

        print(f"npu-pipe {version('npu-pipe')}")
        return 0
    if verb not in _VERBS:
        close = difflib.get_close_matches(verb, _VERBS, n=1)
        raise UsageError(
            f"verbs are {', '.join(_VERBS)}",
            f"{verb!r} was asked for",
            f"did you mean 'npu-pipe {close[0]}'?" if close else "see npu-pipe --help",
        )
    module = importlib.import_module(f"npu_pipe.cli.{verb}")
    try:
        return int(module.run(rest))
    except SystemExit as left:  # the flag parser, after --help or a mistake it has explained
        if isinstance(left.__context__, BrokenPipeError):
            return _NOBODY_READS  # rich has let go of stdout, and makes 1 of it
        return left.code if isinstance(left.code, int) else int(left.code is not None)


def _nobody_reads_stdout() -> bool:
    """Whether stdout is a pipe whose reader has gone: other broken pipes are no affair of ours."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
