"""The number of tiles for each boundary, of what its products and its wire take here.

    stages, link = tiled(stages, schedule=schedule, tiles=Measured(rows=4096))

    products    whole, and in many tiles: on each rank, by itself
    wire        a value, and a word: one pair of ranks after the other, the way of training

It takes a few products and transfers of that size, once, before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from npu_pipe.comm.team import Team
from npu_pipe.comm.team_link import TeamLink
from npu_pipe.comm.trial import Amounts, try_pairs
from npu_pipe.device.choose import device_of
from npu_pipe.errors import ConfigError
from npu_pipe.ops.tile_costs import TileCosts, best_tiles
from npu_pipe.runtime.record import now_us
from npu_pipe_kernels.boundary_layer import Ends

__all__ = ["Measured", "measured_tiles"]

_REPEATS = 5
_WORD_BYTES = 64
_WORDS = Amounts(words=20, messages=32, message_bytes=_WORD_BYTES)


@dataclass(frozen=True, slots=True)
class Measured:
    """rows: of a value at a boundary, over all its dimensions but the last. most: tiles. dtype: of
    the products, where autocast has another than their weights.

    Raises ConfigError for less than one of either.
    """

    rows: int
    most: int = 32
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "most"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    "a value has one row or more, and crosses a boundary in one tile or more",
                    f"{name} is {getattr(self, name)}",
                    "give the rows of a microbatch, and how many tiles may be tried",
                )


class _Product(NamedTuple):
    """is_made: of what crosses the boundary, or of what has crossed it. whole_us: in one piece.
    tile_us: what a tile costs beyond its share. value_bytes: of what crosses."""

    boundary: int
    is_made: bool
    whole_us: float
    tile_us: float
    value_bytes: int


def measured_tiles(
    asked: Measured,
    pairs: Mapping[int, tuple[int, int]],
    ends: Mapping[int, Ends],
    *,
    team: Team,
    link: TeamLink,
) -> dict[int, int]:
    """By the stage before a boundary; collective, and the same on every rank.

    pairs: the ranks on both sides of each boundary. ends: of this rank's stages. link: of training.
    Raises PeerError when a rank fails meanwhile.
    """
    with team.unbroken():
        mine = [
            _product(asked, boundary, layer, is_made=is_made)
            for boundary in pairs
            for stage, is_made in ((boundary, True), (boundary + 1, False))
            if (layer := _layer(ends.get(stage), is_made=is_made)) is not None
        ]
    places = [layer.weight.device for each in ends.values() for layer in each if layer is not None]
    kind = places[0].type if places else None
    answers = team.gather({"products": mine, "kind": kind})
    kinds = {answer["kind"] for answer in answers} - {None}
    place = places[0] if places else torch.device(kinds.pop())
    products = [_Product(*each) for answer in answers for each in answer["products"]]
    largest = max(each.value_bytes for each in products)
    wires = _wires(
        sorted({(min(pair), max(pair)) for pair in pairs.values()}),
        largest,
        place,
        team=team,
        link=link,
    )
    steps = [1 << power for power in range(asked.most.bit_length())]
    return {
        boundary: best_tiles(
            _costs(
                [each for each in products if each.boundary == boundary],
                wires[min(pair), max(pair)],
            ),
            most=asked.most,
            steps=steps,
        )
        for boundary, pair in pairs.items()
    }


def _layer(ends: Ends | None, *, is_made: bool) -> nn.Linear | None:
    if ends is None:
        return None
    return ends.after if is_made else ends.before


def _product(asked: Measured, boundary: int, layer: nn.Linear, *, is_made: bool) -> _Product:
    weight = layer.weight.detach().to(asked.dtype or layer.weight.dtype)
    x = weight.new_ones(asked.rows, layer.in_features)
    device = device_of(x.device)

    def took_us(tiles: int) -> float:
        parts = x.tensor_split(tiles)
        times = []
        for _ in range(_REPEATS + 1):
            device.synchronize()
            start_us = now_us()
            for part in parts:
                F.linear(part, weight)
            device.synchronize()
            times.append(now_us() - start_us)
        return median(times[1:])

    whole_us, many_us = took_us(1), took_us(asked.most)
    width = layer.out_features if is_made else layer.in_features
    tile_us = max(0.0, many_us - whole_us) / asked.most
    return _Product(boundary, is_made, whole_us, tile_us, asked.rows * width * x.element_size())


class _Wire(NamedTuple):
    """Between two ranks, the mean of both ways. word_us: what a message takes beyond its bytes."""

    latency_us: float
    word_us: float
    bytes_per_us: float


def _wires(
    pairs: Sequence[tuple[int, int]],
    value_bytes: int,
    place: torch.device,
    *,
    team: Team,
    link: TeamLink,
) -> dict[tuple[int, int], _Wire]:
    hosts = [""] * team.size
    values = Amounts(words=1, messages=4, message_bytes=max(value_bytes, _WORD_BYTES))
    words, wholes = (
        try_pairs(team, link, pairs, place=place, hosts=hosts, amounts=amounts)
        for amounts in (_WORDS, values)
    )
    return {
        (word.low, word.high): _Wire(
            latency_us=word.latency_us,
            word_us=_WORD_BYTES / fmean((word.down, word.up)),
            bytes_per_us=fmean((whole.down, whole.up)),
        )
        for word, whole in zip(words, wholes, strict=True)
    }


def _costs(products: Sequence[_Product], wire: _Wire) -> TileCosts:
    """A side without such a layer takes its part in one piece, however many tiles there are."""
    made, used = (
        [each for each in products if each.is_made is is_made] for is_made in (True, False)
    )
    return TileCosts(
        made_us=max((each.whole_us for each in made), default=0.0),
        used_us=max((each.whole_us for each in used), default=0.0),
        latency_us=max(wire.latency_us - wire.word_us, 0.0),
        wire_us=max(each.value_bytes for each in products) / wire.bytes_per_us,
        made_tile_us=max((each.tile_us for each in made), default=0.0),
        used_tile_us=max((each.tile_us for each in used), default=0.0),
        wire_tile_us=wire.word_us,
    )
