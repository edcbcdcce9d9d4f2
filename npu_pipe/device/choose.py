"""Which device a rank computes on, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import nn

from npu_pipe.device.cpu import Cpu
from npu_pipe.device.cuda import Cuda, why_no_cuda
from npu_pipe.device.device import Device
from npu_pipe.device.kinds import KINDS, require_known
from npu_pipe.device.npu import Npu
from npu_pipe.device.npu_package import why_no_npu
from npu_pipe.errors import ConfigError

__all__ = [
    "KINDS",
    "Choice",
    "backend_of",
    "choose",
    "device_of",
    "device_of_modules",
    "require_known",
    "require_usable",
]


class _Kind(NamedTuple):
    why_not: Callable[[], ConfigError | None]
    make: Callable[[int], Device]


_KINDS: Mapping[str, _Kind] = {
    "npu": _Kind(why_no_npu, Npu),
    "cuda": _Kind(why_no_cuda, Cuda),
    "cpu": _Kind(lambda: None, lambda _: Cpu()),
}


class Choice(NamedTuple):
    """why: in a few words, for the user."""

    device: Device
    why: str


def choose(wanted: str = "auto", *, index: int) -> Choice:
    """The device of the rank with this local index.

    Raises ConfigError, one sentence, for a kind that is not known or cannot be used here.
    """
    require_known(wanted)
    if wanted != "auto":
        return Choice(_KINDS[wanted].make(index), "it was asked for")
    refused: list[str] = []
    for name, kind in _KINDS.items():
        missing = kind.why_not()
        if missing is None:
            why = "; ".join(refused) or "there is one"
            return Choice(kind.make(index), why)
        refused.append(f"no {name}: {missing.facts}")
    raise AssertionError("there always is a CPU")


def backend_of(wanted: str) -> str:
    """What devices of the kind send by; as the CPU, where none of them can be used."""
    try:
        return choose(wanted, index=0).device.backend
    except ConfigError:
        return Cpu.backend


def require_usable(wanted: str) -> None:
    """Raise ConfigError, one sentence, for a kind that is not known or cannot be used here."""
    if wanted != "auto":
        require_known(wanted)
        missing = _KINDS[wanted].why_not()
        if missing is not None:
            raise missing


def device_of(place: torch.device) -> Device:
    """The device that tensors in this place are on; without an index, the current one.

    Raises ConfigError if it is of no kind that can be used here.
    """
    kind = _KINDS.get(place.type)
    if kind is None:
        raise ConfigError(
            f"stages are on a device of the kinds {', '.join(_KINDS)}",
            f"one is on {place}",
            "move it there",
        )
    index = place.index or 0
    if place.index is None and place.type != "cpu" and kind.why_not() is None:
        index = torch.get_device_module(place.type).current_device()
    return kind.make(index)


def device_of_modules(modules: Iterable[nn.Module]) -> Device:
    """The device that their parameters are on; the CPU if they have none. See `device_of`."""
    parameters = (parameter for module in modules for parameter in module.parameters())
    first = next(parameters, None)
    return Cpu() if first is None else device_of(first.device)
