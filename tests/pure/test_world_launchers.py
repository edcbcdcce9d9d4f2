"""Every launcher's environment: whole, with a variable missing, wrong, or contradicting another."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from core_helpers.launcher_environments import (
    BY_HAND,
    LOCAL,
    MPICH,
    MSRUN,
    OPEN_MPI,
    SLURM,
    SPAWNED,
    TORCH_NPU_RUN,
    TORCHRUN,
    WHOLE,
    Environ,
)

from npu_pipe.errors import ConfigError
from npu_pipe.launch.readers.precedence import TIERS
from npu_pipe.launch.spawned import rank_environment
from npu_pipe.launch.variables import derived_port
from npu_pipe.launch.world import Launcher, Sources, World


def sources(*names: str) -> Sources:
    return Sources(
        **dict(zip(("rank", "size", "local_rank", "address", "port"), names, strict=True))
    )


FIVE = sources("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MS = sources("MS_NODE_ID", "MS_WORKER_NUM", "DEVICE_ID", "MS_SCHED_HOST", "MS_SCHED_PORT")
OMPI = sources(
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
PMI = sources("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MASTER_ADDR", "MASTER_PORT")
STEP = sources(
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "first host of SLURM_STEP_NODELIST",
    "made from SLURM_JOB_ID and SLURM_STEP_ID",
)


@pytest.mark.parametrize(
    ("launcher", "address", "port", "local_size", "expected"),
    [
        (Launcher.TORCHRUN, "node0", 29400, 4, FIVE),
        (Launcher.TORCH_NPU_RUN, "node0", 29400, 4, FIVE),
        (Launcher.MSRUN, "10.0.0.1", 8118, None, MS),
        (Launcher.OPEN_MPI, "node0", 29400, 4, OMPI),
        (Launcher.MPICH, "node0", 29400, 4, PMI),
        (Launcher.SLURM, "node03", derived_port("4711.2"), 4, STEP),
        (Launcher.BY_HAND, "node0", 29400, 4, FIVE),
    ],
    ids=lambda value: value.value if isinstance(value, Launcher) else None,
)
def test_a_whole_environment_is_read_and_each_value_has_its_source(
    launcher: Launcher, address: str, port: int, local_size: int | None, expected: Sources
) -> None:
    world = World.from_environment(WHOLE[launcher])
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, local_size)
    assert (world.address, world.port, world.launcher) == (address, port, launcher)
    assert world.sources == expected
    assert world.agent_store == (launcher in (Launcher.TORCHRUN, Launcher.TORCH_NPU_RUN))


@dataclass(frozen=True)
class Broken:
    """An environment with one change (an empty text takes the variable away), and the message."""

    launcher: Launcher
    change: Environ
    facts: str
    cure: str = ""


def missing(launcher: Launcher, name: str, cure: str) -> Broken:
    return Broken(launcher, {name: ""}, f", {name} missing", cure)


FIVE_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MISSING = [
    *(missing(Launcher.TORCHRUN, name, "start the ranks with torchrun") for name in FIVE_NAMES),
    *(missing(Launcher.TORCH_NPU_RUN, name, "with torch_npu_run") for name in FIVE_NAMES),
    *(missing(Launcher.BY_HAND, name, "start the ranks with torchrun") for name in FIVE_NAMES),
    *(missing(Launcher.LOCAL, name, "start the job again") for name in FIVE_NAMES),
    missing(Launcher.LOCAL, "NPU_PIPE_LIFELINE_FD", "start the job again with npu-pipe"),
    missing(Launcher.TORCH_NPU_RUN, "TORCHELASTIC_RUN_ID", "start the ranks with torch_npu_run"),
    missing(Launcher.MSRUN, "MS_ROLE", "start the ranks with msrun"),
    missing(Launcher.MSRUN, "MS_WORKER_NUM", "start the ranks with msrun"),
    missing(Launcher.MSRUN, "MS_SCHED_HOST", "start the ranks with msrun"),
    missing(Launcher.MSRUN, "MS_SCHED_PORT", "start the ranks with msrun"),
    missing(Launcher.MSRUN, "DEVICE_ID", "start the ranks with msrun"),
    missing(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_RANK", "with mpirun"),
    missing(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "with mpirun"),
    missing(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK", "with mpirun"),
    missing(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "with mpirun"),
    missing(Launcher.MPICH, "PMI_RANK", "mpiexec of MPICH"),
    missing(Launcher.MPICH, "PMI_SIZE", "mpiexec of MPICH"),
    missing(Launcher.MPICH, "MPI_LOCALRANKID", "mpiexec of MPICH"),
    missing(Launcher.MPICH, "MPI_LOCALNRANKS", "mpiexec of MPICH"),
    missing(Launcher.SLURM, "SLURM_PROCID", "with srun"),
    missing(Launcher.SLURM, "SLURM_LOCALID", "with srun"),
    missing(Launcher.SLURM, "SLURM_JOB_ID", "export MASTER_PORT"),
    missing(Launcher.SLURM, "SLURM_STEP_ID", "export MASTER_PORT"),
    Broken(
        Launcher.MSRUN,
        {"MS_NODE_ID": "", "RANK_ID": "0"},  # RANK_ID is the scheduler's then
        "MS_NODE_ID is not set, so which rank this is nobody knows",
        "give msrun --node_rank=0 on the first node, --node_rank=1 on the next",
    ),
    Broken(
        Launcher.OPEN_MPI,
        {"MASTER_ADDR": ""},
        "4 of 8 ranks are on this node, and MASTER_ADDR is not set",
        "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    ),
    Broken(
        Launcher.MPICH,
        {"MASTER_ADDR": ""},
        "4 of 8 ranks are on this node, and MASTER_ADDR is not set",
        "mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT 29500",
    ),
    Broken(
        Launcher.SLURM,
        {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""},
        "SLURM_STEP_NODELIST, SLURM_JOB_NODELIST and MASTER_ADDR missing",
        "export MASTER_ADDR",
    ),
    *(
        Broken(
            Launcher.SLURM,
            {"SLURM_STEP_NUM_TASKS": ""} | exported,
            "SLURM_NTASKS is '8', and SLURM_STEP_NUM_TASKS is not set",
            "put srun before the command, or unset SLURM_NTASKS",
        )
        for exported in ({}, {"MASTER_ADDR": "node03", "MASTER_PORT": "29500"})
    ),
]


def wrong(launcher: Launcher, name: str, text: str) -> Broken:
    return Broken(launcher, {name: text}, f"{name} is {text!r}")


WRONG = [
    *(wrong(Launcher.TORCHRUN, name, "-1") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    *(wrong(Launcher.TORCH_NPU_RUN, name, "x") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
    wrong(Launcher.TORCHRUN, "TORCHELASTIC_RESTART_COUNT", "none"),
    wrong(Launcher.LOCAL, "NPU_PIPE_REPORT_FD", "x"),
    wrong(Launcher.MSRUN, "MS_ROLE", "MS_PSERVER"),
    wrong(Launcher.MSRUN, "MS_WORKER_NUM", "0"),
    wrong(Launcher.MSRUN, "MS_NODE_ID", "-1"),
    wrong(Launcher.MSRUN, "DEVICE_ID", "0,1"),
    wrong(Launcher.MSRUN, "MS_SCHED_PORT", "70000"),
    wrong(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_RANK", "one"),
    wrong(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "0"),
    wrong(Launcher.OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "4.0"),
    wrong(Launcher.OPEN_MPI, "MASTER_PORT", "http"),
    wrong(Launcher.MPICH, "PMI_RANK", "one"),
    wrong(Launcher.MPICH, "PMI_SIZE", "0"),
    wrong(Launcher.MPICH, "MPI_LOCALRANKID", "-1"),
    wrong(Launcher.MPICH, "MASTER_PORT", "0"),
    wrong(Launcher.SLURM, "SLURM_STEP_NUM_TASKS", "eight"),
    wrong(Launcher.SLURM, "SLURM_PROCID", "-1"),
    wrong(Launcher.SLURM, "SLURM_LOCALID", "x"),
    wrong(Launcher.SLURM, "SLURM_NODEID", "x"),
    wrong(Launcher.SLURM, "SLURM_STEP_TASKS_PER_NODE", "4 and 4"),
    wrong(Launcher.SLURM, "SLURM_STEP_NODELIST", "node[1-"),
    wrong(Launcher.SLURM, "SLURM_STEP_NODELIST", "(null)"),
    wrong(Launcher.SLURM, "MASTER_PORT", "-5"),
    wrong(Launcher.SLURM, "SLURM_JOB_ID", "x"),
    wrong(Launcher.SLURM, "SLURM_STEP_ID", " "),
]
CONTRADICTORY = [
    Broken(Launcher.TORCHRUN, {"RANK": "8"}, "RANK is 8, WORLD_SIZE is 8"),
    Broken(Launcher.TORCH_NPU_RUN, {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, LOCAL_WORLD_SIZE is 4"),
    Broken(Launcher.BY_HAND, {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9, WORLD_SIZE is 8"),
    Broken(Launcher.MSRUN, {"MS_NODE_ID": "8"}, "MS_NODE_ID is 8, MS_WORKER_NUM is 8", "each node"),
    Broken(Launcher.MSRUN, {"RANK_ID": "0"}, "MS_NODE_ID is 5, RANK_ID is 0"),
    Broken(Launcher.MSRUN, {"RANK_ID": "x"}, "MS_NODE_ID is 5, RANK_ID is 'x'"),
    Broken(Launcher.MSRUN, {"RANK_SIZE": "16"}, "MS_WORKER_NUM is 8, RANK_SIZE is 16"),
    Broken(Launcher.MSRUN, {"DEVICE_ID": "6"}, "DEVICE_ID is 6, MS_NODE_ID is 5"),
    Broken(Launcher.MSRUN, {"MS_SIMULATION_LEVEL": "1"}, "MS_SIMULATION_LEVEL is '1': a dry run"),
    Broken(
        Launcher.OPEN_MPI,
        {"OMPI_COMM_WORLD_RANK": "8"},
        "OMPI_COMM_WORLD_RANK is 8, OMPI_COMM_WORLD_SIZE is 8",
    ),
    Broken(
        Launcher.OPEN_MPI,
        {"OMPI_COMM_WORLD_LOCAL_RANK": "4"},
        "OMPI_COMM_WORLD_LOCAL_RANK is 4, OMPI_COMM_WORLD_LOCAL_SIZE is 4",
    ),
    Broken(
        Launcher.OPEN_MPI,
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "9"},
        "OMPI_COMM_WORLD_LOCAL_SIZE is 9, OMPI_COMM_WORLD_SIZE is 8",
    ),
    Broken(Launcher.OPEN_MPI, {"RANK": "2"}, "OMPI_COMM_WORLD_RANK is 5, RANK is 2", "unset RANK:"),
    Broken(Launcher.MPICH, {"PMI_RANK": "8"}, "PMI_RANK is 8, PMI_SIZE is 8"),
    Broken(Launcher.MPICH, {"MPI_LOCALRANKID": "4"}, "MPI_LOCALRANKID is 4, MPI_LOCALNRANKS is 4"),
    Broken(Launcher.MPICH, {"WORLD_SIZE": "2"}, "PMI_SIZE is 8, WORLD_SIZE is 2"),
    Broken(Launcher.SLURM, {"SLURM_PROCID": "8"}, "SLURM_PROCID is 8, SLURM_STEP_NUM_TASKS is 8"),
    Broken(Launcher.SLURM, {"SLURM_LOCALID": "9"}, "SLURM_LOCALID is 9, SLURM_STEP_NUM_TASKS is 8"),
    Broken(
        Launcher.SLURM,
        {"SLURM_LOCALID": "4"},
        "they are 1 and 4, SLURM_STEP_TASKS_PER_NODE is 4(x2), SLURM_STEP_NUM_TASKS is 8",
    ),
    Broken(
        Launcher.SLURM,
        {"SLURM_STEP_TASKS_PER_NODE": "4(x3)"},
        "they are 1 and 1, SLURM_STEP_TASKS_PER_NODE is 4(x3), SLURM_STEP_NUM_TASKS is 8",
    ),
    Broken(Launcher.SLURM, {"RANK": "0"}, "SLURM_PROCID is 5, RANK is 0", "unset RANK: srun"),
    Broken(
        Launcher.SLURM, {"SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION is 'arbitrary'"
    ),
    # Two launchers that never start each other.
    Broken(
        Launcher.MSRUN,
        {"TORCHELASTIC_RUN_ID": "none"},
        "TORCHELASTIC_RUN_ID says torchrun, MS_ROLE says msrun",
        "use one of them",
    ),
    Broken(
        Launcher.TORCH_NPU_RUN,
        {"MS_ROLE": "MS_WORKER"},
        "TORCH_NPU_USE_PARALLEL_TCPSTORE says torch_npu_run, MS_ROLE says msrun",
    ),
    Broken(
        Launcher.LOCAL,
        {"MS_ROLE": "MS_WORKER"},
        "NPU_PIPE_REPORT_FD says npu-pipe, MS_ROLE says msrun",
    ),
    Broken(
        Launcher.OPEN_MPI,
        MPICH,
        "OMPI_COMM_WORLD_RANK says mpirun of Open MPI, PMI_RANK says mpiexec of MPICH",
    ),
]


def _name(broken: Broken) -> str:
    change = ",".join(f"{name}={text}" for name, text in broken.change.items())
    return f"{broken.launcher.value}: {change}".replace("[", "(")


@pytest.mark.parametrize("broken", MISSING + WRONG + CONTRADICTORY, ids=_name)
def test_what_is_wrong_is_told_in_one_message(broken: Broken) -> None:
    with pytest.raises(ConfigError) as caught:
        World.from_environment(WHOLE[broken.launcher] | broken.change)
    error = caught.value
    assert broken.facts in error.facts
    assert broken.cure in error.cure
    assert "\n" not in str(error)


def test_every_launcher_that_is_read_is_in_the_tables() -> None:
    read = {reader.launcher for tier in TIERS for reader in tier}
    assert read == set(WHOLE)
    for cases in (MISSING, WRONG, CONTRADICTORY):
        of = {case.launcher for case in cases}
        assert of | {Launcher.LOCAL, Launcher.BY_HAND} >= read


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (SLURM | TORCHRUN, Launcher.TORCHRUN),
        (SLURM | TORCH_NPU_RUN, Launcher.TORCH_NPU_RUN),
        (SLURM | MSRUN, Launcher.MSRUN),
        (SLURM | OPEN_MPI | {"SLURM_PROCID": "1"}, Launcher.OPEN_MPI),
        (SLURM | MPICH | {"SLURM_PROCID": "1"}, Launcher.MPICH),
        (SLURM | SPAWNED, Launcher.LOCAL),
        (OPEN_MPI | TORCHRUN, Launcher.TORCHRUN),
        (OPEN_MPI | MSRUN, Launcher.MSRUN),
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, Launcher.SLURM),  # srun --mpi=pmi2
        (SLURM | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.4711.2"}, Launcher.SLURM),
        (SLURM | {"MASTER_ADDR": "node03", "MASTER_PORT": "29500"}, Launcher.SLURM),
        (SLURM | BY_HAND, Launcher.SLURM),  # which agree
        (MSRUN | BY_HAND | {"RANK": "0", "WORLD_SIZE": "2"}, Launcher.MSRUN),  # of the pod
        (BY_HAND | {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}, Launcher.BY_HAND),
    ],
)
def test_the_launcher_that_was_started_by_the_other_is_read(
    environ: Environ, launcher: Launcher
) -> None:
    world = World.from_environment(environ)
    assert (world.launcher, world.rank, world.size) == (launcher, 5, 8)


@pytest.mark.parametrize("whole", WHOLE.values(), ids=lambda whole: next(iter(whole)))
def test_an_empty_variable_of_another_launcher_says_nothing(whole: Environ) -> None:
    empty = dict.fromkeys((name for each in WHOLE.values() for name in each), "")
    assert World.from_environment(empty | whole) == World.from_environment(whole)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_scheduler_of_msrun_leaves_at_once_with_status_0(
    nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    # It has no rank, and on the master node RANK_ID is 0.
    environ = MSRUN | {"MS_ROLE": "MS_SCHED", "RANK_ID": "0", "MS_NODE_ID": "", "DEVICE_ID": ""}
    with pytest.raises(SystemExit) as left:
        World.from_environment(environ)
    assert left.value.code == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node7", "node7"),
        ("node7,other", "node7"),
        ("node[03-04]", "node03"),
        ("node[7,9-12],login", "node7"),
        ("rack[1-2]-node[01-16,20]", "rack1-node01"),
        ("gpu-a100.site.org,node[1-2]", "gpu-a100.site.org"),
        ("n[0009-0010]-ib", "n0009-ib"),
    ],
)
def test_the_ranks_of_a_slurm_step_meet_on_its_first_host(hosts: str, first: str) -> None:
    assert World.from_environment(SLURM | {"SLURM_STEP_NODELIST": hosts}).address == first


def test_slurm_falls_back_to_the_jobs_hosts_and_gives_way_to_master_addr() -> None:
    jobs = World.from_environment(SLURM | {"SLURM_STEP_NODELIST": ""})
    assert jobs.sources is not None
    assert (jobs.address, jobs.sources.address) == ("node01", "first host of SLURM_JOB_NODELIST")
    given = World.from_environment(
        SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "7", "SLURM_DISTRIBUTION": "arbitrary"}
    )
    assert given.sources is not None
    assert (given.address, given.port) == ("a", 7)
    assert (given.sources.address, given.sources.port) == ("MASTER_ADDR", "MASTER_PORT")


def test_steps_of_a_job_and_jobs_of_a_host_meet_at_ports_of_their_own() -> None:
    ports = {
        World.from_environment(SLURM | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port
        for job in range(4711, 4716)
        for step in range(4)
    }
    assert len(ports) == 20
    assert all(15000 <= port < 30000 for port in ports)


@pytest.mark.parametrize("tasks", ["4(x2)", "4,4", "3,4,1"])
def test_slurm_tells_how_many_ranks_this_machine_has(tasks: str) -> None:
    assert World.from_environment(SLURM | {"SLURM_STEP_TASKS_PER_NODE": tasks}).local_size == 4


def test_a_shell_or_script_of_slurm_with_one_task_is_one_process() -> None:
    step = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    batch = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    for environ in (step, batch, batch | {"SLURM_NTASKS": ""}):
        assert World.from_environment(environ) == World.single()


@pytest.mark.parametrize(
    ("whole", "local", "port", "source"),
    [
        (
            OPEN_MPI,
            "OMPI_COMM_WORLD_LOCAL_SIZE",
            derived_port("473235457"),
            "made from PMIX_NAMESPACE",
        ),
        (MPICH, "MPI_LOCALNRANKS", 29500, "torch's usual port"),
    ],
)
def test_on_one_node_the_ranks_of_an_mpi_meet_on_loopback(
    whole: Environ, local: str, port: int, source: str
) -> None:
    world = World.from_environment(whole | {local: "8", "MASTER_ADDR": "", "MASTER_PORT": ""})
    assert (world.address, world.port) == ("127.0.0.1", port)
    assert world.sources is not None
    assert world.sources.port == source


def test_a_local_launch_inside_any_other_is_its_own() -> None:
    outer = TORCH_NPU_RUN | MSRUN | OPEN_MPI | SLURM
    assert World.from_environment(rank_environment(LOCAL, outer)) == LOCAL
