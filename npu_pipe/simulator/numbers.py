"""Reading sequences of costs."""

from __future__ import annotations

from collections.abc import Sequence

from npu_pipe.errors import CostsError

__all__ = ["is_cost", "read_costs", "require_factors", "require_length"]

_MOST = 1e30  # sums and products of three such numbers are finite


def read_costs(field: str, values: Sequence[float]) -> tuple[float, ...]:
    """The values as floats; raises CostsError unless each `is_cost`."""
    try:
        numbers = tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError) as error:
        raise CostsError(
            "costs are sequences of numbers, one a stage or boundary",
            f"{field} is {values!r:.80}",
            "give a list; Costs.uniform makes equal ones",
        ) from error
    for index, number in enumerate(numbers):
        if not is_cost(number):
            raise CostsError(
                f"costs are finite and not negative, and at most {_MOST:g}",
                f"{field}[{index}] is {number}",
                "measure it again",
            )
    return numbers


def is_cost(number: float) -> bool:
    """Whether it can be one: finite, not negative, and not so large that sums overflow."""
    return 0 <= number <= _MOST  # False for NaN


def require_length(field: str, values: Sequence[float], length: int, *, stages: int) -> None:
    """Raise CostsError unless there are `length` values, for a model of `stages` stages."""
    if len(values) != length:
        raise CostsError(
            "costs give one value a stage, and for transfers one a boundary between stages",
            f"forward has {stages}, {field} has {len(values)}",
            f"give {length} values for {field}",
        )


def require_factors(factors: Sequence[float], microbatches: int) -> None:
    """Raise CostsError unless there is one factor a microbatch, or none."""
    if factors and len(factors) != microbatches:
        raise CostsError(
            "microbatch_scale has one factor a microbatch, or none",
            f"there are {microbatches} microbatches and {len(factors)} factors",
            f"give {microbatches} factors",
        )
