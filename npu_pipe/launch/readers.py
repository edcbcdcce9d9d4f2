"""The launchers whose environment can be read, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from npu_pipe.launch import spawned, torchrun
from npu_pipe.launch.variables import is_set
from npu_pipe.launch.world import World

__all__ = ["READERS", "read_world"]

# A row: the variables that speak for a launcher, and its reader. The first row with any of its
# variables set is taken, so a launcher stands above those it may be started by, and above those
# whose variables it sets too.
READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, str]], World]], ...] = (
    (spawned.VARIABLES, spawned.read),
    (torchrun.VARIABLES, torchrun.read),
)


def read_world(environ: Mapping[str, str]) -> World:
    """The World that `environ` describes; one process if no launcher has set anything.

    Raises ConfigError when the launcher's variables cannot be used.
    """
    for variables, read in READERS:
        if any(is_set(environ, name) for name in variables):
            return read(environ)
    return World.single()
