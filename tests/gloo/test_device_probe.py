"""Whether a device that nobody hears from is slow, or does nothing any more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_pipe.comm import device_probe
from npu_pipe.comm.device_probe import DeviceProbe


class _Device:
    """Its tensors lie on the host, and all of it is one stream. has_done: whether it has come to
    the end of what it was given."""

    place = torch.device("cpu")

    def __init__(self) -> None:
        self.asked, self.has_done = 0, threading.Event()
        self.has_done.set()

    def select(self) -> None:
        """There is one."""

    def stream(self) -> Any:
        return self

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        self.asked += 1
        self.has_done.wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    fake = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr(device_probe, "time", fake)
    return now_s


def probe_of(device: _Device) -> Any:
    made: Any = device
    return DeviceProbe(made)


def answered(probe: Any) -> None:
    wait((probe._done,), timeout=10)
    probe.look()


def test_a_device_that_answers_is_asked_again_each_second(clock: list[float]) -> None:
    device = _Device()
    probe = probe_of(device)
    for _ in range(100):
        clock[0] += 0.1
        answered(probe)
    answered(probe)
    assert 8 <= device.asked <= 11


def test_a_queue_that_drops_what_it_is_given_is_told_with_the_next_question(
    clock: list[float],
) -> None:
    probe = probe_of(_Device())
    answered(probe)
    probe._there.fill_ = lambda number: None  # and the library says that all has been done
    clock[0] = 1.1
    answered(probe)  # asks
    with pytest.raises(RuntimeError, match="the device does nothing any more"):
        answered(probe)


def test_a_queue_that_is_slow_may_take_its_time(clock: list[float]) -> None:
    """It compiles an operator, say."""
    device = _Device()
    device.has_done.clear()
    probe = probe_of(device)
    clock[0] = 1000
    probe.look()
    device.has_done.set()
    answered(probe)


def test_what_the_library_says_on_being_asked_is_raised() -> None:
    device = _Device()
    device.synchronize = lambda: int("EI0002")  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="EI0002"):
        answered(probe_of(device))
