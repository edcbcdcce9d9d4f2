"""Computing in the precision of a job: by autocast on its device.

    weight, float32  ---> a copy in bfloat16, once an update ---> products, activations, boundaries
    .grad, float32   <--- the gradient of a microbatch, made float32, is added <---

Autocast keeps the copies of the weights of torch's own layers until its block ends, so a block is
one update. Layers that are cut over ranks copy a weight for each product, and drop it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from npu_pipe.device.device import Device
from npu_pipe.train.precision import Precision

__all__ = ["computing", "dtype_of"]

_DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


def dtype_of(precision: Precision) -> torch.dtype:
    """Of the matrices of a product."""
    return _DTYPES[precision]


def computing(precision: Precision, device: Device) -> AbstractContextManager[object]:
    """Run the layers of the block in this precision; their backwards follow their forwards."""
    if precision is Precision.FLOAT32:
        return nullcontext()
    return device.autocast(dtype_of(precision))
