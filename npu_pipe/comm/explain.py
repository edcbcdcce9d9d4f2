"""What a failure of a device's communication library means, and what to do about it.

The libraries answer with codes, pages of text, or a word; a row here says the same in a sentence.
docs/symptoms.md has the same rows for a reader who comes with a code.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from npu_pipe.comm.verdict import Cause
from npu_pipe.comm.words import text_of
from npu_pipe.errors import NpuPipeError, PeerError

__all__ = ["SYMPTOMS", "Symptom", "explained", "failed_transfer"]

_LONGEST = 300  # characters of the library's own words


class Symptom(NamedTuple):
    """code: as users search for it. sign: what in the text of an error tells it."""

    code: str
    sign: str
    meaning: str
    cure: str


SYMPTOMS = (  # the more telling ones first: a text often holds several
    Symptom(
        "EI0006",
        r"\bEI0006\b",
        "a rank did not come to the set-up of a communicator within HCCL_CONNECT_TIMEOUT",
        "look for a rank that is late or has failed; raise HCCL_CONNECT_TIMEOUT if it only is slow",
    ),
    Symptom(
        "EI0002",
        r"\bEI0002\b",
        "a rank waited in vain for the notify of another, within HCCL_EXEC_TIMEOUT",
        "look for a rank that is stuck, or for communication of your own whose order differs "
        "between ranks",
    ),
    Symptom(
        "EI0019",
        r"\bEI0019\b",
        "a port of HCCL is in use",
        "give each job of a host its own HCCL_IF_BASE_PORT, or end the other job",
    ),
    Symptom(
        "EJ0003",
        r"\bEJ0003\b",
        "a port of an NPU is in use by another process",
        "give each job of a host its own NPUs and ports, or end the other job",
    ),
    Symptom(
        "EJ0001",
        r"\bEJ0001\b",
        "an earlier job still holds the NPU",
        "end its processes, which npu-smi info lists, and start again",
    ),
    Symptom(
        "EI0007",
        r"\bEI0007\b",
        "HCCL has no more streams or queues to give",
        "use fewer communicators: fewer pipelines alive at a time, fewer groups of your own",
    ),
    Symptom(
        "EL0009",
        r"\bEL0009\b",
        "the device has no more streams or queues to give",
        "use fewer communicators and streams, or fewer processes on one NPU",
    ),
    Symptom(
        "ERR02002",
        r"\bERR02002\b",
        "a tensor that HCCL was given is not contiguous, or of a type that it does not send",
        "call .contiguous() on what your own communication sends",
    ),
    Symptom(
        "ncclRemoteError",
        r"ncclRemoteError|remote process exited",
        "another rank has ended, or the network to it is broken",
        "look for the rank that failed first: its own error tells why",
    ),
    Symptom(
        "ncclInvalidUsage",
        r"ncclInvalidUsage|Duplicate GPU detected",
        "two ranks of a group are on one GPU, or their calls do not fit each other",
        "give each rank a GPU of its own",
    ),
    Symptom(
        "ncclSystemError",
        r"ncclSystemError|unhandled system error",
        "a call into the system failed: memory, sockets or shared memory",
        "run again with NCCL_DEBUG=WARN and read its last line",
    ),
    Symptom(
        "ncclUnhandledCudaError",
        r"ncclUnhandledCudaError|unhandled cuda error",
        "a call into CUDA failed inside NCCL",
        "run again with NCCL_DEBUG=WARN and CUDA_LAUNCH_BLOCKING=1 to see which",
    ),
    Symptom(
        "ERR02200",
        r"\bERR02200\b|hccl's communicator reports|operator name is Hccl",
        "a call into HCCL failed",
        "look for a rank that failed before: this often follows from it; else read HCCL's own log "
        "in ~/ascend/log",
    ),
    Symptom(
        "ERR00100",
        r"\bERR00100\b|AclrtSynchronize\w+|device does nothing any more",
        "work that was given to the NPU failed, which may have been a transfer",
        "look for a rank that failed before: this often follows from it; else run again with "
        "ASCEND_LAUNCH_BLOCKING=1 to see which operator it was",
    ),
)


def explained(error: BaseException, where: str) -> Cause | None:
    """Why a transfer failed: what a PeerError says, or what a failure of the device's library
    means; None for any other error.

    where: what the rank was at. That the device failed at this rank does not say that the cause
    lies here: a transfer fails at both ends. So the watch is asked, as after a lost connection.
    (No exception is returned: who holds one holds the frames that it has passed, and with them
    the connections that have to close.)
    """
    if isinstance(error, PeerError):
        return Cause(error.rule, error.facts, error.cure)
    if not isinstance(error, RuntimeError) or isinstance(error, NpuPipeError):
        return None
    text = text_of(error)
    return failed_transfer(text, where) if _symptom(text) is not None else None


def failed_transfer(text: str, where: str) -> Cause:
    """The cause of what a device's library says of a transfer, known or not."""
    rule = "whatever is given to a device is done"
    symptom, line = _symptom(text), _telling_line(text)
    if symptom is None:
        cure = "look for a rank that failed before: this often follows from it"
        return Cause(rule, f"a transfer failed {where}: {line}", cure)
    facts = f"{symptom.code} {where}: {symptom.meaning} ({line})"
    return Cause(rule, facts, symptom.cure)


def _symptom(text: str) -> Symptom | None:
    return next((each for each in SYMPTOMS if re.search(each.sign, text)), None)


def _telling_line(text: str) -> str:
    """The line that says most: libraries put it last, below their advice."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:_LONGEST] if lines else ""
