"""What a job's lanes take of each NPU is counted, and refused where it cannot go well."""

from __future__ import annotations

import subprocess
import sys

import pytest

from npu_pipe import build_schedule
from npu_pipe.comm.device_pairs import pairs_used
from npu_pipe.comm.preflight import HcclSettings
from npu_pipe.errors import ConfigError
from npu_pipe.launch.preflight import hccl_settings, preflight
from npu_pipe.runtime.tied import Tied


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
        "   0              2    40 MB  11 of 32\n"
        "   1              4    80 MB  13 of 32\n"
        "   2              2    40 MB  11 of 32\n"
        "ports from 60000; time-outs: connect 120 s, exec 1800 s, event 1868 s"
    )
    assert preflight(schedule, backend="gloo", local_rank=0, environ=environ) is None


@pytest.mark.parametrize(
    ("variables", "facts"),
    [
        ({"HCCL_EXEC_TIMEOUT": "60"}, "they are 120, 60, 1868 seconds"),
        ({"HCCL_EVENT_TIMEOUT": "1800"}, "they are 120, 1800, 1800 seconds"),
        ({"HCCL_IF_BASE_PORT": "65530"}, "local rank 7 would use port 65537"),
        ({"STREAMS_PER_DEVICE": "8"}, "rank 1 needs 13, 4 of them for communicators"),
        ({"P2P_HCCL_BUFFSIZE": "20MB"}, "P2P_HCCL_BUFFSIZE is '20MB'"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_the_cure(
    variables: dict[str, str], facts: str
) -> None:
    schedule = build_schedule("1f1b", ranks=8, microbatches=8)
    with pytest.raises(ConfigError, match=facts):
        preflight(schedule, backend="hccl", local_rank=7, environ=variables)


def test_an_empty_environment_has_the_defaults() -> None:
    assert hccl_settings({"HCCL_CONNECT_TIMEOUT": ""}) == HcclSettings()


def test_counting_needs_no_torch() -> None:
    code = "import sys, npu_pipe.launch.preflight; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
