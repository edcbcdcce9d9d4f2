"""What a rank may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass

from npu_pipe.errors import ConfigError
from npu_pipe.planner.assess import Assessment
from npu_pipe.planner.workload import Workload

__all__ = ["Limits", "giga"]

_TOUCH = 1e-9


@dataclass(frozen=True, slots=True)
class Limits:
    """activations: in those of a rank's whole share of the model, a chunk of v counting 1/v.

    None for no limit.
    """

    activations: int | None = None
    memory_bytes: float | None = None

    def check_known(self, workload: Workload) -> None:
        """Raise ConfigError for a limit that cannot be compared with anything."""
        if self.memory_bytes is not None and not workload.has_bytes:
            raise ConfigError(
                "a limit in bytes needs a workload that tells its bytes",
                "the costs have no activation_bytes",
                "give them in a file (--costs), or limit activations (--max-activations)",
            )

    def broken_by(self, row: Assessment) -> str | None:
        """By how much a schedule holds too much; None if it does not."""
        if self.activations is not None and row.held > self.activations * (1 + _TOUCH):
            return f"holds {row.held:.3g} activations of {self.activations}"
        limit, held = self.memory_bytes, row.held_bytes
        if limit is not None and held is not None and held > limit:
            return f"holds {giga(held)} of {giga(limit)}"
        return None

    def caps(self, workload: Workload, *, ranks: int, microbatches: int) -> tuple[int, ...]:
        """Per rank, the activations that one stage a rank may hold within the limits; where
        nothing is limited, as many as 1f1b holds on its first rank."""
        most = min(ranks, microbatches)
        if self.activations is not None:
            most = self.activations
        elif self.memory_bytes is not None:
            most = microbatches
        memory = workload.stage_memory(ranks)
        if memory is None or self.memory_bytes is None:
            return (most,) * ranks
        scale = max(memory.microbatch_scale, default=1.0)
        caps = []
        for stage in range(ranks):
            kept, after = memory.activation[stage] * scale, memory.weight_inputs[stage] * scale
            left = self.memory_bytes - memory.parameters[stage] - after  # both are there in an I
            each = max(kept, after)
            caps.append(min(most, math.floor(left / each)) if each else most)
        return tuple(caps)


def giga(size_bytes: float) -> str:
    """Bytes as GB of 1e9, to three digits."""
    return f"{size_bytes / 1e9:.3g} GB"
