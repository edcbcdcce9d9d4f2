"""The model is the same however it is cut, sees no later token, and starts near uniform."""

from __future__ import annotations

import math

import pytest
import torch

from npu_pipe.partition.partition import partition
from npu_pipe.train.model import build_model, build_stage, token_loss
from npu_pipe.train.model_config import ModelConfig, layer_flops

SMALL = ModelConfig(dim=16, blocks=6, heads=2, hidden=24)


def ids(batch: int = 2, sequence: int = 12) -> torch.Tensor:
    return torch.randint(256, (batch, sequence), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_the_parts_are_the_whole(stages: int) -> None:
    whole = build_model(SMALL, seed=5)
    cut = partition(layer_flops(SMALL, 12), stages=stages)
    parts = [build_stage(SMALL, layers, seed=5) for layers in cut]
    named = {name: p for part in parts for name, p in part.named_parameters()}
    assert list(named) == [name for name, _ in whole.named_parameters()]
    assert all(torch.equal(named[name], p) for name, p in whole.named_parameters())
    value = ids()
    for part in parts:
        value = part(value)
    assert torch.equal(value, whole(ids()))


def test_shapes_along_the_way() -> None:
    embedding, rest, head = (build_stage(SMALL, part, seed=0) for part in ((0,), (1, 2), (7,)))
    x = embedding(ids(3, 5))
    assert x.shape == (3, 5, 16)
    assert rest(x).shape == (3, 5, 16)
    assert head(x).shape == (3, 5, 256)


def test_the_config_knows_the_number_of_parameters() -> None:
    assert sum(p.numel() for p in build_model(SMALL, seed=0).parameters()) == SMALL.parameters


def test_layers_and_seeds_have_their_own_numbers() -> None:
    first, second = (build_model(SMALL, seed=seed).state_dict() for seed in (0, 1))
    name = "{}.attention.qkv.weight"
    assert not torch.equal(first[name.format(1)], first[name.format(2)])
    assert not torch.equal(first[name.format(1)], second[name.format(1)])


def test_building_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    build_model(SMALL, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_no_token_sees_a_later_one() -> None:
    model = build_model(SMALL, seed=0).double()
    tokens = ids()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_attention_goes_by_distance_and_not_by_place() -> None:
    """Rotary positions: a repeated sequence looks the same to a token that sees only itself."""
    block = build_stage(SMALL, (1,), seed=0).double()
    one = torch.randn(1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    repeated = block(one.expand(1, 6, 16))
    torch.testing.assert_close(repeated, repeated[:, :1].expand(1, 6, 16))
    other = torch.randn(1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    near = block(torch.cat([one, other, other, other, one], dim=1))[:, -1]
    far = block(torch.cat([other, other, other, one, one], dim=1))[:, -1]
    assert not torch.allclose(near, far), "the order of what came before matters"


def test_the_first_guess_is_close_to_uniform_and_everything_gets_a_gradient() -> None:
    model = build_model(SMALL, seed=0)
    tokens = ids(4, 33)
    loss = token_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)
    loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_float64_is_float64_throughout() -> None:
    assert build_model(SMALL, seed=0).double()(ids()).dtype == torch.float64
