"""Write a file as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from npu_pipe.errors import ConfigError

__all__ = ["write_whole"]


def write_whole(content: str | bytes, path: str | Path) -> None:
    """Write a file; one that is there is replaced only when the new one is complete.

    Devices and pipes (/dev/stdout) are written to directly. Raises ConfigError when the path
    cannot be written; what was there is then still there.
    """
    data = content.encode() if isinstance(content, str) else content
    given = Path(path)
    if given.exists() and not given.is_file() and not given.is_dir():
        given.write_bytes(data)
        return
    target = given.resolve()  # a link stays, what it points to is replaced
    partial = target.with_name(target.name + ".partial")
    try:
        if target.is_dir():
            raise IsADirectoryError("it is a folder")
        partial.write_bytes(data)
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(
            "an output file is written into a folder that exists and may be written",
            f"{path}: {error.strerror or error}",
            "give another path",
        ) from error
