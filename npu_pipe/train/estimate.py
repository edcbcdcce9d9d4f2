"""What a job's layers will take of time and memory, from their shapes. Imports no torch.

What a block keeps until its backward, in numbers of float32 a token, with D dim, G width of keys,
M hidden, C experts of a token; a test measures it on `npu_pipe.train.model`:

    attention      7D + 3G    norm, queries, turned queries, what is mixed and what it gives, ...
    feed-forward   3D + 4M C  norm; gate and up, silu of the gate, their product
    with experts   3D C       the tokens of each expert, what it gives, and that times its weight

Of n ranks that share it each has an n-th of that, but for the 2D that its two column-parallel
products gather; and its two row-parallel products gather 2D of gradients, which wait for W.

A product takes its FLOPs at the device's rate, or its bytes at the memory's, whichever is longer.
Backward: the input half takes as long as the forward, attention in it twice; the weight half as
long as the products. Ranks that share a block exchange its rows four times in its forward, and in
its input half; nothing of that is taken to be hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from npu_pipe.planner.workload import Workload
from npu_pipe.train.job import Job
from npu_pipe.train.model_config import ModelConfig, layer_flops, layer_parameters

__all__ = ["STATE_BYTES", "LayerBytes", "layer_bytes", "tokens_of", "workload_of"]

STATE_BYTES = 16
"""Of a trained number: itself, its gradient and two moments of AdamW, in float32."""

_SIZE = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Of one layer and one microbatch. kept: from F until its B or I. for_weights: from I until W.
    working: what it takes at most while it runs, besides."""

    kept: float
    for_weights: float
    working: float


def tokens_of(job: Job) -> int:
    """Tokens of a microbatch."""
    parts = job.pipeline.microbatches * job.mesh.dp
    return job.data.batch // parts * job.data.sequence


def layer_bytes(config: ModelConfig, *, tokens: int, tp: int = 1) -> tuple[LayerBytes, ...]:
    """Per layer, of a microbatch of so many tokens, on each of the `tp` ranks that share it."""
    d, g, m, v = config.dim, config.kv_dim, config.hidden, config.vocabulary
    c = config.experts_per_token
    is_routed, is_shared = config.experts > 1, tp > 1
    repeated = 2 * (d - g) * is_shared  # keys and values, one for each head
    own = 8 * d + 3 * g + repeated + 4 * m * c + 3 * d * c * is_routed + config.heads + 2
    block = 2 * d + own / tp
    gathered = 4 if is_shared else 0
    for_weights = (
        gathered * d + ((10 - gathered) * d + 2 * g + 3 * m * c + 2 * d * c * is_routed) / tp
    )
    # gradients of the widest product, its input's and its output's; and a sum of all ranks
    backward = 4 * m / tp + d * is_shared
    if config.recompute:  # both halves run at once then
        blocks = LayerBytes(d / tp, d / tp, block + backward)
    else:
        blocks = LayerBytes(block, for_weights, backward)
    layers = (
        LayerBytes(d / tp + 2, (d / tp + 2) * is_shared, d),
        *(blocks,) * config.blocks,
        # the logarithms of probabilities
        LayerBytes(d + (d + v) / tp, d + (2 * d + v) / tp, 2 * v / tp),
    )
    size = _SIZE * tokens
    return tuple(
        LayerBytes(each.kept * size, each.for_weights * size, each.working * size)
        for each in layers
    )


def workload_of(job: Job) -> Workload:
    """The job's model as `npu-pipe plan` takes it; times in microseconds."""
    model, cluster, tokens, tp = job.model, job.cluster, tokens_of(job), job.mesh.tp
    rate = cluster.tflops * 1e6 * cluster.efficiency  # FLOPs a microsecond
    memory = cluster.memory_gb_s * 1e3  # bytes a microsecond
    flops = layer_flops(model, job.data.sequence)
    products = layer_flops(model, 0)
    parameters = layer_parameters(model, tp=tp)
    sizes = layer_bytes(model, tokens=tokens, tp=tp)
    plain = replace(model, recompute=False)
    written = [size.kept for size in layer_bytes(plain, tokens=tokens, tp=tp)]
    rows = _SIZE * tokens * model.dim
    exchange = rows * (tp - 1) / tp / (cluster.node_gb_s * 1e3)
    exchanges = (exchange, *(4 * exchange,) * model.blocks, exchange)

    def times(
        per_token: tuple[float, ...], read: float, exchanged: tuple[float, ...]
    ) -> tuple[float, ...]:
        """read: how often the layer's values are read or written, beside its parameters."""
        return tuple(
            max(each * tokens / tp / rate, (_SIZE * numbers + read * size) / memory) + more
            for each, numbers, size, more in zip(
                per_token, parameters, written, exchanged, strict=True
            )
        )

    forward = times(flops, 1, exchanges)
    twice = tuple(2 * whole - part for whole, part in zip(flops, products, strict=True))
    boundary = rows / tp
    return Workload(
        forward=forward,
        input_grad=times(twice, 2, exchanges),
        weight_grad=times(products, 1, (0.0,) * model.layers),
        transfer=(boundary / (cluster.link_gb_s * 1e3) + cluster.link_us,) * (model.layers - 1),
        activation_bytes=[size.kept for size in sizes],
        weight_input_bytes=[size.for_weights for size in sizes],
        parameter_bytes=[STATE_BYTES * numbers for numbers in parameters],
        boundary_bytes=(boundary,) * (model.layers - 1),
        recompute=(0.0, *forward[1:-1], 0.0) if model.recompute else (),
    )
