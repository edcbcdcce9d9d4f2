"""The fused products of a Llama model, before anything runs: for the table and the refusals of a
job that is only being configured.

    operators.plan(llama_needs(config, sharding, rows=2, length=4096, dtype=torch.bfloat16))
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_pipe.ops.need import Need, Operator
from npu_pipe_kernels.llama import LlamaConfig
from npu_pipe_kernels.sharding import Sequence, Sharding

__all__ = ["llama_needs"]


def llama_needs(
    config: LlamaConfig, sharding: Sharding, *, rows: int, length: int, dtype: torch.dtype
) -> tuple[Need, ...]:
    """Each once, in the order of a forward, and behind each product its input gradient's.

    rows: sequences of a microbatch. length: tokens of each.
    """
    n = sharding.operators.ranks.size
    width = config.dim // config.heads
    qkv = config.dim + 2 * config.kv_heads * width
    layers = (
        (config.dim, qkv, True),
        (config.dim, config.dim, False),
        (config.dim, 2 * config.hidden, True),
        (config.hidden, config.dim, False),
        (config.dim, config.vocabulary, True),
    )
    found: dict[Need, None] = {}
    for inputs, outputs, is_column in layers:
        make = _column if is_column else _row
        shared = sharding.sequence is Sequence.SHARDED
        for need in make(rows * length, inputs, outputs, n, dtype, shared=shared):
            found[need] = None
    return tuple(found)


def _column(
    tokens: int, inputs: int, outputs: int, n: int, dtype: torch.dtype, *, shared: bool
) -> Iterator[Need]:
    own = outputs // n
    if shared:
        yield Need(Operator.ALL_GATHER_MATMUL, tokens // n, inputs, own, dtype)
        yield Need(Operator.MATMUL_REDUCE_SCATTER, tokens, own, inputs, dtype)
    else:
        yield Need(Operator.MATMUL_ALL_REDUCE, tokens, own, inputs, dtype)


def _row(
    tokens: int, inputs: int, outputs: int, n: int, dtype: torch.dtype, *, shared: bool
) -> Iterator[Need]:
    own = inputs // n
    if shared:
        yield Need(Operator.MATMUL_REDUCE_SCATTER, tokens, own, outputs, dtype)
        yield Need(Operator.ALL_GATHER_MATMUL, tokens // n, outputs, own, dtype)
    else:
        yield Need(Operator.MATMUL_ALL_REDUCE, tokens, own, outputs, dtype)
