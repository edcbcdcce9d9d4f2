"""Workloads as TOML files: the fields of `Workload`, lists with one value a layer.

forward = [1.0, 2.0, 2.0, 1.5]
input_grad = [1.0, 2.0, 2.0, 1.5]
weight_grad = [0.5, 2.0, 2.0, 1.0]
transfer = [0.1, 0.1, 0.1]          # one a boundary between layers
activation_bytes = [4e6, 16e6, 16e6, 8e6]
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import tomli_w

from npu_pipe.errors import ConfigError
from npu_pipe.files import write_whole
from npu_pipe.planner.workload import Workload

__all__ = ["read_workload", "write_workload"]


def read_workload(path: str | Path) -> Workload:
    """Read a workload from a TOML file; keys left out take their defaults.

    Raises ConfigError for a file that cannot be read, an unknown or missing key or a value of the
    wrong type, CostsError for values that do not fit each other.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, not TOML, no path
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            "costs are read from a TOML file", f"{path}: {reason}", "mend it, or check the path"
        ) from error
    known = {field.name: field for field in fields(Workload)}
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise ConfigError(
                f"the keys of a file of costs are {', '.join(known)}",
                f"{path} has {key!r}",
                f"did you mean {close[0]!r}?" if close else "take it out",
            )
    for name, field in known.items():
        if name not in table and field.default is MISSING:
            raise ConfigError(
                "a file of costs gives forward, input_grad, weight_grad and transfer",
                f"{path} has no {name!r}",
                f"add {name} = [...]",
            )
    return Workload(**{key: _value(known[key], value, path) for key, value in table.items()})


def write_workload(workload: Workload, path: str | Path) -> None:
    """Write a file that `read_workload` reads as an equal workload. Raises ConfigError."""
    table = {}
    for field in fields(workload):
        value = getattr(workload, field.name)
        if value != field.default:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    write_whole(tomli_w.dumps(table), path)


def _value(field: Field[Any], value: Any, path: str | Path) -> Any:
    wanted = "a list of numbers"
    is_right = type(value) is list and all(type(item) in (int, float) for item in value)
    if type(field.default) is bool:
        wanted, is_right = "true or false", type(value) is bool
    elif type(field.default) is float:
        wanted, is_right = "a number", type(value) in (int, float)
    if not is_right:
        raise ConfigError(
            f"{field.name} is {wanted}", f"{path} gives {value!r:.60}", f"give {wanted}"
        )
    return value
