"""The tensor-parallel layers by themselves: one rank, which is the unsplit layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npu_pipe.errors import ConfigError, DataError
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.ranks import Ranks
from npu_pipe.train.model import build_model
from npu_pipe.train.model_config import ModelConfig
from npu_pipe_kernels.accumulate import add_product, weight_gradient
from npu_pipe_kernels.linear import ColumnParallelLinear, RowParallelLinear
from npu_pipe_kernels.llama import LlamaConfig, build_layers, load_whole
from npu_pipe_kernels.norm import SharedRMSNorm
from npu_pipe_kernels.sharding import Sequence, Sharding
from npu_pipe_kernels.vocabulary import IGNORED, VocabularyEmbedding, token_losses

CPU = torch.device("cpu")
ONE = Ranks.single(CPU)
ALONE = Sharding(Operators(ONE, []))
PAIR = Sharding(Operators(Ranks(group=None, rank=1, size=2, place=CPU), []))


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("targets", ["all", "some ignored", "none"])
def test_cross_entropy_and_its_gradient_are_torchs(targets: str) -> None:
    logits = drawn(5, 3, 11).requires_grad_()
    wanted = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(1))
    wanted[:1] = IGNORED if targets == "some ignored" else wanted[:1]
    wanted[:] = IGNORED if targets == "none" else wanted
    losses = token_losses(logits, wanted, ONE)
    theirs = logits.detach().clone().requires_grad_()
    plain = F.cross_entropy(theirs.permute(1, 2, 0), wanted, reduction="none")
    assert torch.allclose(losses, plain, rtol=1e-12, atol=1e-12)
    (losses * 3).sum().backward()
    (plain * 3).sum().backward()
    assert torch.allclose(logits.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_cross_entropy_of_half_precision_is_computed_in_float32() -> None:
    logits = drawn(4, 2, 300, dtype=torch.float32).mul(20).bfloat16().requires_grad_()
    wanted = torch.randint(300, (2, 4), generator=torch.Generator().manual_seed(1))
    losses = token_losses(logits, wanted, ONE)
    assert losses.dtype == torch.float32
    plain = F.cross_entropy(logits.detach().float().permute(1, 2, 0), wanted, reduction="none")
    assert torch.allclose(losses, plain, rtol=1e-6, atol=1e-6)
    losses.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("bad", [-1, 11])
def test_ids_and_targets_outside_the_vocabulary_are_refused(bad: int) -> None:
    ids = torch.tensor([[1, bad]])
    with pytest.raises(DataError, match=f"targets are tokens .* 0 to 10; there is {bad}; "):
        token_losses(torch.zeros(2, 1, 11), ids, ONE)
    with pytest.raises(DataError, match=f"ids are tokens .* 0 to 10; there is {bad}; "):
        VocabularyEmbedding(11, 4, ALONE)(ids)


def test_a_sequence_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(DataError, match="3 rows on 2 ranks; pad the sequence"):
        VocabularyEmbedding(10, 4, PAIR)(torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(DataError, match="3 rows on 2 ranks; pad the sequence"):
        RowParallelLinear(4, 6, PAIR)(torch.zeros(3, 2, 2))


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    for make, what in (
        (lambda: ColumnParallelLinear(4, 5, PAIR), "outputs of a layer equally; 5 on 2 ranks"),
        (lambda: RowParallelLinear(5, 4, PAIR), "inputs of a layer equally; 5 on 2 ranks; use 6"),
        (lambda: VocabularyEmbedding(5, 4, PAIR), "vocabulary equally; 5 on 2 ranks"),
        (lambda: ColumnParallelLinear(4, 6, PAIR, parts=(3, 3)), "3 on 2 ranks; use 4"),
        (lambda: ColumnParallelLinear(4, 6, PAIR, parts=(2, 2)), r"2 \+ 2 is not 6"),
    ):
        with pytest.raises(ConfigError, match=what):
            make()


def test_heads_and_names_that_do_not_fit_are_refused() -> None:
    sizes = {"blocks": 1, "hidden": 8, "vocabulary": 16}
    with pytest.raises(ConfigError, match="dim 10, heads 4, kv_heads 4"):
        LlamaConfig(dim=10, heads=4, kv_heads=4, **sizes)
    with pytest.raises(ConfigError, match="heads of keys and values equally; 1 on 2 ranks"):
        build_layers(LlamaConfig(dim=8, heads=2, kv_heads=1, **sizes), [1], PAIR)
    module = build_layers(LlamaConfig(dim=8, heads=2, kv_heads=2, **sizes), [0], ALONE)
    with pytest.raises(ConfigError, match=r"0\.weight is not among its 0"):
        load_whole(module, {})
    with pytest.raises(ConfigError, match=r"0\.weight is \(3, 8\) on this rank, and .* \(16, 8\)"):
        load_whole(module, {"0.weight": torch.zeros(3, 8)})


def test_fewer_heads_of_keys_and_values_are_as_if_repeated() -> None:
    sizes = {"dim": 16, "blocks": 1, "heads": 4, "hidden": 8, "vocabulary": 16}
    few = build_layers(LlamaConfig(kv_heads=2, **sizes), [1], ALONE).double()
    many = build_layers(LlamaConfig(kv_heads=4, **sizes), [1], ALONE).double()
    values = {n: drawn(*p.shape, seed=i) / 4 for i, (n, p) in enumerate(few.named_parameters())}
    load_whole(few, values)
    query, *others = values["1.attention.qkv.weight"].split([16, 8, 8])
    twice = [each.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for each in others]
    load_whole(many, values | {"1.attention.qkv.weight": torch.cat([query, *twice])})
    x = drawn(6, 2, 16)
    assert torch.allclose(few(x), many(x), rtol=1e-12)


def test_alone_it_is_the_model_of_train() -> None:
    config = ModelConfig(dim=16, blocks=2, heads=2, hidden=24)
    whole = build_model(config, seed=1).double()
    sizes = {"dim": 16, "blocks": 2, "heads": 2, "kv_heads": 2, "hidden": 24, "vocabulary": 256}
    module = build_layers(LlamaConfig(**sizes), range(config.layers), ALONE).double()
    load_whole(module, dict(whole.named_parameters()))
    ids = torch.randint(256, (3, 7), generator=torch.Generator().manual_seed(1))
    ours, theirs = module(ids).transpose(0, 1), whole(ids)
    assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_the_norm_and_its_gradients_are_torchs() -> None:
    ours, theirs = SharedRMSNorm(5, ALONE, eps=1e-3).double(), nn.RMSNorm(5, eps=1e-3).double()
    with torch.no_grad():
        ours.weight.copy_(drawn(5, seed=2))
        theirs.weight.copy_(ours.weight)
    found = []
    for norm in (ours, theirs):
        x = drawn(4, 3, 5).requires_grad_()
        y = norm(x)
        y.backward(drawn(4, 3, 5, seed=1))
        found.append((y, x.grad, norm.weight.grad))
    for our, their in zip(*found, strict=True):
        assert torch.allclose(our, their, rtol=1e-10)


def test_autocast_reaches_the_products() -> None:
    layer = ColumnParallelLinear(4, 6, ALONE, bias=True)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.ones(2, 3, 4))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


def test_autocast_leaves_float64_as_it_does_in_torch() -> None:
    layer = ColumnParallelLinear(4, 6, ALONE, bias=True).double()
    load = {"weight": drawn(6, 4), "bias": drawn(6, seed=1)}
    load_whole(layer, load)
    x = drawn(2, 3, 4, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(layer(x), F.linear(x, *load.values()), rtol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_under_activation_checkpointing_have_the_same_gradients(reentrant: bool) -> None:
    """Which lets a backward read what was saved once only; the linear layers did so twice."""
    sizes = {"dim": 16, "blocks": 1, "heads": 4, "kv_heads": 2, "hidden": 8, "vocabulary": 16}
    modules = build_layers(LlamaConfig(**sizes), [0, 1, 2], ALONE).double()
    biased = nn.Sequential(
        *(make(16, 16, ALONE, bias=True) for make in (ColumnParallelLinear, RowParallelLinear))
    ).double()
    ranks = Sharding(ALONE.operators, Sequence.WHOLE)
    biased.extend(make(16, 16, ranks) for make in (ColumnParallelLinear, RowParallelLinear))
    biased.double()
    parameters = [*modules.parameters(), *biased.parameters()]
    for seed, parameter in enumerate(parameters):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    ids = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(1))

    def run(x: Tensor) -> Tensor:
        return token_losses(modules[2](biased(modules[1](x))), ids, ONE)

    found = []
    for given in (run, lambda x: checkpoint(run, x, use_reentrant=reentrant)):
        loss = given(modules[0](ids)).mean()
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        found.append([parameter.grad for parameter in parameters])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_weight_gradients_are_added_to_main_grad() -> None:
    weight = nn.Parameter(drawn(3, 4, dtype=torch.bfloat16))
    weight.main_grad = torch.ones(3, 4)
    gradient, x = drawn(5, 3, dtype=torch.bfloat16), drawn(5, 4, seed=1, dtype=torch.bfloat16)
    assert weight_gradient(weight, gradient, x) is None
    assert torch.allclose(weight.main_grad, 1 + gradient.float().t() @ x.float())
    assert weight.grad is None


@pytest.mark.parametrize("around", ["autocast", "checkpoint", "both"])
def test_main_grad_is_found_where_the_weight_is_seen_as_another_tensor(around: str) -> None:
    """Cast for autocast, and detached by checkpointing: the gradient went to `.grad` instead."""
    layer = ColumnParallelLinear(4, 3, ALONE)
    load_whole(layer, {"weight": drawn(3, 4)})
    layer.weight.main_grad = torch.zeros(3, 4)
    x = torch.ones(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=around != "checkpoint"):
        y = layer(x) if around == "autocast" else checkpoint(layer, x, use_reentrant=False)
    y.float().sum().backward()
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.main_grad, torch.full((3, 4), 2.0))


def test_autocast_keeps_no_copy_of_the_weight_for_each_microbatch() -> None:
    layer = ColumnParallelLinear(64, 64, ALONE)
    nn.init.ones_(layer.weight)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        outputs = [layer(torch.ones(1, 64)) for _ in range(5)]
    assert len(outputs) == 5
    assert sum(kept.values()) == layer.weight.nbytes + 5 * 64 * 2


def test_weight_gradients_are_added_to_a_grad_in_float32() -> None:
    """The sum of many small ones is kept, which bfloat16 would lose."""
    layer = ColumnParallelLinear(4, 3, ALONE).bfloat16()
    nn.init.ones_(layer.weight)
    layer.weight.grad_dtype = torch.float32
    for _ in range(300):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 300.0))


def test_a_hook_on_a_weight_still_sees_its_gradient() -> None:
    layer = ColumnParallelLinear(4, 3, ALONE).bfloat16()
    nn.init.ones_(layer.weight)
    layer.weight.grad_dtype = torch.float32
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert len(seen) == 1
    assert torch.equal(layer.weight.grad, torch.ones(3, 4))


def test_float32_products_are_added_exactly_as_addmm_does() -> None:
    place = drawn(3, 4, dtype=torch.float32)
    gradient, x = drawn(5, 3, dtype=torch.float32), drawn(5, 4, seed=1, dtype=torch.float32)
    wanted = torch.addmm(place, gradient.t(), x)
    add_product(place, gradient, x)
    assert torch.equal(place, wanted)


MINDSPEED = """
import torch, sys
from npu_pipe_kernels import accumulate
calls = []
found = accumulate._mindspeed()
assert found is not None
found(torch.ones(2, 4), torch.ones(2, 3), torch.zeros(3, 4))
"""


@pytest.mark.timeout(60)
def test_mindspeeds_kernel_is_found_where_it_is_installed(tmp_path: Path) -> None:
    """A stand-in with its name; on an NPU it gets (input, gradient, main_grad)."""
    folder = tmp_path / "mindspeed" / "ops"
    folder.mkdir(parents=True)
    (folder / "npu_matmul_add.py").write_text(
        "def npu_matmul_add_fp32(total_input, grad, main_grad):\n"
        "    assert (total_input.shape, grad.shape) == ((2, 4), (2, 3))\n"
        "    print('called', tuple(main_grad.shape))\n"
    )
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{MINDSPEED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "called (3, 4)\n"
