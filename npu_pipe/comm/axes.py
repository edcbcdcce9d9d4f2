"""The process groups of a rank along the axes of a mesh, for whoever talks along one.

Every rank makes its groups in the same order of axes, and uses each once as soon as it is made:
a communicator that is set up later, when ranks come to it at different times, runs into
HCCL_CONNECT_TIMEOUT.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from npu_pipe.comm.failure import peer_failures
from npu_pipe.device.device import Device

__all__ = ["open_axes"]


def open_axes(
    axes: Iterable[tuple[str, tuple[int, ...]]], *, device: Device, timeout_s: float
) -> dict[str, dist.ProcessGroup]:
    """The groups of this rank by axis, but for those of one rank; collective.

    axes: as `npu_pipe.launch.mesh.Mesh.axes` gives them. Each is a group of torch.distributed,
    which has to be initialised with all ranks of the mesh, for tensors of the CPU and of `device`.
    Raises PeerError when a rank does not come within `timeout_s`.
    """
    backends = {"cpu": "gloo", device.place.type: device.backend}
    backend = ",".join(f"{kind}:{name}" for kind, name in backends.items())
    groups = {}
    for axis, ranks in axes:
        if len(ranks) == 1:
            continue
        with peer_failures(f"rank {dist.get_rank()} was connecting to {axis} ranks {ranks}"):
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=timeout_s),
                backend=backend,
                use_local_synchronization=True,  # or all ranks would have to make all groups
                group_desc=f"npu_pipe {axis}",
            )
            for place in {torch.device("cpu"), device.place}:
                dist.all_reduce(torch.zeros(1, device=place), group=group)
        groups[axis] = group
    return groups
