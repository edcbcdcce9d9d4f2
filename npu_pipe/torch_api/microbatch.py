"""torch's own names for how a batch is cut and joined, under torch's own module name."""

from __future__ import annotations

from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.distributed.pipelining.microbatch import _CustomReducer as _CustomReducer
from torch.distributed.pipelining.microbatch import _LossReducer as _LossReducer
from torch.distributed.pipelining.microbatch import _Replicate as _Replicate
from torch.distributed.pipelining.microbatch import sum_reducer as sum_reducer

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]
