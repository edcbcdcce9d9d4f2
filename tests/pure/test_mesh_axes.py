"""The mesh of a job: coordinates, groups along each axis, and nodes."""

from __future__ import annotations

from itertools import product

import pytest

from npu_pipe import build_schedule
from npu_pipe.errors import ConfigError
from npu_pipe.launch.mesh import Axis, Coordinates, Mesh, check_nodes, mesh_rows
from npu_pipe.launch.world import Launcher, World

SIZES = list(product((1, 2, 3), (1, 2, 4), (1, 2, 4)))


def world(rank: int, size: int) -> World:
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        address="127.0.0.1",
        port=1,
        launcher=Launcher.TORCHRUN,
    )


def test_the_ranks_of_the_picture() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert [mesh.coordinates(rank) for rank in (0, 1, 2, 5)] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(1, 0, 1),
    ]
    assert mesh.ranks(Axis.TP, 5) == (4, 5)
    assert mesh.ranks(Axis.PP, 5) == (5, 7)
    assert mesh.ranks(Axis.DP, 5) == (1, 5)
    assert mesh.groups(Axis.PP) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert str(mesh) == "dp 2 x pp 2 x tp 2 = 8 ranks"


@pytest.mark.parametrize(("dp", "pp", "tp"), SIZES)
def test_coordinates_and_ranks_are_one_to_one_and_groups_share_out_all_ranks(
    dp: int, pp: int, tp: int
) -> None:
    mesh = Mesh(dp=dp, pp=pp, tp=tp)
    everybody = list(range(mesh.size))
    assert [mesh.rank(mesh.coordinates(rank)) for rank in everybody] == everybody
    assert len({mesh.coordinates(rank) for rank in everybody}) == mesh.size == dp * pp * tp
    for axis in Axis:
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == everybody
        for rank in everybody:
            group = mesh.ranks(axis, rank)
            assert group in groups
            assert list(group) == sorted(group)
            assert group[mesh.coordinates(rank).along(axis)] == rank
            assert len(group) == mesh.size_along(axis)
            for other in group:
                same = [a for a in Axis if a is not axis]
                for a in same:
                    assert mesh.coordinates(other).along(a) == mesh.coordinates(rank).along(a)


@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_an_axis_has_a_rank_at_least(axis: str) -> None:
    with pytest.raises(ConfigError, match=f"mesh.{axis} is at least 1; it is 0"):
        Mesh(**{"pp": 2, axis: 0})


def test_the_pipeline_of_a_rank_is_its_world() -> None:
    mesh = Mesh(dp=2, pp=2, tp=2)
    mine = mesh.pipeline_world(world(7, 8))
    assert (mine.rank, mine.size, mine.members, mine.local_rank) == (1, 2, (5, 7), 7)
    alone = world(1, 4)
    assert Mesh(pp=4).pipeline_world(alone) is alone


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"dp 2 x pp 2 x tp 1 = 4 ranks, and 2 were started"):
        Mesh(dp=2, pp=2).pipeline_world(world(0, 2))


@pytest.mark.parametrize("per_node", [1, 2, 6])
def test_a_tp_group_that_straddles_nodes_is_refused(per_node: int) -> None:
    mesh = Mesh(dp=3, pp=2, tp=4)
    assert check_nodes(mesh, per_node=4) == []
    with pytest.raises(ConfigError, match="the ranks of a tp group are on one node") as refusal:
        check_nodes(mesh, per_node=per_node)
    assert f"a mesh.tp that divides {per_node}" in refusal.value.cure


def test_nodes_that_are_not_filled_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fill nodes of 4"):
        check_nodes(Mesh(dp=3, pp=2), per_node=4)


def test_a_pipeline_on_more_nodes_than_need_be_is_worth_a_word() -> None:
    assert check_nodes(Mesh(dp=2, pp=4), per_node=8) == []
    assert check_nodes(Mesh(dp=2, pp=8), per_node=4) == []
    (word,) = check_nodes(Mesh(dp=4, pp=3), per_node=4)
    assert "ranks 3, 4, 5 lies on nodes 0 to 1" in word


def test_the_table_tells_all_that_a_rank_is() -> None:
    schedule = build_schedule("interleaved-1f1b", ranks=2, microbatches=2, chunks=2)
    rows = mesh_rows(Mesh(dp=2, pp=2, tp=2), per_node=4, schedule=schedule)
    row = rows[6]
    assert (row.rank, row.node, row.local_rank) == (6, 1, 2)
    assert row.coordinates == Coordinates(1, 1, 0)
    assert row.stages == (1, 3)
    assert (row.dp_group, row.pp_group, row.tp_group) == ((2, 6), (4, 6), (6, 7))
    assert [r.stages for r in mesh_rows(Mesh(pp=2))] == [(), ()]
