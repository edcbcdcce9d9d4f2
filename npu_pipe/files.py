"""Write a file as a whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from npu_pipe.errors import ConfigError

__all__ = ["write_whole"]


def write_whole(content: str | bytes, path: str | Path) -> None:
    """Write a file; one that is there is replaced only when the new one is complete.

    Devices and pipes (/dev/stdout) are written to directly. Raises ConfigError when the path
    cannot be written; what was there is then still there.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        given = Path(path)
        if given.exists() and not given.is_file() and not given.is_dir():
            given.write_bytes(data)
        else:
            _replace(given.resolve(), data)  # a link stays, what it points to is replaced
    except (OSError, ValueError) as error:  # ValueError: a path or text that no file can have
        raise ConfigError(
            "an output file is written into a folder that exists and may be written",
            f"{path}: {getattr(error, 'strerror', None) or error}",
            "give another path",
        ) from error


def _replace(target: Path, data: bytes) -> None:
    if target.is_dir():
        raise IsADirectoryError("it is a folder")
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
