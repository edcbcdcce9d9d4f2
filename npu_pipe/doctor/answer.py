"""The one answer on stdout: a screen, or a JSON document whatever happens."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from npu_pipe.doctor.diagnosis import Diagnosis
from npu_pipe.doctor.document import to_json_value, without_diagnosis
from npu_pipe.doctor.screen import print_diagnosis
from npu_pipe.errors import NpuPipeError
from npu_pipe.finding import Finding, Verdict, refusal

__all__ = ["answer", "document_of", "stdout_kept"]


def answer(diagnose: Callable[[], Diagnosis], *, as_json: bool) -> int:
    """Make a diagnosis and print it; returns the exit status.

    As JSON, what keeps it from being made is printed too, before it is raised again.
    """
    with _sigterm_as_before():
        return _answer(diagnose, as_json=as_json)


def _answer(diagnose: Callable[[], Diagnosis], *, as_json: bool) -> int:
    try:
        with stdout_kept() as kept:
            if as_json:
                _tell_at_sigterm(kept)
            found = diagnose()
            if as_json:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # to print it is all that is left
    except BaseException as error:
        if as_json:
            print(document_of(error), flush=True)
        raise
    if as_json:
        print(json.dumps(to_json_value(found), allow_nan=False), flush=True)
    else:
        print_diagnosis(found)
    return 0 if found.may_start else 1


@contextmanager
def stdout_kept() -> Iterator[int]:
    """Gives a descriptor of stdout, which is for the answer: what libraries of devices print there,
    in this process or one that it starts, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield kept
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def document_of(error: BaseException) -> str:
    """Of what keeps a diagnosis from being made."""
    match error:
        case NpuPipeError():
            found = refusal("job", error)
        case SystemExit():
            facts = f"it ended with status {error.code}"
            found = Finding("doctor", facts, Verdict.REFUSE, "see stderr")
        case _:
            facts = f"{type(error).__name__}: {error}"
            found = Finding("doctor", facts, Verdict.REFUSE, "see stderr")
    return json.dumps(without_diagnosis(found))


@contextmanager
def _sigterm_as_before() -> Iterator[None]:
    """What is done at it here is for the time of the answer; a process started later would have it
    ignored, and could not be ended by it."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell_at_sigterm(kept: int) -> None:
    """A launcher ends all ranks by it when one of them has failed, before this one may know."""

    def leave(number: int, _: object) -> None:
        # An exception could strike where another is being handled, with stdout not yet restored.
        os.write(kept, f"{document_of(SystemExit(128 + number))}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, leave)
