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
    """Its tensors lie on the host, and all of it is one stream. has_passed: what its events say.
    has_done: whether it has come to the end of what it was given, for who waits for that."""

    place = torch.device("cpu")

    def __init__(self) -> None:
        self.questions, self.has_passed = 0, True
        self.waits, self.has_done = 0, threading.Event()

    def select(self) -> None:
        """There is one."""

    def stream(self) -> Any:
        return self

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield

    def record_event(self) -> Any:
        self.questions += 1
        return SimpleNamespace(query=lambda: self.has_passed)

    def synchronize(self) -> None:
        self.waits += 1
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
    """After the library has said that all has been done."""
    wait((probe._end,), timeout=10)
    probe.look()


def test_a_device_that_answers_is_asked_again_each_second_and_the_library_never(
    clock: list[float],
) -> None:
    """A thread that waits in the library for a queue to empty holds up what others give it: a
    forward of 50 ms was seen to take 250."""
    device = _Device()
    probe = probe_of(device)
    for _ in range(100):
        clock[0] += 0.1
        probe.look()
    assert 8 <= device.questions <= 11
    assert device.waits == 0


def test_a_queue_that_drops_what_it_is_given_is_told_with_the_next_question(
    clock: list[float],
) -> None:
    probe = probe_of(_Device())
    probe._there.fill_ = lambda number: None  # and its events say that all has been done
    clock[0] = 1.1
    probe.look()  # asks
    with pytest.raises(RuntimeError, match="the device does nothing any more"):
        probe.look()


def test_a_queue_that_drops_all_is_told_when_the_library_says_that_it_is_empty(
    clock: list[float],
) -> None:
    device = _Device()
    probe = probe_of(device)
    probe._there.fill_ = lambda number: None
    clock[0] = 1.1
    probe.look()  # asks
    device.has_passed = False  # and there is no event any more
    clock[0] = 4
    probe.look()
    device.has_done.set()
    with pytest.raises(RuntimeError, match="the device does nothing any more"):
        answered(probe)


def test_a_queue_that_is_slow_may_take_its_time(clock: list[float]) -> None:
    """It compiles an operator, say."""
    device = _Device()
    device.has_passed = False
    probe = probe_of(device)
    for clock[0] in (1, 3, 1000):
        probe.look()
    assert device.questions == 1
    device.has_done.set()
    answered(probe)
    assert (device.questions, device.waits) == (2, 1)


def test_what_the_library_says_on_being_asked_is_raised(clock: list[float]) -> None:
    device = _Device()
    device.has_passed = False

    def fail() -> None:
        raise ValueError("EI0002")

    device.synchronize = fail  # type: ignore[method-assign]
    probe = probe_of(device)
    clock[0] = 3

    def look() -> None:
        probe.look()  # asks, and may be answered by then
        answered(probe)

    with pytest.raises(ValueError, match="EI0002"):
        look()
