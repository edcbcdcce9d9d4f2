"""Read the variables of torch's `env://`: torchrun sets them, and so do operators of clusters,
scripts and people.

Source: https://docs.pytorch.org/docs/stable/distributed.html#environment-variable-initialization
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.launch.variables import (
    check_at_most,
    check_below,
    first_set,
    host_name,
    is_set,
    port_number,
    require,
    whole_number,
)
from npu_pipe.launch.world import Launcher, Sources, World

__all__ = ["VARIABLES", "claim", "read", "read_five"]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_CURE = "start the ranks with torchrun, or unset all of them to run on this machine alone"


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that the five have been set by hand."""
    return first_set(environ, VARIABLES)


def read(environ: Mapping[str, str]) -> World:
    """The World that the five variables describe. Raises ConfigError that names them."""
    return read_five(environ, Launcher.BY_HAND, cure=_CURE)


def read_five(environ: Mapping[str, str], launcher: Launcher, *, cure: str) -> World:
    """As `read`, of a launcher that sets these five, and perhaps LOCAL_WORLD_SIZE."""
    require(environ, VARIABLES, cure=cure)
    size = whole_number(environ, "WORLD_SIZE", least=1, cure=cure)
    rank = whole_number(environ, "RANK", cure=cure)
    local_rank = whole_number(environ, "LOCAL_RANK", cure=cure)
    check_below(environ, "RANK", "WORLD_SIZE", cure=cure)
    check_below(environ, "LOCAL_RANK", "WORLD_SIZE", cure=cure)
    local_size = None
    if is_set(environ, "LOCAL_WORLD_SIZE"):
        local_size = whole_number(environ, "LOCAL_WORLD_SIZE", least=1, cure=cure)
        check_below(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE", cure=cure)
        check_at_most(environ, "LOCAL_WORLD_SIZE", "WORLD_SIZE", cure=cure)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=host_name(environ, "MASTER_ADDR"),
        port=port_number(environ, "MASTER_PORT", cure=cure),
        launcher=launcher,
        sources=Sources(
            rank="RANK",
            size="WORLD_SIZE",
            local_rank="LOCAL_RANK",
            address="MASTER_ADDR",
            port="MASTER_PORT",
        ),
    )
