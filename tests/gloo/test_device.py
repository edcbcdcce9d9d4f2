"""Which device is chosen, and what is said where one cannot be used."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from npu_pipe.device.choose import KINDS, choose, device_of
from npu_pipe.device.cuda import Cuda
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.device.npu import hccl_variables
from npu_pipe.errors import ConfigError
from npu_pipe.ir.action import Action, Kind


def pretend_torch_npu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, code: str
) -> None:
    """A package and its metadata, in front of all others."""
    metadata = folder / f"torch_npu-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
    package = folder / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)


NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file: No such file')"
SAME = ".".join(torch.__version__.split("+")[0].split(".")[:2]) + ".0"


def test_torch_npu_without_cann_is_one_sentence_with_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_torch_npu(tmp_path, monkeypatch, SAME, NO_CANN)
    with pytest.raises(ConfigError) as caught:
        choose("npu", index=0)
    assert str(caught.value) == (
        "an NPU is used through torch_npu of torch's own version, and CANN; "
        f"torch_npu {SAME} does not load: libhccl.so: cannot open shared object file: "
        "No such file; install CANN and source its set_env.sh, or compute on the CPU"
    )


def test_torch_npu_of_another_minor_version_is_refused_before_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_torch_npu(tmp_path, monkeypatch, "1.11.0", "raise AssertionError('imported')")
    with pytest.raises(ConfigError, match=r"torch_npu is 1\.11\.0; pip install 'torch-npu==2"):
        choose("npu", index=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here auto takes the CUDA device")
def test_auto_takes_the_cpu_where_nothing_else_works_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_torch_npu(tmp_path, monkeypatch, SAME, NO_CANN)
    device, why = choose(index=0)
    assert device.place == torch.device("cpu")
    assert "no npu: torch_npu" in why
    assert "libhccl.so" in why
    assert "no cuda: torch" in why


def test_a_kind_that_is_asked_for_is_taken_or_refused_and_nothing_else() -> None:
    assert choose("cpu", index=3).why == "it was asked for"
    with pytest.raises(ConfigError, match="devices are auto, npu, cuda, cpu; 'tpu' was asked for"):
        choose("tpu", index=0)
    assert KINDS[0] == "auto"


def test_stages_on_a_device_that_is_no_kind_of_ours_are_refused() -> None:
    assert device_of(torch.device("cpu")).backend == "gloo"
    with pytest.raises(ConfigError, match="one is on meta"):
        device_of(torch.device("meta"))


def test_the_cpu_never_is_behind() -> None:
    device = choose("cpu", index=0).device
    device.select()
    event = device.current_stream().record_event()
    device.stream().wait_event(event)
    assert event.query()
    assert event.elapsed_time(device.event()) == 0
    named = device.range(Action(Kind.F, 2, 3))
    with device.on(device.stream()), named, device.autocast(torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    state = device.random_state()
    first = torch.rand(3)
    device.set_random_state(state)
    assert torch.equal(first, torch.rand(3))
    assert device.memory().allocated > 0


class _Group:
    """Of rank 1 of 4; keeps what is registered."""

    def __init__(self) -> None:
        self.registered: tuple[object, ...] = ()

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 4

    def _register_backend(self, *registered: object) -> None:
        self.registered = registered


class _Options:
    def __init__(self) -> None:
        self.config = SimpleNamespace()


class _Backend:
    Options = _Options

    def __init__(self, *made_with: object) -> None:
        self.made_with = made_with


OPTIONS = LaneOptions(transfer_s=9, buffer_mb=64, traffic_class=132)


def test_a_lane_on_cuda_is_made_with_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no CUDA: what the adapter gives to torch."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", _Backend, raising=False)
    monkeypatch.delenv("NCCL_BUFFSIZE", raising=False)
    with pytest.raises(ConfigError, match="local rank 2, and 2 CUDA devices are visible"):
        Cuda(2)
    group: Any = _Group()
    store = dist.HashStore()
    Cuda(1).add_backend(group, store, name="npu_pipe_down", options=OPTIONS)
    place, kind, backend = group.registered
    assert (place, kind) == (torch.device("cuda", 1), dist.ProcessGroup.BackendType.NCCL)
    assert backend.made_with[:3] == (store, 1, 4)
    made = backend.made_with[3]
    assert (made._timeout, made.group_name) == (timedelta(seconds=9), "npu_pipe_down")
    assert made.global_ranks_in_group == [0, 1, 2, 3]
    assert made.config.traffic_class == 132
    assert os.environ["NCCL_BUFFSIZE"] == str(64 << 20)


def test_hccl_is_told_what_was_given_in_its_own_words() -> None:
    assert hccl_variables(OPTIONS) == {
        "P2P_HCCL_BUFFSIZE": "64",
        "HCCL_RDMA_TC": "132",
        "HCCL_EXEC_TIMEOUT": "9",
    }
    others = LaneOptions(service_level=4, expansion_mode=2)
    assert hccl_variables(others) == {"HCCL_RDMA_SL": "4", "HCCL_OP_EXPANSION_MODE": "AI_CPU"}
    assert hccl_variables(LaneOptions(expansion_mode=0)) == {}
