"""World: every launcher's environment, whole and broken."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npu_pipe.errors import ConfigError
from npu_pipe.launch.spawned import rank_environment
from npu_pipe.launch.world import Launcher, World

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
LOCAL = World(
    rank=2,
    size=4,
    local_rank=2,
    local_size=4,
    address="127.0.0.1",
    port=4711,
    launcher=Launcher.LOCAL,
    report_fd=5,
    lifeline_fd=6,
)


def without(*names: str) -> dict[str, str]:
    return {name: text for name, text in TORCHRUN.items() if name not in names}


@pytest.mark.parametrize("environ", [{}, {"PATH": "/bin", "OMP_NUM_THREADS": "3"}, {"RANK": ""}])
def test_no_launcher_means_one_process(environ: dict[str, str]) -> None:
    assert World.from_environment(environ) == World.single()


def test_torchrun_is_read_whole() -> None:
    assert World.from_environment(TORCHRUN) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        address="node0",
        port=29500,
        launcher=Launcher.TORCHRUN,
        restarts=2,
        agent_store=True,
    )


@pytest.mark.parametrize("text", ["False", "true", "1"])
def test_only_the_word_true_means_agent_store_as_in_torch(text: str) -> None:
    world = World.from_environment(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": text})
    assert not world.agent_store


def test_the_five_variables_set_by_hand_are_enough() -> None:
    world = World.from_environment(
        without(*(n for n in TORCHRUN if n.startswith("TORCHELASTIC")), "LOCAL_WORLD_SIZE")
    )
    assert (world.rank, world.restarts, world.agent_store) == (5, 0, False)


@pytest.mark.parametrize(
    "missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
)
def test_a_missing_variable_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"set, {missing} missing; start the ranks with torchrun"):
        World.from_environment(without(missing))


def test_a_lone_variable_is_refused_with_all_that_are_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        World.from_environment({"MASTER_ADDR": "node0"})
    assert caught.value.facts == (
        "MASTER_ADDR set, RANK, WORLD_SIZE, LOCAL_RANK and MASTER_PORT missing"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "x"),
        ("RANK", "-1"),
        ("RANK", "1.0"),
        ("RANK", " 1"),
        ("RANK", "1_0"),
        ("RANK", "\u0661"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_RANK", "first"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "http"),
        ("TORCHELASTIC_RESTART_COUNT", "-1"),
    ],
)
def test_a_value_that_is_no_number_of_its_range_is_refused_and_named(name: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        World.from_environment(TORCHRUN | {name: text})
    assert caught.value.facts == f"{name} is {text!r}"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"RANK": "8"}, "RANK is 8, WORLD_SIZE is 8"),
        ({"LOCAL_RANK": "9"}, "LOCAL_RANK is 9, WORLD_SIZE is 8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK is 4, LOCAL_WORLD_SIZE is 4"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9, WORLD_SIZE is 8"),
    ],
)
def test_values_that_contradict_each_other_are_both_named(
    change: dict[str, str], facts: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        World.from_environment(TORCHRUN | change)
    assert caught.value.facts == facts


def test_what_the_local_launch_writes_is_what_it_reads() -> None:
    assert World.from_environment(rank_environment(LOCAL, {})) == LOCAL


def test_a_rank_of_the_local_launch_keeps_the_users_threads_and_forgets_an_outer_launcher() -> None:
    outer = TORCHRUN | {"OMP_NUM_THREADS": "3", "NPU_PIPE_LISTEN_FD": "9", "HOME": "/h"}
    environ = rank_environment(LOCAL, outer)
    assert World.from_environment(environ) == LOCAL
    assert (environ["OMP_NUM_THREADS"], environ["HOME"]) == ("3", "/h")
    for nothing in ({}, {"OMP_NUM_THREADS": ""}):
        assert rank_environment(LOCAL, nothing)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"NPU_PIPE_LIFELINE_FD": ""}, "NPU_PIPE_REPORT_FD set, NPU_PIPE_LIFELINE_FD missing"),
        ({"NPU_PIPE_REPORT_FD": "x"}, "NPU_PIPE_REPORT_FD is 'x'"),
        (
            {"TORCHELASTIC_RUN_ID": "none"},
            "NPU_PIPE_REPORT_FD says npu-pipe, TORCHELASTIC_RUN_ID says torchrun",
        ),
    ],
)
def test_a_broken_environment_of_the_local_launch_is_refused(
    change: dict[str, str], facts: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        World.from_environment(rank_environment(LOCAL, {}) | change)
    assert caught.value.facts == facts


@pytest.mark.parametrize(("rank", "local_rank"), [(-1, 0), (4, 0), (0, -1), (0, 4)])
def test_a_world_cannot_be_made_with_a_rank_outside_of_it(rank: int, local_rank: int) -> None:
    with pytest.raises(ConfigError, match="numbered from 0 to size - 1"):
        World(
            rank=rank,
            size=4,
            local_rank=local_rank,
            address="127.0.0.1",
            port=1,
            launcher=Launcher.TORCHRUN,
        )


def test_the_launch_layer_imports_no_torch() -> None:
    code = (
        "import sys, npu_pipe.launch.local, npu_pipe.launch.guard, npu_pipe.launch.store;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
