"""The outputs of the microbatches, merged into those of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate, merge_chunks
from torch.utils import _pytree as pytree

from npu_pipe.errors import DataError

__all__ = ["merge_outputs"]


def merge_outputs(outputs: Sequence[Any], spec: Any) -> Any:
    """As torch's merge_chunks with this output_merge_spec. Without one, tensors are joined along
    dimension 0, scalars become a vector of one a microbatch, and other values are equal in all.

    Raises DataError for outputs that do not fit the spec or each other.
    """
    chunks = list(outputs)
    if spec is None:
        chunks = pytree.tree_map_only(Tensor, lambda t: t if t.dim() else t.unsqueeze(0), chunks)
        (joined,) = TensorChunkSpec.from_tuple((0,))
        spec = pytree.tree_map(
            lambda leaf: joined if isinstance(leaf, Tensor) else _Replicate(), chunks[0]
        )
    try:
        return merge_chunks(chunks, spec)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            "the outputs of the microbatches are merged as output_merge_spec says",
            f"{' '.join(str(error).split()):.200}",
            "give a spec in the form of the output, or return_outputs=False",
        ) from error
