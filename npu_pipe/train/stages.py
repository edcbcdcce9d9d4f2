"""The stages of one rank: whole, or its part of the layers that mesh.tp ranks share.

Both have the same first values, so that a job learns the same however it is cut.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from npu_pipe.comm.axes import open_axes
from npu_pipe.device.device import Device
from npu_pipe.launch.group import join
from npu_pipe.launch.mesh import Axis, Mesh
from npu_pipe.launch.world import World
from npu_pipe.ops.choose import told
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.ranks import Ranks, ranks_of
from npu_pipe.runtime.loss import LossFunction
from npu_pipe.train.computing import dtype_of
from npu_pipe.train.job import Job
from npu_pipe.train.model import build_stage, token_loss
from npu_pipe.train.model_config import ModelConfig
from npu_pipe_kernels.llama import LlamaConfig, build_layers, cut_whole, load_whole
from npu_pipe_kernels.needs import llama_needs
from npu_pipe_kernels.providers import providers
from npu_pipe_kernels.sharding import Sharding
from npu_pipe_kernels.vocabulary import token_losses

__all__ = ["Shared", "Whole", "open_parts"]

_CONNECT_S = 60


class Whole:
    """Where mesh.tp is 1."""

    ranks: Ranks | None = None
    part: int | None = None
    loss: LossFunction = staticmethod(token_loss)

    def build(self, config: ModelConfig, layers: Iterable[int], *, seed: int) -> nn.Module:
        """These layers as one module, on the CPU."""
        return build_stage(config, layers, seed=seed)

    def cut(self, module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What this rank has of values that go with the parameters of the unsplit model."""
        return {name: values[name] for name, _ in module.named_parameters()}

    def cut_logits(self, logits_btv: Tensor, microbatches: int) -> Tensor:
        """What this rank has of the unsplit model's logits, as `Pipeline.predict` joins them."""
        del microbatches
        return logits_btv

    def words(self, job: Job) -> str | None:
        """For the user."""
        del job
        return None


@dataclass(frozen=True, slots=True)
class Shared:
    """Where several ranks share each stage, of which this is one."""

    sharding: Sharding

    @property
    def ranks(self) -> Ranks:
        return self.sharding.operators.ranks

    @property
    def part(self) -> int:
        return self.ranks.rank

    @property
    def loss(self) -> LossFunction:
        return partial(_mean_loss, ranks=self.ranks)

    def build(self, config: ModelConfig, layers: Iterable[int], *, seed: int) -> nn.Module:
        """See `Whole.build`. Only one layer is ever there as a whole."""
        return nn.Sequential(
            OrderedDict((str(layer), self._layer(config, layer, seed)) for layer in layers)
        )

    def cut(self, module: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Whole.cut`."""
        return cut_whole(module, values)

    def cut_logits(self, logits_btv: Tensor, microbatches: int) -> Tensor:
        """(T, B, V / n) of each microbatch, one after the other."""
        own_btv = logits_btv.chunk(self.ranks.size, dim=-1)[self.part]
        return torch.cat([each.transpose(0, 1) for each in own_btv.chunk(microbatches)])

    def words(self, job: Job) -> str:
        """For the user: who does the products of the layers."""
        rows = job.data.batch // (job.pipeline.microbatches * job.mesh.dp)
        needs = llama_needs(
            _llama(job.model),
            self.sharding,
            rows=rows,
            length=job.data.sequence,
            dtype=dtype_of(job.model.precision),
        )
        operators = self.sharding.operators
        operators.plan(needs)
        lines = told(operators.rows())
        return f"each stage is shared by {self.ranks.size} ranks; who does its products:\n{lines}"

    def _layer(self, config: ModelConfig, layer: int, seed: int) -> nn.Module:
        whole = build_stage(config, [layer], seed=seed)
        part = build_layers(_llama(config), [layer], self.sharding)
        load_whole(part, dict(whole.named_parameters()))
        return part[0]


def open_parts(mesh: Mesh, world: World, *, device: Device) -> Whole | Shared:
    """What a rank has of its stages; where they are shared, connect those who share them.

    Raises PeerError for a rank that does not come.
    """
    if mesh.tp == 1:
        return Whole()
    join(world)
    axes = [(Axis.TP.value, mesh.ranks(Axis.TP, world.rank))]
    groups = open_axes(axes, device=device, timeout_s=_CONNECT_S)
    ranks = ranks_of(groups[Axis.TP.value], device.place)
    return Shared(Sharding(Operators(ranks, providers())))


def _mean_loss(logits_tbv: Tensor, targets_bt: Tensor, *, ranks: Ranks) -> Tensor:
    return token_losses(logits_tbv, targets_bt, ranks).mean()


def _llama(config: ModelConfig) -> LlamaConfig:
    return LlamaConfig(
        dim=config.dim,
        blocks=config.blocks,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        hidden=config.hidden,
        vocabulary=config.vocabulary,
        rotary_base=config.rotary_base,
        recompute=config.recompute,
    )
