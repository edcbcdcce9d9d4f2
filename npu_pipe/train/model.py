"""A decoder-only model in the Llama style, cut into stages. [Touvron et al. 2302.13971]

    layer       0          1 .. n        n+1
                embedding  blocks        norm, head
    tensor  ids BT    ->   BTD     ->    BTD    ->   logits BTV

Shapes: B batch, T sequence, D dim, H heads, G heads of keys and values, K dim of a head, M hidden,
V vocabulary, E experts, C those of a token, N tokens.

A stage is a run of layers. Every layer draws its parameters from a generator of its own, made
from the seed and the layer's number: the parts have the parameters of the whole, however it is
cut, and their names are the same (`3.attention.qkv.weight`: layer 3 of the model).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from npu_pipe.train.model_config import ModelConfig
from npu_pipe_kernels.autocast import as_autocast
from npu_pipe_kernels.norm import RMSNorm
from npu_pipe_kernels.rotary import rotary, rotate

__all__ = ["build_model", "build_stage", "token_loss"]


def build_model(config: ModelConfig, *, seed: int) -> nn.Sequential:
    """All layers as one module: ids (B, T) int64 -> logits (B, T, V)."""
    return build_stage(config, range(config.layers), seed=seed)


def build_stage(config: ModelConfig, layers: Iterable[int], *, seed: int) -> nn.Sequential:
    """These layers of the model, as one module, with the parameters that they have in the whole."""
    return nn.Sequential(OrderedDict((str(i), _layer(config, i, seed)) for i in layers))


def token_loss(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, in float32 at least."""
    wide_btv = logits_btv.float() if logits_btv.dtype.itemsize < 4 else logits_btv
    return F.cross_entropy(wide_btv.flatten(0, 1), targets_bt.flatten())


def _layer(config: ModelConfig, layer: int, seed: int) -> nn.Module:
    with torch.device("meta"):  # so that the global generator is not drawn from
        module: nn.Module
        if layer == 0:
            module = Embedding(config.vocabulary, config.dim)
        elif layer <= config.blocks:
            module = Block(config)
        else:
            module = Head(config)
    module = module.to_empty(device="cpu")
    state = np.random.SeedSequence((seed, layer)).generate_state(1, dtype=np.uint64)
    generator = torch.Generator().manual_seed(int(state[0]))
    for name, parameter in module.named_parameters():
        _initialise(name, parameter, config, generator)
    return module


@torch.no_grad()
def _initialise(
    name: str, parameter: Tensor, config: ModelConfig, generator: torch.Generator
) -> None:
    """Unit variance through every matrix; what is added to the residual stream starts small."""
    if parameter.ndim == 1:
        nn.init.ones_(parameter)  # the gain of a norm
        return
    if name.endswith(("out.weight", "down.weight")):
        std = (2 * config.blocks * parameter.shape[1]) ** -0.5
    elif name == "weight":
        std = 1.0  # the embedding
    elif name == "projection.weight":
        std = 0.1 * config.dim**-0.5  # the first guess is close to uniform
    else:
        std = parameter.shape[1] ** -0.5
    nn.init.normal_(parameter, std=std, generator=generator)


class Embedding(nn.Embedding):
    """In autocast's dtype, where it is on: the residual stream begins here, and keeps it."""

    def forward(self, ids_bt: Tensor) -> Tensor:
        return as_autocast(super().forward(ids_bt))


class Block(nn.Module):
    """x + attention(norm(x)), then + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = Experts(config) if config.experts > 1 else FeedForward(config)
        self._recompute = config.recompute

    def forward(self, x_btd: Tensor) -> Tensor:
        if self._recompute and torch.is_grad_enabled():
            again: Tensor = checkpoint(
                self._run, x_btd, use_reentrant=False, preserve_rng_state=False
            )
            return again
        return self._run(x_btd)

    def _run(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.attention_norm(x_btd))
        out: Tensor = x_btd + self.feed_forward(self.feed_forward_norm(x_btd))
        return out


class Attention(nn.Module):
    """Causal attention with rotary positions; G keys and values serve H heads. [Ainslie et al.
    2305.13245]"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.parts = (config.heads, kv_heads, kv_heads)
        self.rotary_base = config.rotary_base
        self.qkv = nn.Linear(config.dim, config.dim + 2 * config.kv_dim, bias=False)
        self.out = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        heads, kv_heads, _ = self.parts
        all_bthk = self.qkv(x_btd).unflatten(-1, (sum(self.parts), -1))
        q_bhtk, k_bgtk, v_bgtk = all_bthk.transpose(1, 2).split(self.parts, dim=1)
        cos_tk, sin_tk = rotary(q_bhtk, self.rotary_base)
        mixed_bhtk = F.scaled_dot_product_attention(
            rotate(q_bhtk, cos_tk, sin_tk),
            rotate(k_bgtk, cos_tk, sin_tk),
            v_bgtk,
            is_causal=True,
            enable_gqa=kv_heads < heads,
        )
        out: Tensor = self.out(mixed_bhtk.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU. [Shazeer 2002.05202]"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.dim, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        gate_btm, up_btm = self.gate_up(x_btd).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate_btm) * up_btm)
        return out


class Experts(nn.Module):
    """Each token goes through the C feed-forwards that a router likes best, by their weights.
    [Shazeer et al. 1701.06538; Jiang et al. 2401.04088]

    A sketch: all experts of a block are on one rank, and nothing balances their loads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.per_token = config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.experts))

    def forward(self, x_btd: Tensor) -> Tensor:
        x_nd = x_btd.flatten(0, 1)
        liked_nc, chosen_nc = self.router(x_nd).topk(self.per_token, dim=-1)
        wide = torch.promote_types(liked_nc.dtype, torch.float32)
        weights_nc = liked_nc.softmax(dim=-1, dtype=wide).to(x_nd.dtype)
        out_nd = torch.zeros_like(x_nd)
        for index, expert in enumerate(self.experts):
            rows, places = (chosen_nc == index).nonzero(as_tuple=True)
            made_nd = expert(x_nd[rows]) * weights_nc[rows, places].unsqueeze(-1)
            out_nd = out_nd.index_add(0, rows, made_nd)
        return out_nd.view_as(x_btd)


class Head(nn.Module):
    """The last norm and the projection to logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, eps=1e-5)
        self.projection = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        logits_btv: Tensor = self.projection(self.norm(x_btd))
        return logits_btv
