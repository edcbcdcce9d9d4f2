"""What the layers of a model compute in. Imports no torch.

parameters, gradients, optimizer state, loss     float32, always
products, activations, boundaries                float32, or bfloat16
"""

from __future__ import annotations

from enum import Enum

__all__ = ["Precision"]


class Precision(Enum):
    """The text is torch's name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    def __str__(self) -> str:
        return self.value

    @property
    def size_bytes(self) -> int:
        """Of a number."""
        return 4 if self is Precision.FLOAT32 else 2
