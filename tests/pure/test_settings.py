"""Environment variables that matter to a pipeline: what is wrong is found, what is right is not."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from npu_pipe.finding import Verdict
from npu_pipe.launch.host import Host
from npu_pipe.launch.interfaces import matching
from npu_pipe.launch.settings import WATCHED, setting_findings, values_found
from npu_pipe.launch.surroundings import Surroundings, cann_folders, given_environment

HOST = Host("node7", cores=16, interfaces=("lo", "eth0", "enp1"))


def around(backend: str = "hccl", **variables: str) -> Surroundings:
    return Surroundings(environ=variables, host=HOST, backend=backend, local_ranks=8)


def wrong(at: Surroundings) -> list[tuple[Verdict, str]]:
    first, *rest = setting_findings(at)
    assert first.verdict is Verdict.OK, "the list of what is set"
    assert all(finding.cure for finding in rest), "whatever is wrong has a cure"
    return [(finding.verdict, f"{finding.facts}; {finding.cure}") for finding in rest]


# Variables, what must be said of them, and what that means where HCCL is used, and where not.
WRONG = [
    (
        {"HCCL_EXEC_TIMEOUT": "100"},
        ("CONNECT_TIMEOUT < HCCL_EXEC_TIMEOUT", "120, 100, 1868"),
        Verdict.REFUSE,
        Verdict.WARN,
    ),
    ({"HCCL_CONNECT_TIMEOUT": "7200"}, ("7200, 1800, 1868",), Verdict.REFUSE, Verdict.WARN),
    ({"HCCL_EVENT_TIMEOUT": "1800"}, ("120, 1800, 1800",), Verdict.REFUSE, Verdict.WARN),
    (
        {"STREAMS_PER_DEVICE": "many"},
        ("STREAMS_PER_DEVICE is a whole number", "'many'"),
        Verdict.REFUSE,
        Verdict.WARN,
    ),
    ({"HCCL_IF_BASE_PORT": "65533"}, ("port 65540",), Verdict.REFUSE, Verdict.WARN),
    ({"ASCEND_LAUNCH_BLOCKING": "1"}, ("nothing runs beside",), Verdict.WARN, Verdict.WARN),
    ({"CUDA_LAUNCH_BLOCKING": "1"}, ("nothing runs beside",), Verdict.WARN, Verdict.WARN),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, ("nothing runs beside",), Verdict.WARN, Verdict.WARN),
    ({"P2P_HCCL_BUFFSIZE": "0"}, ("whole number from 1",), Verdict.REFUSE, Verdict.WARN),
    ({"P2P_HCCL_BUFFSIZE": ""}, ("is ''; unset it",), Verdict.REFUSE, Verdict.WARN),
    ({"P2P_HCCL_BUFFSIZE": "400"}, ("3200 MB",), Verdict.WARN, Verdict.WARN),
    ({"HCCL_BUFFSIZE": "0"}, ("whole number from 1",), Verdict.REFUSE, Verdict.WARN),
    ({"HCCL_BUFFSIZE": "1G"}, ("whole number from 1", "'1G'"), Verdict.REFUSE, Verdict.WARN),
    ({"TASK_QUEUE_ENABLE": "0"}, ("the thread that computes",), Verdict.WARN, Verdict.WARN),
    ({"TASK_QUEUE_ENABLE": "on"}, ("0, 1 or 2", "'on'"), Verdict.WARN, Verdict.WARN),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, ("one way",), Verdict.WARN, Verdict.WARN),
    (
        {"OMP_NUM_THREADS": "4"},
        ("4 x 8 ranks on 16 cores", "OMP_NUM_THREADS=2"),
        Verdict.WARN,
        Verdict.WARN,
    ),
    *(
        ({"OMP_NUM_THREADS": text}, ("no number of threads",), Verdict.WARN, Verdict.WARN)
        for text in ("all", "0")
    ),
    (
        {"GLOO_SOCKET_IFNAME": "eth1"},
        ("names no interface", "node7 has lo, eth0, enp1"),
        Verdict.REFUSE,
        Verdict.REFUSE,
    ),
    ({"GLOO_SOCKET_IFNAME": "eth0,eth1"}, ("there: eth1,",), Verdict.REFUSE, Verdict.REFUSE),
    ({"HCCL_SOCKET_IFNAME": "=eth"}, ("names no interface",), Verdict.REFUSE, Verdict.WARN),
    ({"NCCL_SOCKET_IFNAME": "ib"}, ("names no interface",), Verdict.WARN, Verdict.WARN),
    ({"HCCL_IF_IP": "192.0.2.7"}, ("no address of node7",), Verdict.REFUSE, Verdict.WARN),
    ({"HCCL_WHITELIST_DISABLE": "0"}, ("HCCL_WHITELIST_FILE",), Verdict.REFUSE, Verdict.WARN),
    ({"ASCEND_GLOBAL_LOG_LEVEL": "0"}, ("logs each call",), Verdict.WARN, Verdict.WARN),
    ({"NCCL_DEBUG": "TRACE"}, ("logs each call",), Verdict.WARN, Verdict.WARN),
    ({"NCCL_P2P_DISABLE": "1"}, ("through its memory",), Verdict.WARN, Verdict.WARN),
    ({"PYTORCH_NO_NPU_MEMORY_CACHING": "1"}, ("waits for the device",), *[Verdict.WARN] * 2),
    ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, ("waits for the device",), *[Verdict.WARN] * 2),
    ({"TORCH_HCCL_ASYNC_ERROR_HANDLING": "1"}, ("npu-pipe sets 0",), *[Verdict.WARN] * 2),
    ({"MS_ROLE": "MS_WORKER", "RANK_SIZE": "8"}, ("MS_ROLE, RANK_SIZE",), *[Verdict.WARN] * 2),
    (
        {"LD_LIBRARY_PATH": "/usr/lib:/x/mindspore/lib/plugin"},
        ("folders of mindspore",),
        Verdict.WARN,
        Verdict.WARN,
    ),
]


@pytest.mark.parametrize(("variables", "words", "with_hccl", "without"), WRONG)
def test_a_wrong_variable_is_one_finding_with_its_value_and_a_cure(
    variables: dict[str, str], words: tuple[str, ...], with_hccl: Verdict, without: Verdict
) -> None:
    for backend, verdict in (("hccl", with_hccl), ("gloo", without)):
        ((found, text),) = wrong(around(backend, **variables))
        assert found is verdict
        assert all(word in text for word in words), text
        assert any(name in text for name in variables)


@pytest.mark.parametrize(
    "name", ["HCCL_BUFFSIZE", "P2P_HCCL_BUFFSIZE", "HCCL_EXEC_TIMEOUT", "OMP_NUM_THREADS"]
)
@pytest.mark.parametrize("text", ["\u00b2", "\u0663", "9" * 5000, "-3", "1e9", "\udcff"])
def test_what_only_python_or_nobody_takes_for_a_number_is_a_finding(name: str, text: str) -> None:
    (finding,) = wrong(around(**{name: text}))
    assert name in finding[1]
    assert len(finding[1]) < 300


def test_ranks_that_stay_on_one_host_do_not_use_the_network_of_gloo() -> None:
    at = around("gloo", GLOO_SOCKET_IFNAME="nonsense")
    assert [verdict for verdict, _ in wrong(at)] == [Verdict.REFUSE]
    # npu-pipe train would run: it has its own ranks meet on loopback.
    assert [verdict for verdict, _ in wrong(replace(at, is_alone=True))] == [Verdict.WARN]


def test_nccl_needs_an_interface_of_its_variable() -> None:
    ((verdict, _),) = wrong(around("nccl", NCCL_SOCKET_IFNAME="ib"))
    assert verdict is Verdict.REFUSE


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OMP_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "1"},
        {"HCCL_CONNECT_TIMEOUT": "600"},  # as msrun sets it
        {"HCCL_CONNECT_TIMEOUT": "7200", "HCCL_EXEC_TIMEOUT": "7201", "HCCL_EVENT_TIMEOUT": "7300"},
        {"HCCL_BUFFSIZE": "400", "P2P_HCCL_BUFFSIZE": "40", "STREAMS_PER_DEVICE": "32"},
        {"TASK_QUEUE_ENABLE": "2", "ASCEND_LAUNCH_BLOCKING": "0", "CUDA_LAUNCH_BLOCKING": ""},
        {"GLOO_SOCKET_IFNAME": "eth0", "HCCL_SOCKET_IFNAME": "eth", "NCCL_SOCKET_IFNAME": "^lo"},
        {"HCCL_IF_IP": "127.0.0.1", "HCCL_WHITELIST_DISABLE": "1"},
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},  # torch_npu is not here, or CANN is
    ],
)
def test_what_is_right_or_a_default_is_no_finding(variables: dict[str, str]) -> None:
    for backend in ("hccl", "nccl", "gloo"):
        assert wrong(around(backend, **variables)) == []


def test_autoload_matters_where_torch_npu_is_without_cann() -> None:
    def at(**variables: str) -> Surroundings:
        return Surroundings(
            environ=variables, host=HOST, backend="gloo", local_ranks=1, is_bare=True
        )

    ((verdict, text),) = wrong(at())
    assert verdict is Verdict.WARN
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text
    assert wrong(at(TORCH_DEVICE_BACKEND_AUTOLOAD="0")) == []


def test_under_msrun_its_own_variables_are_no_leak_and_its_one_thread_is_told() -> None:
    at = Surroundings(
        environ={"MS_ROLE": "MS_WORKER", "OMP_NUM_THREADS": "1"},
        host=Host("node7", cores=192, interfaces=("lo",)),
        backend="hccl",
        local_ranks=8,
        is_msrun=True,
    )
    ((verdict, text),) = wrong(at)
    assert verdict is Verdict.WARN
    assert "msrun sets it" in text
    assert "up to 24" in text


def test_what_is_set_is_listed_with_its_values_in_one_order() -> None:
    at = around(STREAMS_PER_DEVICE="32", OMP_NUM_THREADS="2", OTHER="1")
    assert values_found(at) == {"OMP_NUM_THREADS": "2", "STREAMS_PER_DEVICE": "32"}
    assert setting_findings(at)[0].facts == "OMP_NUM_THREADS=2, STREAMS_PER_DEVICE=32"
    assert len(set(WATCHED)) == len(WATCHED)


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("e", ("eth0", "enp1")),
        ("eth,enp", ("eth0", "enp1")),
        ("=eth0", ("eth0",)),
        ("=eth,lo", ("lo",)),
        ("^lo", ("eth0", "enp1")),
        ("^=eth0,enp", ("lo", "enp1")),
        ("ib", ()),
        ("^l,e", ()),
    ],
)
def test_interfaces_are_named_as_hccl_and_nccl_do(pattern: str, left: tuple[str, ...]) -> None:
    assert matching(pattern, HOST.interfaces) == left


def test_the_environment_is_that_which_the_process_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not what our own command line makes of it."""
    monkeypatch.setenv("NPU_PIPE_TEST_LATER", "1")
    given = given_environment()
    assert "NPU_PIPE_TEST_LATER" not in given
    assert given["PATH"]


def test_cann_lies_where_its_variables_say_and_else_where_it_is_installed() -> None:
    first, *rest = cann_folders({"ASCEND_HOME_PATH": "/opt/cann"})
    assert str(first) == "/opt/cann"
    assert tuple(rest) == cann_folders({})


def test_this_hosts_interfaces_can_be_named() -> None:
    at = Surroundings(
        environ={"GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1]},
        host=Host("here", 1, tuple(name for _, name in socket.if_nameindex())),
        backend="gloo",
        local_ranks=1,
    )
    assert wrong(at) == []
