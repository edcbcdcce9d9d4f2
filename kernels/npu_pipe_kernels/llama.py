"""A decoder-only model in the Llama style on tensor-parallel layers. [Touvron et al. 2302.13971]

    layer       0          1 .. n        n+1
                embedding  blocks        norm, head
    tensor  ids BT    ->   SBD     ->    SBD    ->   this rank's logits TBV

Shapes: B batch, T sequence, S the part of it on this rank, D dim, H this rank's heads, G its heads
of keys and values, K dim of a head, M this rank's part of hidden, V of the vocabulary.

Names and weights are those of the unsplit model in `npu_pipe.train.model`; see `load_whole`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npu_pipe.errors import ConfigError
from npu_pipe_kernels.linear import ColumnParallelLinear, RowParallelLinear
from npu_pipe_kernels.norm import SharedRMSNorm
from npu_pipe_kernels.rotary import rotary, rotate
from npu_pipe_kernels.sharding import Sharding, share
from npu_pipe_kernels.vocabulary import VocabularyEmbedding

__all__ = ["Block", "Head", "LlamaConfig", "build_layers", "cut_whole", "load_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """kv_heads: heads of keys and values, each for an equal number of `heads`. recompute: keep only
    the input of a block, and run its forward again, with its transfers, for its backward."""

    dim: int
    blocks: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    eps: float = 1e-5
    rotary_base: float = 10000.0
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads) or self.heads % self.kv_heads:
            raise ConfigError(
                "heads share dim equally in pairs of numbers, and kv_heads share the heads equally",
                f"dim {self.dim}, heads {self.heads}, kv_heads {self.kv_heads}",
                "use a dim that is a multiple of 2 x heads, and kv_heads that divide heads",
            )


def build_layers(config: LlamaConfig, layers: Iterable[int], sharding: Sharding) -> nn.Sequential:
    """These layers as one module, not initialised: `load_whole` fills it."""
    return nn.Sequential(OrderedDict((str(i), _layer(config, i, sharding)) for i in layers))


def load_whole(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of the unsplit model's parameters, by name.

    Raises ConfigError where one is missing or of another shape.
    """
    with torch.no_grad():
        for name, own, part in _parts(module, whole):
            if own.shape != part.shape:
                raise ConfigError(
                    "the unsplit model has the sizes of the split one",
                    f"{name} is {tuple(part.shape)} on this rank, and should be {tuple(own.shape)}",
                    "build both with the same config",
                )
            own.copy_(part)


def cut_whole(module: nn.Module, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of values that go with the unsplit model's parameters, as gradients do."""
    return {name: part for name, _, part in _parts(module, whole)}


def _parts(
    module: nn.Module, whole: Mapping[str, Tensor]
) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
    for name, own in module.named_parameters():
        if name not in whole:
            raise ConfigError(
                "the unsplit model has the parameters of the split one",
                f"{name} is not among its {len(whole)}",
                "build both with the same config",
            )
        path, _, last = name.rpartition(".")
        cut = getattr(module.get_submodule(path), "cut", None)
        yield name, own, whole[name] if cut is None else cut(last, whole[name])


def _layer(config: LlamaConfig, layer: int, sharding: Sharding) -> nn.Module:
    if layer == 0:
        return VocabularyEmbedding(config.vocabulary, config.dim, sharding)
    return Block(config, sharding) if layer <= config.blocks else Head(config, sharding)


class Block(nn.Module):
    """x + attention(norm(x)), then + feed-forward(norm(x)): (S, B, D) -> (S, B, D)."""

    def __init__(self, config: LlamaConfig, sharding: Sharding) -> None:
        super().__init__()
        self.attention_norm = SharedRMSNorm(config.dim, sharding, eps=config.eps)
        self.attention = Attention(config, sharding)
        self.feed_forward_norm = SharedRMSNorm(config.dim, sharding, eps=config.eps)
        self.feed_forward = FeedForward(config, sharding)
        self._recompute = config.recompute

    def forward(self, x_sbd: Tensor) -> Tensor:
        if self._recompute and torch.is_grad_enabled():
            again: Tensor = checkpoint(
                self._run, x_sbd, use_reentrant=False, preserve_rng_state=False
            )
            return again
        return self._run(x_sbd)

    def _run(self, x_sbd: Tensor) -> Tensor:
        x_sbd = x_sbd + self.attention(self.attention_norm(x_sbd))
        out: Tensor = x_sbd + self.feed_forward(self.feed_forward_norm(x_sbd))
        return out


class Attention(nn.Module):
    """Causal, with rotary positions. Each rank has some of the heads, and all of the sequence."""

    def __init__(self, config: LlamaConfig, sharding: Sharding) -> None:
        super().__init__()
        width = config.dim // config.heads
        self.width = width
        self.base = config.rotary_base
        self.heads = share("heads", config.heads, sharding)
        self.kv_heads = share("heads of keys and values", config.kv_heads, sharding)
        parts = (config.dim, config.kv_heads * width, config.kv_heads * width)
        self.qkv = ColumnParallelLinear(config.dim, sum(parts), sharding, parts=parts)
        self.out = RowParallelLinear(config.dim, config.dim, sharding)

    def forward(self, x_sbd: Tensor) -> Tensor:
        heads, kv_heads = self.heads, self.kv_heads
        all_tbhk = self.qkv(x_sbd).unflatten(-1, (heads + 2 * kv_heads, self.width))
        q_bhtk, k_bgtk, v_bgtk = all_tbhk.permute(1, 2, 0, 3).split((heads, kv_heads, kv_heads), 1)
        cos_tk, sin_tk = rotary(q_bhtk, self.base)
        q_bhtk, k_bgtk = rotate(q_bhtk, cos_tk, sin_tk), rotate(k_bgtk, cos_tk, sin_tk)
        if kv_heads < heads:
            k_bgtk = k_bgtk.repeat_interleave(heads // kv_heads, 1)
            v_bgtk = v_bgtk.repeat_interleave(heads // kv_heads, 1)
        mixed_bhtk = F.scaled_dot_product_attention(q_bhtk, k_bgtk, v_bgtk, is_causal=True)
        out: Tensor = self.out(mixed_bhtk.permute(2, 0, 1, 3).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU. [Shazeer 2002.05202]"""

    def __init__(self, config: LlamaConfig, sharding: Sharding) -> None:
        super().__init__()
        parts = (config.hidden, config.hidden)
        self.gate_up = ColumnParallelLinear(config.dim, sum(parts), sharding, parts=parts)
        self.down = RowParallelLinear(config.hidden, config.dim, sharding)

    def forward(self, x_sbd: Tensor) -> Tensor:
        gate_tbm, up_tbm = self.gate_up(x_sbd).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate_tbm) * up_tbm)
        return out


class Head(nn.Module):
    """The last norm and the projection to this rank's logits, for `token_losses`."""

    def __init__(self, config: LlamaConfig, sharding: Sharding) -> None:
        super().__init__()
        self.norm = SharedRMSNorm(config.dim, sharding, eps=config.eps)
        self.projection = ColumnParallelLinear(config.dim, config.vocabulary, sharding)

    def forward(self, x_sbd: Tensor) -> Tensor:
        logits_tbv: Tensor = self.projection(self.norm(x_sbd))
        return logits_tbv
