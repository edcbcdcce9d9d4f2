"""torch_npu, the package: the only file that imports it, and that may find it unusable.

It pairs with torch by the first two numbers of the version, and needs CANN: without it, the import
itself fails.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from npu_pipe.errors import ConfigError

__all__ = ["torch_npu", "why_no_npu"]

_DISTRIBUTION = "torch-npu"


def why_no_npu() -> ConfigError | None:
    """What is missing to use an NPU; None if nothing is. Imports torch_npu if it may work."""
    rule = "an NPU is used through torch_npu of torch's own version, and CANN"
    try:
        found = version(_DISTRIBUTION)
    except PackageNotFoundError:
        return ConfigError(
            rule,
            "torch_npu is not installed",
            f"pip install 'torch-npu=={_minor(torch.__version__)}.*', or compute on the CPU",
        )
    if _minor(found) != _minor(torch.__version__):
        return ConfigError(
            rule,
            f"torch is {torch.__version__} and torch_npu is {found}",
            f"pip install 'torch-npu=={_minor(torch.__version__)}.*', or compute on the CPU",
        )
    try:
        module = torch_npu()
    except Exception as error:  # it raises whatever it likes where something is missing
        return ConfigError(
            rule,
            f"torch_npu {found} does not load: {_first_line(error)}",
            "install CANN and source its set_env.sh, or compute on the CPU",
        )
    try:
        why = "" if module.npu.device_count() else "there is none"
    except RuntimeError as error:  # of a driver that is missing, or of another CANN
        why = _first_line(error)
    if why:
        return ConfigError(
            rule,
            f"torch_npu loads, and finds no NPU: {why}",
            "look at npu-smi info and at ASCEND_RT_VISIBLE_DEVICES, or compute on the CPU",
        )
    return None


def torch_npu() -> Any:
    return importlib.import_module("torch_npu")


def _minor(text: str) -> str:
    return ".".join(text.split("+")[0].split(".")[:2])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
