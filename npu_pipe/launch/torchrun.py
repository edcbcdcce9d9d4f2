"""Read torchrun's environment, or the same variables set by hand or by a cluster operator.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.errors import ConfigError
from npu_pipe.launch.variables import is_set, require, whole_number
from npu_pipe.launch.world import Launcher, World

__all__ = ["MARK", "VARIABLES", "read"]

# Set by torchrun only, never by hand.
MARK = "TORCHELASTIC_RUN_ID"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_CURE = "start the ranks with torchrun, or unset all of them to run on this machine alone"
_MOST = 2**31 - 1


def read(environ: Mapping[str, str]) -> World:
    """The World that torchrun describes. Raises ConfigError that names the variables."""
    require(environ, VARIABLES, cure=_CURE)
    size = whole_number(environ, "WORLD_SIZE", least=1, most=_MOST, cure=_CURE)
    rank = whole_number(environ, "RANK", most=_MOST, cure=_CURE)
    local_rank = whole_number(environ, "LOCAL_RANK", most=_MOST, cure=_CURE)
    _check_below(environ, "RANK", rank, "WORLD_SIZE", size)
    _check_below(environ, "LOCAL_RANK", local_rank, "WORLD_SIZE", size)
    if is_set(environ, "LOCAL_WORLD_SIZE"):
        local_size = whole_number(environ, "LOCAL_WORLD_SIZE", least=1, most=_MOST, cure=_CURE)
        _check_below(environ, "LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
        _check_below(environ, "LOCAL_WORLD_SIZE", local_size - 1, "WORLD_SIZE", size)
    restarts = 0
    if is_set(environ, "TORCHELASTIC_RESTART_COUNT"):
        restarts = whole_number(environ, "TORCHELASTIC_RESTART_COUNT", most=_MOST, cure=_CURE)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=environ["MASTER_ADDR"],
        port=whole_number(environ, "MASTER_PORT", least=1, most=2**16 - 1, cure=_CURE),
        launcher=Launcher.TORCHRUN,
        restarts=restarts,
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _check_below(
    environ: Mapping[str, str], name: str, index: int, bound_name: str, bound: int
) -> None:
    if index >= bound:
        relation = "at most" if name.endswith("_SIZE") else "less than"
        raise ConfigError(
            f"{name} is {relation} {bound_name}",
            f"{name} is {environ[name]}, {bound_name} is {environ[bound_name]}",
            _CURE,
        )
