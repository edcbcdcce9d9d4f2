"""What a host is: memory, versions and ports, read from files and sockets that a test makes."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from npu_pipe.comm.preflight import HcclSettings
from npu_pipe.device.versions import Versions, minor_of, versions_here
from npu_pipe.finding import Finding, Verdict
from npu_pipe.launch.host import Host, memory_finding, this_host
from npu_pipe.launch.ports import port_findings
from npu_pipe.launch.world import Launcher, World

GIB = 1 << 30


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_memory_is_that_of_the_host_or_of_its_container(tmp_path: Path) -> None:
    put(tmp_path, "proc/meminfo", "MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\nHuge: 0\n")
    host = this_host(tmp_path)
    assert (host.memory_bytes, host.available_bytes) == (16 * GIB, 8 * GIB)
    put(tmp_path, "sys/fs/cgroup/memory.max", f"{4 * GIB}\n")
    put(tmp_path, "sys/fs/cgroup/memory.current", f"{GIB}\n")
    host = this_host(tmp_path)
    assert (host.memory_bytes, host.available_bytes) == (4 * GIB, 3 * GIB)
    put(tmp_path, "sys/fs/cgroup/memory.max", "max\n")
    assert this_host(tmp_path).memory_bytes == 16 * GIB


def test_too_little_memory_for_the_ranks_is_told(tmp_path: Path) -> None:
    host = Host("here", 2, ("lo",), 4 * GIB, 3 * GIB)
    assert memory_finding(host, local_ranks=4).verdict is Verdict.OK
    found = memory_finding(host, local_ranks=8)
    assert found.verdict is Verdict.WARN
    assert "3.0 of 4.0 GiB" in found.facts
    unknown = memory_finding(this_host(tmp_path), local_ranks=8)
    assert unknown.facts == "the system does not tell"


def test_versions_of_ascend_are_read_where_its_installers_leave_them(tmp_path: Path) -> None:
    none = versions_here((tmp_path,), system=tmp_path)
    assert (none.cann, none.npu_driver, none.cuda_driver) == (None, None, None)
    assert none.torch is not None
    text = "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\narch=aarch64\n"
    put(tmp_path, "cann/aarch64-linux/ascend_toolkit_install.info", text)
    put(tmp_path, "etc/ascend_install.info", "Driver_Install_Path_Param=/opt/Ascend\n")
    put(tmp_path, "opt/Ascend/driver/version.info", "Version=25.0.rc1\nascendhal_version=7\n")
    put(
        tmp_path,
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul\nGCC version:\n",
    )
    found = versions_here((tmp_path / "absent", tmp_path / "cann"), system=tmp_path)
    assert (found.cann, found.npu_driver, found.cuda_driver) == ("8.3.RC1", "25.0.rc1", "580.65.06")
    assert "CANN 8.3.RC1, npu driver 25.0.rc1, cuda driver 580.65.06" in found.told()


def test_the_driver_is_found_where_it_is_by_default(tmp_path: Path) -> None:
    put(tmp_path, "usr/local/Ascend/driver/version.info", "Version=24.1.0\n")
    assert versions_here((), system=tmp_path).npu_driver == "24.1.0"


def test_cuda_is_what_torch_says_of_itself_where_pip_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheels of PyPI are called 2.13.0, and have CUDA."""
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
    (tmp_path / "torch").mkdir()
    text = "__all__ = ['cuda']\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    found = versions_here((), system=tmp_path)
    assert (found.torch, found.cuda) == ("2.13.0+cu130", "13.0")
    (tmp_path / "torch" / "version.py").write_text(text.replace("'13.0'", "None"))
    assert versions_here((), system=tmp_path).cuda is None
    (tmp_path / "torch" / "version.py").unlink()
    assert versions_here((), system=tmp_path).torch == "2.13.0"


@pytest.mark.parametrize(
    ("text", "minor"), [("2.13.0+cpu", "2.13"), ("2.13.1", "2.13"), ("2.9.0.post1", "2.9")]
)
def test_two_packages_pair_by_the_first_two_numbers(text: str, minor: str) -> None:
    assert minor_of(text) == minor


def test_what_is_not_there_is_not_told() -> None:
    nothing = Versions("3.12.1", *[None] * 8)
    assert nothing.told() == "python 3.12.1"
    assert replace(nothing, torch_npu="2.13.0").told() == "python 3.12.1, torch_npu 2.13.0"


def a_world(**changes: object) -> World:
    values = {
        "rank": 0,
        "size": 4,
        "local_rank": 0,
        "address": "127.0.0.1",
        "port": 29500,
        "launcher": Launcher.TORCHRUN,
    }
    return World(**(values | changes))  # type: ignore[arg-type]


def test_a_port_in_use_is_refused_where_this_rank_would_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def found(world: World) -> Verdict:
            (finding,) = port_findings(world, local_ranks=4, backend="gloo", settings=None)
            assert str(port) in finding.facts
            return finding.verdict

        assert found(a_world(port=port)) is Verdict.REFUSE
        assert found(a_world(port=port, agent_store=True)) is Verdict.OK, "torchrun listens there"
        assert found(a_world(port=port, rank=1, local_rank=1)) is Verdict.OK
    assert found(a_world(port=port)) is Verdict.OK


def test_a_host_without_loopback_is_told_before_its_ranks_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a network namespace of its own, where `lo` is there and down."""

    def unreachable(*_: object, **__: object) -> socket.socket:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    def found() -> Finding:
        return port_findings(World.single(), local_ranks=2, backend="gloo", settings=None)[0]

    assert found().verdict is Verdict.OK
    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert found().verdict is Verdict.REFUSE
    assert "127.0.0.1, which does not answer: Network is unreachable" in found().facts
    assert found().cure == "ip link set lo up"


def test_hccls_ports_in_use_are_refused_where_hccl_is_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = HcclSettings(base_port=taken.getsockname()[1])

        def verdicts(backend: str) -> list[Verdict]:
            found = port_findings(World.single(), local_ranks=1, backend=backend, settings=settings)
            return [finding.verdict for finding in found]

        assert verdicts("hccl") == [Verdict.OK, Verdict.REFUSE]
        assert verdicts("gloo") == [Verdict.OK]
    assert verdicts("hccl") == [Verdict.OK, Verdict.OK]
