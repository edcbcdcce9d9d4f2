"""The sizes of the model, and what its layers cost. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from npu_pipe.errors import ConfigError
from npu_pipe.train.bounds import between

__all__ = ["ModelConfig", "check_model", "layer_flops"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model over bytes; its layers are embedding, blocks, head."""

    dim: int = 128
    """Width of the residual stream."""
    blocks: int = 8
    """Transformer blocks between embedding and head."""
    heads: int = 4
    """Attention heads; they share dim equally."""
    hidden: int = 352
    """Width inside the SwiGLU feed-forward."""
    vocabulary: int = 256
    """Token ids; 256 for bytes."""

    @property
    def layers(self) -> int:
        """Pieces that stages can be cut from: the embedding, the blocks, the head."""
        return self.blocks + 2

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        block = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return self.blocks * block + 2 * self.vocabulary * self.dim + self.dim


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for sizes of which no model can be made."""
    between(
        1,
        2**20,
        model__dim=config.dim,
        model__heads=config.heads,
        model__hidden=config.hidden,
    )
    between(1, 4096, model__blocks=config.blocks)
    between(256, 2**24, model__vocabulary=config.vocabulary)
    if config.dim % (2 * config.heads):
        step = 2 * config.heads
        raise ConfigError(
            "heads share model.dim equally, and rotary positions pair the numbers of a head",
            f"model.dim {config.dim} is not a multiple of 2 x model.heads = {step}",
            f"use model.dim = {-(-config.dim // step) * step}, or other heads",
        )


def layer_flops(config: ModelConfig, sequence: int) -> tuple[float, ...]:
    """Per layer, the floating-point operations of one token's forward, for `partition`.

    sequence: tokens that attention looks back over, half of them on average.
    Matrix products count 2 x rows x columns; an embedding only copies.
    """
    attention = 2 * 2 * config.dim * (sequence / 2)
    block = 2 * (4 * config.dim**2 + 3 * config.dim * config.hidden) + attention
    head = 2 * config.dim * config.vocabulary
    return (float(config.dim), *(block,) * config.blocks, float(head))
