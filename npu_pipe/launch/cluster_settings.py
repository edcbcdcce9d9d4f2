"""The environment settings of a cluster job, each with the reason for its value.

Sources: the manuals of CANN and torch_npu, and what `npu_pipe.comm.preflight` checks. The values
are defaults, or defaults that suit pipelines; one that is in the environment already stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Setting", "Target", "interface_variables", "settings_for", "target_of"]


class Target(Enum):
    """The kind of device a script is for."""

    NPU = "npu"
    CUDA = "cuda"
    CPU = "cpu"


def target_of(device: str) -> Target:
    """Of a job's run.device: itself, or an NPU where that is auto."""
    kinds = {target.value: target for target in Target}
    return kinds.get(device, Target.NPU)


@dataclass(frozen=True, slots=True)
class Setting:
    """why: sentences for the line above it."""

    name: str
    value: str
    why: str


_ALL = (
    Setting(
        "OMP_NUM_THREADS",
        "1",
        "Threads a rank computes with on the CPU. All ranks of a node together should not have "
        "more than it has cores.",
    ),
    Setting(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "0",
        "Where CANN is missing, `import torch` itself would fail in torch_npu. npu-pipe loads it "
        "later, and says in one sentence what is missing.",
    ),
)

_NPU = (
    Setting(
        "HCCL_CONNECT_TIMEOUT",
        "300",
        "Seconds in which ranks must come to meet. 120, HCCL's own, is short where all nodes read "
        "one disk (EI0006). Less than HCCL_EXEC_TIMEOUT.",
    ),
    Setting(
        "HCCL_EXEC_TIMEOUT",
        "1800",
        "Seconds after which HCCL gives a transfer up. npu-pipe finds a rank that is late by "
        "pipeline.timeout_s, much sooner. Less than HCCL_EVENT_TIMEOUT.",
    ),
    Setting(
        "HCCL_EVENT_TIMEOUT",
        "1868",
        "Seconds that a stream waits for an event. Were it less, it would hide HCCL's message.",
    ),
    Setting(
        "HCCL_IF_BASE_PORT",
        "60000",
        "The first of HCCL's ports on each node: every rank takes one, from here up. Two jobs on "
        "one node need ports of their own (EJ0003, EI0019).",
    ),
    Setting(
        "HCCL_WHITELIST_DISABLE",
        "1",
        "Ranks connect without a list of the hosts that may.",
    ),
    Setting(
        "P2P_HCCL_BUFFSIZE",
        "20",
        "MB of each of the two buffers that a rank has for every neighbour and lane. Larger ones "
        "take memory from the model.",
    ),
    Setting(
        "STREAMS_PER_DEVICE",
        "32",
        "Streams of a device; communicators take one each. npu-pipe counts them before it starts.",
    ),
    Setting(
        "TASK_QUEUE_ENABLE",
        "1",
        "A thread of torch_npu hands operators to the NPU. 2 moves more into it and takes more "
        "memory; 0 makes the host wait.",
    ),
    Setting(
        "PYTORCH_NPU_ALLOC_CONF",
        "expandable_segments:True",
        "Blocks of memory grow where they are, so that windows of other shapes leave no holes.",
    ),
    Setting(
        "CPU_AFFINITY_CONF",
        "1",
        "torch_npu keeps each rank to cores near its NPU. 0 leaves them to the kernel.",
    ),
)

_CUDA = (
    Setting(
        "PYTORCH_CUDA_ALLOC_CONF",
        "expandable_segments:True",
        "Blocks of memory grow where they are, so that windows of other shapes leave no holes.",
    ),
)

_OF = {Target.NPU: (*_NPU, *_ALL), Target.CUDA: (*_CUDA, *_ALL), Target.CPU: _ALL}


def settings_for(target: Target) -> tuple[Setting, ...]:
    """In the order in which they are written."""
    return _OF[target]


def interface_variables(target: Target) -> tuple[str, ...]:
    """Those that name the network interface between nodes: gloo's, and the device backend's."""
    own = {Target.NPU: ("HCCL_SOCKET_IFNAME",), Target.CUDA: ("NCCL_SOCKET_IFNAME",)}
    return ("GLOO_SOCKET_IFNAME", *own.get(target, ()))
