"""Workload: what the layers of a model cost, before they are cut into stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from npu_pipe.errors import CostsError
from npu_pipe.partition.partition import partition
from npu_pipe.simulator.costs import Costs
from npu_pipe.simulator.memory import Memory
from npu_pipe.simulator.numbers import read_costs

__all__ = ["Workload"]

_PER_LAYER = ("forward", "input_grad", "weight_grad")
_MAYBE_PER_LAYER = ("recompute", "activation_bytes", "weight_input_bytes", "parameter_bytes")
_GRAIN = 12  # layers a rank of an even model: 1, 2, 3 and 4 chunks divide them


@dataclass(frozen=True, slots=True)
class Workload:
    """Times in one unit of your choice, memory in bytes; see `Costs` and `Memory`.

    forward, input_grad, weight_grad, recompute: per layer, of one microbatch.
    transfer: per boundary between layers i -> i+1, the time to cross it between two ranks.
    activation_bytes: per layer, what its forward keeps until its backward; empty if bytes are
        not known. weight_input_bytes: what the I half keeps for the W half; as much as
        activation_bytes if left out. parameter_bytes: with gradients and optimizer state.
    boundary_bytes: per boundary, one value that crosses.
    has_halves: False if only whole backwards were measured, and their halves taken as equal.

    Sequences are kept as tuples. Raises CostsError when lengths do not fit or a value is negative
    or not finite.
    """

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: Sequence[float]
    activation_bytes: Sequence[float] = ()
    weight_input_bytes: Sequence[float] = ()
    parameter_bytes: Sequence[float] = ()
    boundary_bytes: Sequence[float] = ()
    microbatch_scale: Sequence[float] = ()
    recompute: Sequence[float] = ()
    overlapped: bool = True
    fused_ratio: float = 1.0
    has_halves: bool = True

    def __post_init__(self) -> None:
        layers = len(self.forward)
        if not layers:
            raise CostsError("a model has a layer or more", "forward is empty", "give its times")
        for field in (*_PER_LAYER, *_MAYBE_PER_LAYER):
            self._read(field, layers, "layer", can_be_empty=field in _MAYBE_PER_LAYER)
        self._read("transfer", layers - 1, "boundary between layers", can_be_empty=False)
        self._read("boundary_bytes", layers - 1, "boundary between layers", can_be_empty=True)
        object.__setattr__(
            self, "microbatch_scale", read_costs("microbatch_scale", self.microbatch_scale)
        )
        self.stage_costs(1)  # which checks the rest
        if not self.has_bytes and (self.parameter_bytes or self.weight_input_bytes):
            raise CostsError(
                "memory is what activations take besides parameters",
                "bytes are given, but no activation_bytes",
                "give activation_bytes, one a layer",
            )

    @classmethod
    def even(
        cls,
        ranks: int,
        *,
        forward: float = 1,
        input_grad: float = 1,
        weight_grad: float = 1,
        transfer: float = 0,
    ) -> Workload:
        """A model that can be cut evenly into 1, 2, 3 or 4 stages a rank.

        forward, input_grad, weight_grad: of one rank's whole share of it.
        """
        layers = ranks * _GRAIN
        return cls(
            forward=(forward / _GRAIN,) * layers,
            input_grad=(input_grad / _GRAIN,) * layers,
            weight_grad=(weight_grad / _GRAIN,) * layers,
            transfer=(transfer,) * (layers - 1),
        )

    @property
    def layers(self) -> int:
        return len(self.forward)

    @property
    def has_bytes(self) -> bool:
        return bool(self.activation_bytes)

    def stage_costs(self, stages: int) -> Costs:
        """Costs of the model cut into stages. Raises PartitionError for more than layers."""
        parts = self.cut(stages)
        per_stage = _summed(parts)
        return Costs(
            forward=per_stage(self.forward),
            input_grad=per_stage(self.input_grad),
            weight_grad=per_stage(self.weight_grad),
            transfer=_crossed(parts, self.transfer),
            microbatch_scale=self.microbatch_scale,
            overlapped=self.overlapped,
            recompute=per_stage(self.recompute),
            fused_ratio=self.fused_ratio,
        )

    def stage_memory(self, stages: int) -> Memory | None:
        """Memory of the same stages; None if bytes are not known."""
        if not self.has_bytes:
            return None
        parts = self.cut(stages)
        per_stage = _summed(parts)
        return Memory(
            activation=per_stage(self.activation_bytes),
            weight_inputs=per_stage(self.weight_input_bytes or self.activation_bytes),
            parameters=per_stage(self.parameter_bytes or (0.0,) * self.layers),
            boundary=_crossed(parts, self.boundary_bytes or (0.0,) * (self.layers - 1)),
            microbatch_scale=self.microbatch_scale,
        )

    def cut(self, stages: int) -> tuple[range, ...]:
        """The layers of each stage: the largest forward plus backward as short as can be."""
        again = self.recompute or (0.0,) * self.layers
        columns = (self.forward, self.input_grad, self.weight_grad, again)
        times = [math.fsum(layer) for layer in zip(*columns, strict=True)]
        if stages >= 1 and self.layers % stages == 0 and len(set(times)) == 1:
            size = self.layers // stages  # what `partition` finds too, but takes its time for
            return tuple(range(s * size, (s + 1) * size) for s in range(stages))
        return partition(times, stages=stages)

    def _read(self, field: str, length: int, what: str, *, can_be_empty: bool) -> None:
        values = read_costs(field, getattr(self, field))
        object.__setattr__(self, field, values)
        if len(values) != length and (values or not can_be_empty):
            raise CostsError(
                f"{field} has one value a {what}",
                f"forward has {len(self.forward)}, {field} has {len(values)}",
                f"give {length} values for {field}",
            )


def _summed(parts: tuple[range, ...]) -> Callable[[Sequence[float]], tuple[float, ...]]:
    """Values per layer -> sums per stage; none stay none."""

    def per_stage(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(math.fsum(values[i] for i in part) for part in parts) if values else ()

    return per_stage


def _crossed(parts: tuple[range, ...], values: Sequence[float]) -> tuple[float, ...]:
    """Values per boundary of layers -> those of the boundaries that are left."""
    return tuple(values[part[-1]] for part in parts[:-1])
