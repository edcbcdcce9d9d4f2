"""A file descriptor that goes along with a message through a local socket."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

from npu_pipe.errors import RunError

__all__ = ["FILE_BYTES", "file_of", "with_file"]

FILE_BYTES = socket.CMSG_LEN(4)
"""What recvmsg is to have room for beside the message."""


def with_file(file: int) -> tuple[int, int, bytes]:
    """What sendmsg is given beside the message."""
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]).tobytes()


def file_of(extra: Sequence[tuple[int, int, bytes]]) -> int:
    """The descriptor that came, a new one here; who takes it closes it.

    Raises RunError where none has come for lack of room.
    """
    if not extra:
        raise RunError(
            "a rank can open a few files for each other rank",
            "this one may open no more: its limit is reached",
            "raise the limit (ulimit -n), or close files of your own",
        )
    ((_, _, data),) = extra
    return array.array("i", data)[0]
