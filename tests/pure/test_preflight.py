"""What a job's lanes take of each NPU is counted, and refused where it cannot go well."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from npu_pipe import build_schedule
from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.preflight import HcclSettings
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.errors import ConfigError
from npu_pipe.launch.mesh import Mesh
from npu_pipe.launch.preflight import hccl_settings, preflight
from npu_pipe.runtime.tied import Tied
from npu_pipe.train.job import Job, check_job, check_settings
from npu_pipe.train.toml import read_toml

GPT_TINY = Path(__file__).parents[2] / "configs" / "gpt_tiny.toml"


def test_a_chain_has_one_communicator_a_neighbour_and_lane() -> None:
    pairs = pairs_used(build_schedule("1f1b", ranks=4, microbatches=4))
    assert [(str(lane), low, high) for lane, low, high in pairs] == [
        *(("down", 0, 1), ("down", 1, 2), ("down", 2, 3)),
        *(("up", 0, 1), ("up", 1, 2), ("up", 2, 3)),
    ]


def test_a_ring_a_mirror_and_tied_copies_connect_ranks_that_are_no_neighbours() -> None:
    ring = pairs_used(build_schedule("interleaved-1f1b", ranks=4, microbatches=4))
    assert {(low, high) for _, low, high in ring} == {(0, 1), (1, 2), (2, 3), (0, 3)}
    mirror = pairs_used(build_schedule("dualpipe", ranks=4, microbatches=8))
    assert {(low, high) for _, low, high in mirror} == {(0, 1), (1, 2), (2, 3), (0, 3)}
    chain = build_schedule("1f1b", ranks=4, microbatches=4)
    tied = pairs_used(chain, [Tied((0, "a.weight"), (3, "b.weight"))])
    assert set(tied) - set(pairs_used(chain)) == {("down", 0, 3), ("up", 0, 3)}


def test_the_table_says_what_each_rank_takes() -> None:
    schedule = build_schedule("1f1b", ranks=3, microbatches=4)
    environ = {"P2P_HCCL_BUFFSIZE": "10"}
    assert preflight(schedule, backend="hccl", local_rank=0, environ=environ) == (
        "rank  communicators  buffers  streams\n"
        "   0              2    40 MB  12 of 32\n"
        "   1              4    80 MB  14 of 32\n"
        "   2              2    40 MB  12 of 32\n"
        "ports from 60000; time-outs: connect 120 s, exec 1800 s, event 1868 s\n"
        "lanes: prefetch 2"
    )
    assert preflight(schedule, backend="gloo", local_rank=0, environ=environ) is None


@pytest.mark.parametrize(
    ("variables", "facts"),
    [
        ({"HCCL_EXEC_TIMEOUT": "60"}, "they are 120, 60, 1868 seconds"),
        ({"HCCL_EVENT_TIMEOUT": "1800"}, "they are 120, 1800, 1800 seconds"),
        ({"HCCL_IF_BASE_PORT": "65530"}, "local rank 7 would use port 65537"),
        ({"STREAMS_PER_DEVICE": "8"}, "rank 1 needs 14, 4 of them for communicators"),
        ({"P2P_HCCL_BUFFSIZE": "20MB"}, "P2P_HCCL_BUFFSIZE is '20MB'"),
        ({"P2P_HCCL_BUFFSIZE": "0"}, "from 1 to"),
        ({"P2P_HCCL_BUFFSIZE": ""}, "P2P_HCCL_BUFFSIZE is ''"),
        ({"HCCL_BUFFSIZE": "1G"}, "HCCL_BUFFSIZE is '1G'"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_the_cure(
    variables: dict[str, str], facts: str
) -> None:
    schedule = build_schedule("1f1b", ranks=8, microbatches=8)
    with pytest.raises(ConfigError, match=facts):
        preflight(schedule, backend="hccl", local_rank=7, environ=variables)


def test_a_port_that_another_process_listens_on_is_refused() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environ = {"HCCL_IF_BASE_PORT": str(port - 1)}
        with pytest.raises(ConfigError, match=f"port {port}, of local rank 1, is in use"):
            preflight(schedule, backend="hccl", local_rank=1, environ=environ)
    assert preflight(schedule, backend="hccl", local_rank=1, environ=environ)


def test_the_job_comes_before_the_environment_and_the_table_says_what_lanes_are_made_with() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    lanes = LaneOptions(buffer_mb=5, traffic_class=132, expansion_mode=2, transfer_s=900)
    environ = {"P2P_HCCL_BUFFSIZE": "10", "HCCL_EXEC_TIMEOUT": "1500"}
    told = preflight(
        schedule, backend="hccl", local_rank=0, lanes=lanes, prefetch=3, environ=environ
    )
    assert told == (
        "rank  communicators  buffers  streams\n"
        "   0              2    20 MB  12 of 32\n"
        "   1              2    20 MB  12 of 32\n"
        "ports from 60000; time-outs: connect 120 s, exec 900 s, event 1868 s\n"
        "lanes: prefetch 3, traffic class 132, expansion mode 2"
    )
    with pytest.raises(ConfigError, match="they are 120, 100, 1868 seconds"):
        preflight(schedule, backend="hccl", local_rank=0, lanes=LaneOptions(transfer_s=100))


def test_options_that_a_backend_does_not_have_are_named() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    lanes = LaneOptions(buffer_mb=5, service_level=4)
    told = {b: preflight(schedule, backend=b, local_rank=0, lanes=lanes) for b in ("nccl", "gloo")}
    assert told == {
        "nccl": "nccl does not have lanes.service_level: without effect",
        "gloo": "gloo does not have lanes.buffer_mb, lanes.service_level: without effect",
    }


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (LaneOptions(buffer_mb=0), "lanes.buffer_mb is from 1 to 65536; it is 0"),
        (LaneOptions(traffic_class=256), "lanes.traffic_class is from 0 to 255"),
        (LaneOptions(service_level=-1), "lanes.service_level is from 0 to 7"),
        (LaneOptions(expansion_mode=4), "lanes.expansion_mode is from 0 to 3"),
        (LaneOptions(transfer_s=0), "lanes.transfer_s is from 1 to"),
    ],
)
def test_an_option_of_a_job_outside_its_bounds_is_refused(options: LaneOptions, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        check_job(replace(read_toml(Job, GPT_TINY), lanes=options))


def test_a_kind_of_device_that_nobody_knows_is_refused_wherever_a_job_is_read() -> None:
    """Also where nothing is started, so that no device is looked for."""
    job = read_toml(Job, GPT_TINY)
    with pytest.raises(ConfigError, match="devices are auto, npu, cuda, cpu; 'gpu' was asked for"):
        check_settings(replace(job, run=replace(job.run, device="gpu")))


def test_an_empty_environment_has_the_defaults() -> None:
    assert hccl_settings(environ={}) == HcclSettings()


def test_what_a_job_says_is_not_looked_for_in_the_environment() -> None:
    lanes = LaneOptions(buffer_mb=5, transfer_s=900)
    environ = {"P2P_HCCL_BUFFSIZE": "", "HCCL_EXEC_TIMEOUT": "soon"}
    assert hccl_settings(lanes, environ) == HcclSettings(buffer_mb=5, exec_s=900)


def test_groups_of_replicas_and_of_cut_layers_are_counted_too() -> None:
    """They have a communicator of the whole group, with the larger buffers of HCCL_BUFFSIZE."""
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    mesh = Mesh(dp=2, pp=2, tp=2)
    assert preflight(schedule, backend="hccl", local_rank=0, mesh=mesh, environ={}) == (
        "rank  communicators  buffers  streams\n"
        "   0              4   880 MB  14 of 32\n"
        "   1              4   880 MB  14 of 32\n"
        "one of its communicators is of dp ranks, with 2 x 200 MB\n"
        "one of its communicators is of tp ranks, with 2 x 200 MB\n"
        "ports from 60000; time-outs: connect 120 s, exec 1800 s, event 1868 s\n"
        "lanes: prefetch 2"
    )


def test_buffers_that_the_device_has_no_memory_for_are_refused() -> None:
    schedule = build_schedule("1f1b", ranks=2, microbatches=4)
    with pytest.raises(ConfigError, match="needs 480 MB for 3, and 400 MB are free"):
        preflight(
            schedule,
            backend="hccl",
            local_rank=0,
            mesh=Mesh(dp=2, pp=2),
            room_bytes=400e6,
            environ={},
        )


def test_counting_needs_no_torch() -> None:
    code = "import sys, npu_pipe.launch.preflight; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
