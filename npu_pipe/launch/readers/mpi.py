"""What the readers of both MPIs share: four numbers, and a place to meet that neither tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from npu_pipe.errors import ConfigError
from npu_pipe.launch.variables import (
    TORCH_PORT,
    check_at_most,
    check_below,
    check_same,
    derived_port,
    host_name,
    is_set,
    port_number,
    require,
    whole_number,
)
from npu_pipe.launch.world import Launcher, Sources, World

__all__ = ["Names", "read_mpi"]

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The variables of an MPI. job: what names the job on its node; None if nothing does."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str | None

    @property
    def four(self) -> tuple[str, str, str, str]:
        return self.rank, self.size, self.local_rank, self.local_size


def read_mpi(
    environ: Mapping[str, str], names: Names, launcher: Launcher, *, cure: str, hand_on: str
) -> World:
    """The World of an MPI. hand_on: how its launcher hands variables on, for a message.

    Raises ConfigError that names the variables.
    """
    require(environ, names.four, cure=cure)
    rank = whole_number(environ, names.rank, cure=cure)
    size = whole_number(environ, names.size, least=1, cure=cure)
    local_rank = whole_number(environ, names.local_rank, cure=cure)
    local_size = whole_number(environ, names.local_size, least=1, cure=cure)
    check_below(environ, names.rank, names.size, cure=cure)
    check_below(environ, names.local_rank, names.local_size, cure=cure)
    check_at_most(environ, names.local_size, names.size, cure=cure)
    for name, torch_name in zip(names.four, _TORCH_NAMES, strict=True):
        check_same(environ, name, torch_name, cure=f"unset {torch_name}: {launcher.value} is there")
    if local_size < size and not is_set(environ, "MASTER_ADDR"):
        raise ConfigError(
            f"on several nodes {launcher.value} is told where the ranks meet",
            f"{local_size} of {size} ranks are on this node, and MASTER_ADDR is not set",
            hand_on,
        )
    address, address_source = _LOOPBACK, f"loopback: {names.local_size} says one node"
    if is_set(environ, "MASTER_ADDR"):
        address, address_source = host_name(environ, "MASTER_ADDR"), "MASTER_ADDR"
    port, port_source = TORCH_PORT, "torch's usual port"
    if is_set(environ, "MASTER_PORT"):
        port, port_source = port_number(environ, "MASTER_PORT", cure=hand_on), "MASTER_PORT"
    elif names.job is not None and is_set(environ, names.job):
        port, port_source = derived_port(environ[names.job]), f"made from {names.job}"
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=port,
        launcher=launcher,
        sources=Sources(
            rank=names.rank,
            size=names.size,
            local_rank=names.local_rank,
            address=address_source,
            port=port_source,
        ),
    )


_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
