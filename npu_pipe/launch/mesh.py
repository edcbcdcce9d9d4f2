"""Mesh: the ranks of a job along three axes: replicas of the data, the pipeline, tensors.

dp 2 x pp 2 x tp 2 on two nodes of four ranks:

             node 0          node 1        tp varies fastest: its ranks talk in every layer, so
    rank   0   1   2   3   4   5   6   7     they are neighbours on one node
    tp     0   1   0   1   0   1   0   1   then pp: the stages of one pipeline lie near
    pp     0   0   1   1   0   0   1   1   dp varies slowest: it talks once an update
    dp     0   0   0   0   1   1   1   1

Imports no torch; `npu_pipe.comm.axes` makes the process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from npu_pipe.errors import ConfigError
from npu_pipe.ir.schedule import Schedule
from npu_pipe.launch.world import World

__all__ = ["Axis", "Coordinates", "Mesh", "MeshRow", "check_nodes", "mesh_rows"]


class Axis(Enum):
    """An axis of the mesh, in the order in which its groups are made."""

    DP = "dp"
    PP = "pp"
    TP = "tp"


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank lies: of which replica, at which place of its pipeline, with which part of
    the matrices of its stages."""

    dp: int
    pp: int
    tp: int

    def along(self, axis: Axis) -> int:
        return {Axis.DP: self.dp, Axis.PP: self.pp, Axis.TP: self.tp}[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """dp x pp x tp ranks; rank = (dp * pp_size + pp) * tp_size + tp.

    Raises ConfigError unless each size is 1 or more.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in Axis:
            if self.size_along(axis) < 1:
                raise ConfigError(
                    f"mesh.{axis.value} is at least 1",
                    f"it is {self.size_along(axis)}",
                    f"give the number of ranks along {axis.value}, 1 for none",
                )

    @property
    def size(self) -> int:
        """All ranks."""
        return self.dp * self.pp * self.tp

    def size_along(self, axis: Axis) -> int:
        return {Axis.DP: self.dp, Axis.PP: self.pp, Axis.TP: self.tp}[axis]

    def coordinates(self, rank: int) -> Coordinates:
        """Of a rank, 0 <= rank < size."""
        assert 0 <= rank < self.size, rank
        rest, tp = divmod(rank, self.tp)
        dp, pp = divmod(rest, self.pp)
        return Coordinates(dp, pp, tp)

    def rank(self, at: Coordinates) -> int:
        """The rank at these coordinates."""
        return (at.dp * self.pp + at.pp) * self.tp + at.tp

    def ranks(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The group of `rank` along an axis, ascending: who differs from it there only."""
        at = self.coordinates(rank)
        name = axis.value
        return tuple(self.rank(replace(at, **{name: i})) for i in range(self.size_along(axis)))

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along an axis, by their first ranks."""
        return tuple(sorted({self.ranks(axis, rank) for rank in range(self.size)}))

    def axes(self, rank: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The groups of `rank`, by the names of their axes, in the order in which they are made."""
        return tuple((axis.value, self.ranks(axis, rank)) for axis in Axis)

    def check_world(self, world: World) -> None:
        """Raise ConfigError unless the world has as many ranks."""
        if world.size != self.size:
            told = f", says {world.sources.size}" if world.sources is not None else ""
            raise ConfigError(
                "a job runs on dp x pp x tp processes",
                f"the mesh has {self}, and {world.size} were started{told}",
                f"start {self.size}, or give a mesh of {world.size}",
            )

    def pipeline_world(self, world: World) -> World:
        """The world of this rank's pipeline: what `Pipeline` takes.

        Where the pipeline is not all of the job, torch.distributed has to be initialised first:
        see `npu_pipe.launch.group.join`.
        """
        self.check_world(world)
        if self.size == self.pp:
            return world
        return replace(
            world,
            rank=self.coordinates(world.rank).pp,
            size=self.pp,
            members=self.ranks(Axis.PP, world.rank),
        )

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis.value} {self.size_along(axis)}" for axis in Axis)
        return f"{sizes} = {self.size} ranks"


@dataclass(frozen=True, slots=True)
class MeshRow:
    """All that a rank is, for a table. stages: empty where no schedule is known."""

    rank: int
    node: int
    local_rank: int
    coordinates: Coordinates
    stages: tuple[int, ...]
    dp_group: tuple[int, ...]
    pp_group: tuple[int, ...]
    tp_group: tuple[int, ...]


def mesh_rows(
    mesh: Mesh, *, per_node: int | None = None, schedule: Schedule | None = None
) -> tuple[MeshRow, ...]:
    """A row a rank. per_node: ranks of a node; None for one node that has all of them."""
    per_node = per_node or mesh.size
    rows = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        rows.append(
            MeshRow(
                rank,
                *divmod(rank, per_node),
                at,
                () if schedule is None else tuple(schedule.stages_of(at.pp)),
                *(mesh.ranks(axis, rank) for axis in Axis),
            )
        )
    return tuple(rows)


def check_nodes(mesh: Mesh, *, per_node: int) -> Sequence[str]:
    """Raise ConfigError for a mesh that cannot run well on nodes of `per_node` ranks each.

    Returns what can run, but is worth a word: sentences of the form rule; facts; cure.
    """
    if per_node < 1 or (mesh.size > per_node and mesh.size % per_node):
        raise ConfigError(
            "all nodes have the same number of ranks",
            f"{mesh} do not fill nodes of {per_node}",
            "start as many ranks on each node, or give another mesh",
        )
    for group in mesh.groups(Axis.TP):
        if group[0] // per_node != group[-1] // per_node:
            raise ConfigError(
                "the ranks of a tp group are on one node: they talk in every layer",
                f"with {per_node} ranks a node, ranks {_listed(group)} of a tp group of {mesh.tp} "
                f"are on nodes {group[0] // per_node} and {group[-1] // per_node}",
                f"take a mesh.tp that divides {per_node}, or another number of ranks a node",
            )
    split = [
        group
        for group in mesh.groups(Axis.PP)
        if len({rank // per_node for rank in group}) > -(-mesh.pp * mesh.tp // per_node)
    ]
    if split:
        first, last = split[0][0] // per_node, split[0][-1] // per_node
        return [
            "a pipeline lies on as few nodes as hold it; "
            f"that of ranks {_listed(split[0])} lies on nodes {first} to {last}; "
            f"take pp x tp = {mesh.pp * mesh.tp} that divides {per_node}, or is a multiple of it"
        ]
    return []


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
