"""Inventory: what devices a host has, and whether what drives them fits together."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Any

import torch

from npu_pipe.device.choose import KINDS, choose
from npu_pipe.device.cpu import Cpu
from npu_pipe.device.cuda import why_no_cuda
from npu_pipe.device.device import Device
from npu_pipe.device.npu_package import why_no_npu
from npu_pipe.device.versions import Versions, minor_of
from npu_pipe.errors import ConfigError
from npu_pipe.finding import Finding, Verdict, refusal

__all__ = [
    "DeviceFacts",
    "device_facts",
    "device_findings",
    "is_bare",
    "pairing_findings",
    "room_on",
    "visible_devices",
]

_TAKEN = 0.1  # of a device's memory, by somebody else
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """kind: as `npu_pipe.device.choose` names it. index: among those of the host that are visible.
    Bytes are None where nobody counts them."""

    kind: str
    index: int
    name: str
    total_bytes: int | None
    free_bytes: int | None

    def __str__(self) -> str:
        place = self.kind if self.total_bytes is None else f"{self.kind}:{self.index} {self.name}"
        if self.total_bytes is None or self.free_bytes is None:
            return place
        return f"{place}, {self.free_bytes / _GIB:.1f} of {self.total_bytes / _GIB:.1f} GiB free"


def pairing_findings(versions: Versions, *, wanted: str) -> tuple[Finding, ...]:
    """Whether the versions fit each other. wanted: kind of device, which decides what must fit."""
    found = [Finding("versions", versions.told())]
    if versions.torch is None:
        found.append(
            Finding(
                "pairing",
                "torch is not installed",
                Verdict.REFUSE,
                "pip install 'torch>=2.10,<2.14'",
            )
        )
        return tuple(found)
    worst = Verdict.REFUSE if wanted == "npu" else Verdict.WARN
    if versions.torch_npu is not None:
        if minor_of(versions.torch) != minor_of(versions.torch_npu):
            missing = why_no_npu()
            assert missing is not None
            return (*found, refusal("pairing", missing, verdict=worst))
        if is_bare(versions):
            found.append(
                Finding(
                    "pairing",
                    f"torch_npu {versions.torch_npu} is here, and does not load: CANN is missing, "
                    "or not in LD_LIBRARY_PATH",
                    worst,
                    "install CANN and source its set_env.sh, or compute on the CPU",
                )
            )
        if versions.npu_driver is None and versions.cann is not None:
            found.append(
                Finding(
                    "pairing",
                    f"CANN {versions.cann} is here, and no driver's version.info",
                    Verdict.WARN,
                    "install the driver; in a container, map /usr/local/Ascend/driver and "
                    "/etc/ascend_install.info into it",
                )
            )
    elif versions.npu_driver is not None:
        found.append(
            Finding(
                "pairing",
                f"the host has an NPU's driver {versions.npu_driver}, and no torch_npu",
                worst,
                f"pip install 'torch-npu=={minor_of(versions.torch)}.*'",
            )
        )
    if versions.cuda_driver is not None and versions.cuda is None:
        found.append(
            Finding(
                "pairing",
                f"the host has NVIDIA's driver {versions.cuda_driver}, and torch "
                f"{versions.torch} is built without CUDA",
                Verdict.REFUSE if wanted == "cuda" else Verdict.WARN,
                "install a CUDA build of torch, or compute on the CPU",
            )
        )
    return tuple(found)


def is_bare(versions: Versions) -> bool:
    """Whether torch_npu is installed and cannot be loaded, as without CANN."""
    missing = None if versions.torch_npu is None else why_no_npu()
    return missing is not None and "does not load" in missing.facts


def device_findings(wanted: str, *, local_ranks: int) -> tuple[Finding, ...]:
    """Whether each rank of this host can have a device of the kind; loads what drives them."""
    try:
        kind = choose(wanted, index=0)
    except ConfigError as error:
        return (refusal("devices", error),)
    place = kind.device.place.type
    devices = visible_devices(place)
    names = sorted({each.name for each in devices})
    facts = f"{len(devices)} {place} ({', '.join(names)})" if devices else place
    if wanted == "auto" and kind.why != "there is one":
        facts += f": {kind.why}"
    if devices and local_ranks > len(devices):
        return (
            Finding(
                "devices",
                f"each rank has a device of its own; {facts}, and {local_ranks} ranks on the host",
                Verdict.REFUSE,
                "start fewer ranks on a host, or look at *_VISIBLE_DEVICES",
            ),
        )
    return (Finding("devices", facts),)


def visible_devices(kind: str) -> tuple[DeviceFacts, ...]:
    """Of an accelerator's kind, without using any of them; none for the CPU."""
    missing = {"npu": why_no_npu, "cuda": why_no_cuda}.get(kind)
    if kind not in KINDS or missing is None or missing() is not None:
        return ()
    module: Any = torch.get_device_module(kind)
    return tuple(
        DeviceFacts(
            kind,
            index,
            str(module.get_device_name(index)),
            int(module.get_device_properties(index).total_memory),
            None,
        )
        for index in range(module.device_count())
    )


def room_on(device: Device) -> float:
    """Bytes that are free on the device of this rank, which is selected; of the host, nobody
    counts them."""
    free = device_facts(device)[0].free_bytes
    return math.inf if free is None else free


def device_facts(device: Device) -> tuple[DeviceFacts, tuple[Finding, ...]]:
    """Of the device of this rank, which is selected; and what is wrong with it."""
    kind = device.place.type
    if isinstance(device, Cpu):
        return DeviceFacts(kind, 0, "the host's memory", None, None), ()
    module: Any = torch.get_device_module(kind)
    free, total = map(int, module.mem_get_info(device.place))
    name = str(module.get_device_name(device.place))
    facts = DeviceFacts(kind, device.place.index or 0, name, total, free)
    if free > (1 - _TAKEN) * total:
        return facts, ()
    tool = next(filter(shutil.which, ("npu-smi", "nvidia-smi")), "the driver's tool")
    taken = Finding(
        "memory",
        f"{facts}: something else holds {(total - free) / _GIB:.1f} GiB",
        Verdict.WARN,
        f"end what holds it ({tool} info lists it), or plan with what is free",
    )
    return facts, (taken,)
