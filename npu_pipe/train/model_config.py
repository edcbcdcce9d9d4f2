"""The sizes of the model, and what its layers cost. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from npu_pipe.errors import ConfigError
from npu_pipe.train.bounds import at_least, between
from npu_pipe.train.precision import Precision

__all__ = ["ModelConfig", "check_model", "layer_flops", "layer_parameters"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model over bytes; its layers are embedding, blocks, head."""

    dim: int = 128
    """Width of the residual stream."""
    blocks: int = 8
    """Transformer blocks between embedding and head."""
    heads: int = 4
    """Attention heads; they share dim equally."""
    kv_heads: int | None = None
    """Heads of keys and values, each for an equal number of heads; as many as heads if left out."""
    hidden: int = 352
    """Width inside the SwiGLU feed-forward."""
    experts: int = 1
    """Feed-forwards of a block, among which a router chooses for each token."""
    experts_per_token: int = 1
    """How many of them a token goes through."""
    vocabulary: int = 256
    """Token ids; 256 for bytes."""
    rotary_base: float = 10000.0
    """Of the angles that tell positions; larger for long sequences."""
    recompute: bool = False
    """Keep only the input of a block, and run its forward again for its backward."""
    precision: Annotated[Precision, tyro.conf.EnumChoicesFromValues] = Precision.FLOAT32
    """What layers compute in, and what crosses boundaries: float32 or bfloat16. Parameters,
    gradients, optimizer and loss are float32 in both."""

    @property
    def layers(self) -> int:
        """Pieces that stages can be cut from: the embedding, the blocks, the head."""
        return self.blocks + 2

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(layer_parameters(self))

    @property
    def kv_dim(self) -> int:
        """Width of all keys of a token; its values are as wide."""
        return self.dim // self.heads * (self.kv_heads or self.heads)

    @property
    def router(self) -> int:
        """Numbers that choose experts: none where there is one."""
        return self.dim * self.experts if self.experts > 1 else 0


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for sizes of which no model can be made."""
    between(
        1,
        2**20,
        model__dim=config.dim,
        model__heads=config.heads,
        model__hidden=config.hidden,
    )
    between(1, 4096, model__blocks=config.blocks, model__experts=config.experts)
    between(256, 2**24, model__vocabulary=config.vocabulary)
    between(1, config.experts, model__experts_per_token=config.experts_per_token)
    at_least(1, model__rotary_base=config.rotary_base)
    if config.dim % (2 * config.heads):
        step = 2 * config.heads
        raise ConfigError(
            "heads share model.dim equally, and rotary positions pair the numbers of a head",
            f"model.dim {config.dim} is not a multiple of 2 x model.heads = {step}",
            f"use model.dim = {-(-config.dim // step) * step}, or other heads",
        )
    kv_heads = config.heads if config.kv_heads is None else config.kv_heads
    if kv_heads < 1 or config.heads % kv_heads:
        raise ConfigError(
            "each head of keys and values serves an equal number of heads",
            f"model.heads {config.heads} is not a multiple of model.kv_heads {kv_heads}",
            "use model.kv_heads that divide model.heads, or leave them out",
        )


def layer_parameters(config: ModelConfig, *, tp: int = 1) -> tuple[int, ...]:
    """Per layer, how many numbers are trained on each of the `tp` ranks that share it."""
    attention = 2 * config.dim**2 + 2 * config.dim * config.kv_dim
    feed_forward = 3 * config.dim * config.hidden * config.experts + config.router
    block = (attention + feed_forward) // tp + 2 * config.dim
    words = config.vocabulary * config.dim // tp
    return (words, *(block,) * config.blocks, words + config.dim)


def layer_flops(config: ModelConfig, sequence: int) -> tuple[float, ...]:
    """Per layer, the floating-point operations of one token's forward, for `partition`.

    sequence: tokens that attention looks back over, half of them on average.
    Matrix products count 2 x rows x columns; an embedding only copies.
    """
    attention = 2 * 2 * config.dim * (sequence / 2)
    products = 2 * config.dim**2 + 2 * config.dim * config.kv_dim + config.router
    products += 3 * config.dim * config.hidden * config.experts_per_token
    block = 2 * products + attention
    head = 2 * config.dim * config.vocabulary
    return (float(config.dim), *(block,) * config.blocks, float(head))
