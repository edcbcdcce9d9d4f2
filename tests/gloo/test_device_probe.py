"""Whether a device that nobody hears from is slow, or does nothing any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npu_pipe.comm import device_probe
from npu_pipe.comm.device_probe import DeviceProbe


class _Device:
    """Its tensors lie on the host, and all of it is one stream. passes: what events say."""

    place = torch.device("cpu")

    def __init__(self) -> None:
        self.events, self.passes = 0, True

    def stream(self) -> Any:
        return self

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        yield

    def record_event(self) -> Any:
        self.events += 1
        return self

    def query(self) -> bool:
        return self.passes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [0.0]
    monkeypatch.setattr(device_probe.time, "monotonic", lambda: now_s[0])
    return now_s


def probe_of(device: _Device) -> Any:
    made: Any = device
    return DeviceProbe(made)


def test_a_device_that_answers_is_asked_again_each_second(clock: list[float]) -> None:
    device = _Device()
    probe = probe_of(device)
    for _ in range(1000):
        clock[0] += 0.1
        probe.look()
    assert 80 <= device.events <= 101


def test_a_queue_that_drops_what_it_is_given_is_told_with_the_next_question(
    clock: list[float],
) -> None:
    probe = probe_of(_Device())
    probe.look()
    probe._there.fill_ = lambda number: None  # and events pass
    clock[0] = 1.1
    probe.look()  # asks
    with pytest.raises(RuntimeError, match="the device does nothing any more"):
        probe.look()


def test_a_queue_that_is_slow_has_five_minutes(clock: list[float]) -> None:
    device = _Device()
    device.passes = False
    probe = probe_of(device)
    clock[0] = 299
    probe.look()
    clock[0] = 301
    with pytest.raises(RuntimeError, match="the device does nothing any more"):
        probe.look()
