"""Frozen dataclasses from TOML files and back.

A nested dataclass is a table. Every key has to be known and every value of the type that the
field says (a whole number may stand for a float); a field that may be None is left out for None,
and a member of an enum is written as its text.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import tomli_w

from npu_pipe.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["flatten", "read_toml", "to_toml"]

C = TypeVar("C", bound="DataclassInstance")

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    Path: "a string (a path)",
    dict: "a table",
}


def read_toml(config: type[C], path: str | Path) -> C:
    """Read a config from a TOML file; keys left out take their defaults.

    Raises ConfigError for a file that cannot be read, is not TOML, holds an unknown key, or a
    value of the wrong type. A pipe is refused: every rank reads the file for itself.
    """
    try:
        text = _read(Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a job is read from a TOML file", f"{path}: {_reason(error)}", "check the path"
        ) from error
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: nested too deep
        raise ConfigError(
            "a job file is TOML (https://toml.io)", f"{path}: {error}", "mend that line"
        ) from error
    return _from_table(config, table, prefix="", path=path, known=_keys(config))


def to_toml(config: DataclassInstance) -> str:
    """The text of a file that `read_toml` reads as an equal config."""
    return tomli_w.dumps(_to_table(config))


def flatten(config: DataclassInstance) -> dict[str, str | int | float | bool | None]:
    """Every setting by its dotted key, as JSON has them."""
    flat: dict[str, str | int | float | bool | None] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            flat |= {f"{field.name}.{key}": inner for key, inner in flatten(value).items()}
        else:
            flat[field.name] = _plain(value)
    return flat


def _read(path: Path) -> str:
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError("it is a pipe or a device; save it as a file")
    return path.read_text(encoding="utf-8")


def _from_table(
    config: type[C], table: Mapping[str, Any], *, prefix: str, path: str | Path, known: list[str]
) -> C:
    hints = get_type_hints(config)
    values = {}
    for key, value in table.items():
        name = prefix + key
        if key not in hints:
            close = difflib.get_close_matches(name, known, n=1)
            close = close or [k for k in known if k.split(".")[-1] == key]
            raise ConfigError(
                f"the keys of {f'[{prefix[:-1]}]' if prefix else 'a job file'} are "
                f"{', '.join(hints)}",
                f"{path} has {name!r}",
                f"did you mean {close[0]!r}?" if close else "take it out",
            )
        values[key] = _value(hints[key], value, name=name, path=path, known=known)
    return config(**values)


def _value(hint: Any, value: Any, *, name: str, path: str | Path, known: list[str]) -> Any:
    kind = next((arg for arg in get_args(hint) if arg is not NoneType), hint)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _from_table(kind, value, prefix=f"{name}.", path=path, known=known)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _member(kind, value, name=name, path=path)
    expected = dict if is_dataclass(kind) else {Path: str}.get(kind, kind)
    if kind is float and type(value) is int:
        return float(value) if abs(value) < 2**1000 else math.inf
    if type(value) is expected:
        return kind(value)
    raise ConfigError(
        f"{name} is {_NAMES[dict if is_dataclass(kind) else kind]}",
        f"{path} gives {value!r}, {_NAMES.get(type(value), f'a {type(value).__name__}')}",
        f"give {name} {_NAMES[dict if is_dataclass(kind) else kind]}",
    )


def _member(kind: type[Enum], value: Any, *, name: str, path: str | Path) -> Enum:
    texts = [str(each.value) for each in kind]
    if value in texts:
        return kind(value)
    word = value if isinstance(value, str) else ""
    close = difflib.get_close_matches(word, texts, n=1)
    raise ConfigError(
        f"{name} is {' or '.join(map(repr, texts))}",
        f"{path} gives {value!r:.80}",
        f"did you mean {close[0]!r}?" if close else f"give {name} one of them",
    )


def _keys(config: type[DataclassInstance], prefix: str = "") -> list[str]:
    """The dotted keys of a config, tables first."""
    keys = []
    for key, hint in get_type_hints(config).items():
        keys.append(prefix + key)
        if is_dataclass(hint) and isinstance(hint, type):
            keys += _keys(hint, f"{prefix}{key}.")
    return keys


def _to_table(config: DataclassInstance) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            table[field.name] = _to_table(value)
        elif value is not None:
            table[field.name] = _plain(value)
    return table


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
