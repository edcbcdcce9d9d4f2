"""What each launcher sets for rank 5 of 8, the second of four on the second node."""

from __future__ import annotations

from npu_pipe.launch.spawned import rank_environment
from npu_pipe.launch.world import Launcher, World

__all__ = [
    "BY_HAND",
    "LOCAL",
    "MPICH",
    "MSRUN",
    "OPEN_MPI",
    "SLURM",
    "SPAWNED",
    "TORCHRUN",
    "TORCH_NPU_RUN",
    "WHOLE",
    "Environ",
]

Environ = dict[str, str]

TORCHRUN: Environ = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TORCH_NPU_RUN = TORCHRUN | {
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NPU_ELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NPU_USE_PARALLEL_TCPSTORE": "True",
    "ENABLE_TIERED_PARALLEL_TCPSTORE": "false",
    "PROXY_AGENT_PID_USE_LOCAL_SOCKET_PATH": "4711",
}
# As the real one was seen to set them, with a RANK of an older one's.
MSRUN: Environ = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "8",
    "MS_SCHED_HOST": "10.0.0.1",
    "MS_SCHED_PORT": "8118",
    "MS_NODE_ID": "5",
    "MS_TOPO_TIMEOUT": "600",
    "RANK_ID": "5",
    "RANK_SIZE": "8",
    "DEVICE_ID": "1",
    "RANK": "1",
    "HCCL_CONNECT_TIMEOUT": "600",
    "OMP_NUM_THREADS": "1",
    "LD_LIBRARY_PATH": "/site-packages/mindspore/lib/plugin/cpu",
}
OPEN_MPI: Environ = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "473235457",
    "PMIX_RANK": "5",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
MPICH: Environ = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_FD": "6",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM: Environ = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_JOB_NODELIST": "node[01-04]",
}
BY_HAND = {name: TORCHRUN[name] for name in list(TORCHRUN)[:6]}
LOCAL = World(
    rank=5,
    size=8,
    local_rank=5,
    local_size=8,
    address="127.0.0.1",
    port=4711,
    launcher=Launcher.LOCAL,
    report_fd=5,
    lifeline_fd=6,
)
SPAWNED = {
    name: text
    for name, text in rank_environment(LOCAL, {}).items()
    if name.startswith(("NPU_PIPE", "RANK", "WORLD", "LOCAL", "MASTER"))
}
WHOLE = {
    Launcher.LOCAL: SPAWNED,
    Launcher.TORCHRUN: TORCHRUN,
    Launcher.TORCH_NPU_RUN: TORCH_NPU_RUN,
    Launcher.MSRUN: MSRUN,
    Launcher.OPEN_MPI: OPEN_MPI,
    Launcher.MPICH: MPICH,
    Launcher.SLURM: SLURM,
    Launcher.BY_HAND: BY_HAND,
}
