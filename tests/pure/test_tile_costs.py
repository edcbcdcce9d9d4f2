"""How many tiles: the formula against a play tile by tile, the choice against trying all."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_pipe.errors import ConfigError
from npu_pipe.ops.tile_costs import TileCosts, best_tiles, fitted, hidden_share, tiled_us

US = st.one_of(st.just(0.0), st.floats(0.5, 5000))
COSTS = st.builds(
    TileCosts,
    made_us=US,
    used_us=US,
    latency_us=US,
    wire_us=US,
    made_tile_us=US,
    used_tile_us=US,
    wire_tile_us=US,
    own_us=US,
)
EVEN = TileCosts(made_us=1000, used_us=1000, latency_us=100, wire_us=800)


def played_us(costs: TileCosts, tiles: int, *, own_first: bool) -> float:
    """Tile by tile: made, sent when the wire is free, used when it is there; own rows before the
    others are used, or after they are made."""
    made = wire = 0.0
    used = costs.own_us if own_first else 0.0
    for _ in range(tiles):
        made += costs.made_us / tiles + costs.made_tile_us
        wire = max(made, wire) + costs.wire_us / tiles + costs.wire_tile_us
        used = max(wire + costs.latency_us, used) + costs.used_us / tiles + costs.used_tile_us
    return used if own_first else max(used, made + costs.own_us)


@given(costs=COSTS, tiles=st.integers(1, 60))
def test_the_time_between_stages_is_that_of_playing_it(costs: TileCosts, tiles: int) -> None:
    costs = replace(costs, own_us=0)
    assert math.isclose(tiled_us(costs, tiles), played_us(costs, tiles, own_first=True))


@given(costs=COSTS, tiles=st.integers(1, 60))
def test_the_time_of_a_gathering_product_is_that_of_playing_it(
    costs: TileCosts, tiles: int
) -> None:
    costs = replace(costs, made_us=0, made_tile_us=0)
    assert math.isclose(tiled_us(costs, tiles), played_us(costs, tiles, own_first=True))


@given(costs=COSTS, tiles=st.integers(1, 60))
def test_the_time_of_a_scattering_product_is_that_of_playing_it(
    costs: TileCosts, tiles: int
) -> None:
    costs = replace(costs, used_us=0, used_tile_us=0)
    assert math.isclose(tiled_us(costs, tiles), played_us(costs, tiles, own_first=False))


@given(costs=COSTS, most=st.integers(1, 200))
def test_no_other_number_of_tiles_is_faster(costs: TileCosts, most: int) -> None:
    best = min(tiled_us(costs, tiles) for tiles in range(1, most + 1))
    found = best_tiles(costs, most=most)
    assert 1 <= found <= most
    assert math.isclose(tiled_us(costs, found), best, rel_tol=1e-12)


@given(costs=COSTS, most=st.integers(1, 100))
def test_of_given_steps_the_best_is_taken(costs: TileCosts, most: int) -> None:
    steps = [2**n for n in range(8)]
    found = best_tiles(costs, most=most, steps=steps)
    assert found in steps
    assert found <= most
    assert tiled_us(costs, found) == min(tiled_us(costs, n) for n in steps if n <= most)


def test_tiles_that_cost_nothing_are_as_many_as_can_be() -> None:
    assert best_tiles(EVEN, most=77) == 77


def test_a_value_that_takes_no_time_on_the_wire_is_not_cut() -> None:
    """Only the latency is left, and that is the same for one tile as for many."""
    nothing_to_hide = TileCosts(made_us=0, used_us=1000, latency_us=500, wire_us=0, used_tile_us=1)
    assert best_tiles(nothing_to_hide, most=64) == 1


def test_dearer_tiles_are_fewer() -> None:
    found = [
        best_tiles(replace(EVEN, made_tile_us=each, used_tile_us=each), most=10**6)
        for each in (0.1, 1, 10, 100, 1000)
    ]
    assert found == sorted(found, reverse=True)
    assert found[0] > 100
    assert found[-1] == 1


@given(costs=COSTS, tile_us=st.floats(1, 500), tiles=st.integers(2, 64))
def test_what_a_tile_costs_is_found_from_one_run(
    costs: TileCosts, tile_us: float, tiles: int
) -> None:
    known = replace(costs, made_us=100, used_us=70, made_tile_us=tile_us, used_tile_us=tile_us)
    found = fitted(known, tiles=tiles, took_us=tiled_us(known, tiles))
    assert math.isclose(tiled_us(found, tiles), tiled_us(known, tiles), rel_tol=1e-9)
    if known.own_us == known.wire_us == 0:
        assert math.isclose(found.made_tile_us, tile_us, rel_tol=1e-6)


def test_a_run_that_is_faster_than_it_can_be_makes_tiles_free() -> None:
    assert fitted(EVEN, tiles=8, took_us=1) == EVEN


def test_the_share_that_hides_is_counted_from_the_two_products() -> None:
    assert hidden_share(EVEN, tiled_us(EVEN, 1)) == pytest.approx(0)
    assert hidden_share(EVEN, EVEN.made_us + EVEN.used_us) == pytest.approx(1)
    assert hidden_share(replace(EVEN, latency_us=0, wire_us=0), 1e4) == 1


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=f"wire_us is {value}"):
        replace(EVEN, wire_us=value)
