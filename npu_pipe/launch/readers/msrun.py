"""Read the environment of msrun, MindSpore's launcher.

    msrun                      sets for each worker                     of which World takes
    --worker_num=8             MS_WORKER_NUM, RANK_SIZE                 size
    --local_worker_num=4       DEVICE_ID 0 to 3                         local_rank
    --node_rank=1              MS_NODE_ID and RANK_ID 4 to 7            rank
    --master_addr, _port       MS_SCHED_HOST, MS_SCHED_PORT             address, port
    --join=True                nothing

On the node of master_addr it starts the same script once more, as MindSpore's scheduler. A torch
program has no use for one, and the port it would listen on is that of our store: it leaves at
once. RANK, WORLD_SIZE and the other variables of torch are not read: msrun does not set them, but
for versions that set RANK to the local index, so what is there is somebody else's.

Source: mindspore/parallel/cluster of MindSpore 2.10.0
"""

from __future__ import annotations

from collections.abc import Mapping

from npu_pipe.errors import ConfigError
from npu_pipe.launch.variables import (
    check_at_most,
    check_below,
    check_same,
    first_set,
    host_name,
    is_set,
    port_number,
    require,
    whole_number,
)
from npu_pipe.launch.world import Launcher, Sources, World

__all__ = ["claim", "read"]

_CLAIMS = ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_NODE_ID")
_VARIABLES = ("MS_ROLE", "MS_WORKER_NUM", "DEVICE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT")
_SCHEDULER = ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")
_CURE = "start the ranks with msrun, or unset every MS_ variable to do without it"


def claim(environ: Mapping[str, str]) -> str | None:
    """The variable that says that msrun has started this process."""
    return first_set(environ, _CLAIMS)


def read(environ: Mapping[str, str]) -> World:
    """The World that msrun describes. Raises ConfigError that names the variables, SystemExit
    with status 0 in the scheduler."""
    if environ.get("MS_ROLE") == "MS_SCHED":
        # Alone it is what a scheduler left behind, and to leave would look like a success.
        require(environ, _SCHEDULER, cure=_CURE)
        # Into scheduler.log, where somebody may look for what this process has done.
        print("npu-pipe: MindSpore's scheduler has nothing to do for torch, and leaves", flush=True)
        raise SystemExit(0)
    if is_set(environ, "MS_SIMULATION_LEVEL"):
        raise ConfigError(
            "ranks of a pipeline run together",
            f"MS_SIMULATION_LEVEL is {environ['MS_SIMULATION_LEVEL']!r}: a dry run of MindSpore",
            "start msrun without --sim_level and without this variable",
        )
    require(environ, _VARIABLES, cure=_CURE)
    if environ["MS_ROLE"] != "MS_WORKER":
        raise ConfigError(
            "MS_ROLE is MS_WORKER or MS_SCHED", f"MS_ROLE is {environ['MS_ROLE']!r:.40}", _CURE
        )
    if not is_set(environ, "MS_NODE_ID"):
        # RANK_ID may be set nevertheless: on the master node it is the scheduler's, 0.
        raise ConfigError(
            "on several nodes msrun numbers the ranks by --node_rank",
            "MS_NODE_ID is not set, so which rank this is nobody knows",
            "give msrun --node_rank=0 on the first node, --node_rank=1 on the next, and so on",
        )
    size = whole_number(environ, "MS_WORKER_NUM", least=1, cure=_CURE)
    rank = whole_number(environ, "MS_NODE_ID", cure=_CURE)
    local_rank = whole_number(environ, "DEVICE_ID", cure=_CURE)
    check_below(environ, "MS_NODE_ID", "MS_WORKER_NUM", cure=_NUMBERS)
    check_same(environ, "MS_NODE_ID", "RANK_ID", cure=_CURE)
    check_same(environ, "MS_WORKER_NUM", "RANK_SIZE", cure=_CURE)
    check_at_most(environ, "DEVICE_ID", "MS_NODE_ID", cure=_NUMBERS)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=host_name(environ, "MS_SCHED_HOST"),
        port=port_number(environ, "MS_SCHED_PORT", cure=_CURE),
        launcher=Launcher.MSRUN,
        sources=Sources(
            rank="MS_NODE_ID",
            size="MS_WORKER_NUM",
            local_rank="DEVICE_ID",
            address="MS_SCHED_HOST",
            port="MS_SCHED_PORT",
        ),
    )


_NUMBERS = (
    "give msrun the same --local_worker_num on every node, whose sum is --worker_num, and each "
    "node its own --node_rank"
)
