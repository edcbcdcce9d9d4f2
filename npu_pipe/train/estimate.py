"""What a job's layers will take of time and memory, from their shapes. Imports no torch.

What a block keeps until its backward, in numbers of `model.precision` a token, with D dim, G width
of keys, M hidden, C experts of a token; a test measures it on `npu_pipe.train.model`:

    attention      6D + 3G    norm, queries, turned queries, what is mixed and what it gives, ...
    feed-forward   2D + 4M C  norm; gate and up, silu of the gate, their product
    with experts   3D C       the tokens of each expert, what it gives, and that times its weight

Ranks that share it gather 2D in its column-parallel products, and until W 2D of gradients in its
row-parallel ones; of the rest each has a part: 9D + 4M, or 7D + 4M with fewer heads of keys than
heads, which are then repeated.

In bfloat16 the loss is float32 all the same, and weights are read through a copy: autocast keeps
one of each matrix during an update, and layers that ranks share make one for each product.

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
from npu_pipe.train.precision import Precision

__all__ = ["STATE_BYTES", "LayerBytes", "copy_bytes", "layer_bytes", "tokens_of", "workload_of"]

STATE_BYTES = 16
"""Of a trained number: itself, its gradient and two moments of AdamW, in float32."""

_WIDE = 4  # bytes of a float32


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
    size = config.precision.size_bytes
    copied = _passing_copies(config, tp=tp)
    backward = 4 * m / tp  # gradients of the widest product, its input's and its output's
    if tp > 1:
        attention = 5 * d if g < d else 7 * d
        block = 2 * d + (2 * d + attention + 4 * m + config.heads + 2) / tp
        for_weights = 4 * d + (6 * d + 2 * g + 3 * m) / tp
        backward += d  # and a sum of all ranks
    else:
        is_routed = config.experts > 1
        block = 8 * d + 3 * g + 4 * m * c + 3 * d * c * is_routed + config.heads + 2
        for_weights = 10 * d + 2 * g + 3 * m * c + 2 * d * c * is_routed
    if config.recompute:  # both halves of products run at once then, where they are torch's
        of_norms = 4 * d + 2
        blocks = LayerBytes(d / tp, for_weights if tp > 1 else of_norms, block + backward)
    else:
        blocks = LayerBytes(block, for_weights, backward)
    ids = 8 / size
    wide = _WIDE / size
    # With the logarithms of probabilities, or, cut over ranks, the logits that they are made of.
    kept = d + (d + v) / tp if tp > 1 else d + v * wide
    layers = (
        LayerBytes(d / tp + ids, d / tp + ids if tp > 1 else d * wide, d * wide),
        *(blocks,) * config.blocks,
        LayerBytes(kept, d + (2 * d + v) / tp, 2 * v * wide / tp),
    )
    return tuple(
        LayerBytes(
            each.kept * size * tokens,
            each.for_weights * size * tokens,
            each.working * size * tokens + passing,
        )
        for each, passing in zip(layers, copied, strict=True)
    )


def copy_bytes(config: ModelConfig, *, tp: int = 1) -> tuple[int, ...]:
    """Per layer, what autocast keeps of its matrices during an update; none where ranks share it,
    nor of an embedding, which is no product."""
    if config.precision is Precision.FLOAT32 or tp > 1:
        return (0,) * config.layers
    numbers = layer_parameters(config)
    size, norm = config.precision.size_bytes, config.dim
    blocks = (size * (each - 2 * norm) for each in numbers[1:-1])
    return (0, *blocks, size * (numbers[-1] - norm))


def _passing_copies(config: ModelConfig, *, tp: int) -> tuple[int, ...]:
    """Per layer, the copy of its largest matrix, where one is made for each product."""
    if config.precision is Precision.FLOAT32 or tp == 1:
        return (0,) * config.layers
    size = config.precision.size_bytes * config.dim
    block = size * max(2 * config.hidden, config.dim + 2 * config.kv_dim) // tp
    return (0, *(block,) * config.blocks, size * config.vocabulary // tp)


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
    size = model.precision.size_bytes
    rows = size * tokens * model.dim
    exchange = rows * (tp - 1) / tp / (cluster.node_gb_s * 1e3)
    copies = _WIDE + size if model.precision is not Precision.FLOAT32 and tp > 1 else 0
    beside = tuple(
        more + copies * numbers / memory
        for more, numbers in zip(
            (exchange, *(4 * exchange,) * model.blocks, exchange),
            (0, *parameters[1:]),
            strict=True,
        )
    )

    def times(
        per_token: tuple[float, ...], read: float, weight: int, more: tuple[float, ...]
    ) -> tuple[float, ...]:
        """read: how often the layer's values are read or written, beside its parameters, of
        `weight` bytes each. more: what hides behind no product."""
        return tuple(
            max(each * tokens / tp / rate, (weight * numbers + read * values) / memory) + extra
            for each, numbers, values, extra in zip(
                per_token, parameters, written, more, strict=True
            )
        )

    forward = times(flops, 1, size, beside)
    twice = tuple(2 * whole - part for whole, part in zip(flops, products, strict=True))
    boundary = rows / tp
    return Workload(
        forward=forward,
        input_grad=times(twice, 2, size, beside),
        weight_grad=times(products, 1, _WIDE, (0.0,) * model.layers),
        transfer=(boundary / (cluster.link_gb_s * 1e3) + cluster.link_us,) * (model.layers - 1),
        activation_bytes=[size.kept for size in sizes],
        weight_input_bytes=[size.for_weights for size in sizes],
        parameter_bytes=[
            STATE_BYTES * numbers + kept
            for numbers, kept in zip(parameters, copy_bytes(model, tp=tp), strict=True)
        ],
        boundary_bytes=(boundary,) * (model.layers - 1),
        recompute=(0.0, *forward[1:-1], 0.0) if model.recompute else (),
    )
